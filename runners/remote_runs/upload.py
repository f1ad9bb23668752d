"""Upload changed files of a workspace in a background thread.

    wake()    something has changed: upload soon
    flush(s)  return when all current files are uploaded, or after s seconds
    close(s)  the same for the last time, with retries; then nothing is uploaded any more

If the store has a different version of a file, one of the two is chosen.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchrelay.checkpoint.tiering.upload import Uploader
from torchrelay.errors import RelayError
from torchrelay.metadata.fs import open_regular, read_json
from torchrelay.records import dataclass
from torchrelay.runners.remote_runs.download import MOST_FILES, RunFiles
from torchrelay.runners.remote_runs.names import DEEPEST, grows, in_order, is_name, travels

_PIECE_BYTES = 1 << 20
STATUS = "status.json"


def local_is_newer(name: str, local: Path, brought: Path) -> bool:
    """Return True if the local copy is newer than the remote one.

    Append-only files: the remote copy is a prefix of the local one. status.json: higher generation, or the
    same generation and a later update. All other files: the remote copy wins.
    """
    if local.is_symlink() or not local.is_file():
        return False
    if name == STATUS:
        return _age(local) > _age(brought)
    if not grows(name):
        return False
    try:
        with open_regular(local) as longer, open_regular(brought) as shorter:
            while piece := shorter.read(_PIECE_BYTES):
                if longer.read(len(piece)) != piece:
                    return False
    except OSError:
        return False
    return True


def _age(path: Path) -> tuple[float, float]:
    try:
        found: dict[str, Any] = read_json(path) or {}
    except RelayError:
        return (-2.0, 0.0)
    known = [found.get(name) for name in ("generation", "updated")]
    generation, updated = (one if type(one) in (int, float) else -1.0 for one in known)
    return float(generation), float(updated)  # type: ignore[arg-type]


LONG_BYTES = 16 << 20
BYTES_PER_SEC = 256 << 10
"""A file that changes constantly is uploaded so rarely that it uses no more bandwidth than this."""


@dataclass(frozen=True)
class Seen:
    """Size, time and inode of a file; a difference means that it changed."""

    size: int
    mtime_ns: int
    inode: int


class Putter:
    """Track which files of a workspace the store has. `wanted` selects the names to upload.

    `links` are names that were skipped because they are links or not files.
    """

    def __init__(
        self,
        files: RunFiles,
        root: Path,
        wanted: Callable[[str], bool] = travels,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.files, self.root = files, root
        self.links: set[str] = set()
        self.kept: set[str] = set()
        """Names in the store that were not downloaded: local files must not replace them."""
        self._wanted, self._clock = wanted, clock
        self._put: dict[str, Seen] = {}
        self._not_before: dict[str, float] = {}
        self._status_version: str | None = None

    def changed(self, *, patient: bool) -> dict[str, Seen]:
        """Return the files to upload, in order; a `patient` pass skips large ones uploaded just now."""
        now = self._clock()
        seen = dict(self._scan())
        names = [
            name
            for name, one in seen.items()
            if self._put.get(name) != one
            and name not in self.kept
            and not (patient and now < self._not_before.get(name, now))
        ]
        ordered = in_order(names)
        if patient:  # small files must not wait for large ones
            ordered.sort(key=lambda name: seen[name].size > LONG_BYTES)
        return {name: seen[name] for name in ordered}

    def put(self, name: str, seen: Seen) -> None:
        """Upload the current content of a file. Raises StorageError; a file that is gone is skipped."""
        try:
            self.files.put_as_it_is(name, self.root / name)
        except FileNotFoundError:
            return
        self._put[name] = seen  # state before the upload: data appended meanwhile counts as a change
        self._not_before[name] = self._clock() + seen.size / BYTES_PER_SEC
        if name == STATUS:
            self._status_version = self.files.version(name)

    def look_at_status(self) -> None:
        """Mark the status for upload if another writer has replaced it in the store."""
        if self._status_version and self.files.version(STATUS) != self._status_version:
            self._put.pop(STATUS, None)

    def _scan(self) -> Iterator[tuple[str, Seen]]:
        left = [""]
        count = 0
        while left and count < MOST_FILES:
            here = left.pop()
            entries: list[os.DirEntry[str]] = []
            with suppress(OSError), os.scandir(self.root / here) as found:  # otherwise it is gone meanwhile
                entries = list(found)
            for entry in entries:
                name = f"{here}/{entry.name}" if here else entry.name
                if not is_name(entry.name) or not travels(name) or name.count("/") >= DEEPEST:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    left.append(name)
                elif not self._wanted(name):
                    continue
                elif not entry.is_file(follow_symlinks=False):
                    self.links.add(name)
                else:
                    try:
                        stat = entry.stat(follow_symlinks=False)
                    except OSError:
                        continue
                    count += 1
                    yield name, Seen(stat.st_size, stat.st_mtime_ns, stat.st_ino)


EVERY_SECS = 5.0
_LEAST_SECS = 1.0
_ASK_AGAIN_SECS = 5.0
"""During long passes the ownership of the run is checked again after this time."""
_FLUSH_PAUSE_SECS = 2.0
"""Longest pause after a failure while a flush waits."""
SLOW_SECS = 60.0
"""Longer passes are reported."""


class BackgroundUploader(Uploader):
    """Upload with `putter` every `every_secs` and when woken, until `close`.

    `may_put` is called before each upload, and again in long passes; it raises FencedError if another job has
    taken the run: then nothing is uploaded any more. `look_around` is called once per pass; it too may
    contact the store.
    """

    def __init__(
        self,
        putter: Putter,
        may_put: Callable[[], None],
        look_around: Callable[[], None] = lambda: None,
        every_secs: float = EVERY_SECS,
    ) -> None:
        super().__init__("torchrelay-put-up")
        self._putter, self._may_put, self._look_around = putter, may_put, look_around
        self._every_secs = every_secs
        self._awake = False
        self._asked = self._goal = self._done = self._failures = 0
        """Counts: requested flushes, those when the running pass began, finished ones; failed passes."""
        self._rest_until = 0.0
        self._busy_since: float | None = None
        self._trouble: str | None = None
        self._reported = False
        self._left: tuple[str, ...] = ()
        self.start()

    def flush(self, secs: float, *, again: bool = False) -> bool:
        """Return True if all current files were uploaded within `secs`; `again` retries failures."""
        with self._changed:
            self._asked += 1
            goal, failures = self._asked, self._failures
            self._changed.notify_all()

            def over() -> bool:
                failed = not again and self._failures > failures
                return self._done >= goal or self._stopping or self.fenced or failed

            self._changed.wait_for(over, timeout=max(0.0, secs))
            return self._done >= goal or self.fenced

    def close(self, secs: float) -> tuple[str, ...]:
        """Upload the rest with retries and stop; returns the names that the store lacks."""
        clean = self.flush(secs, again=True)
        self.stop(0.5 if clean else 0.0)
        if clean:
            return ()
        return self._left or tuple(self._putter.changed(patient=False))

    @property
    def fenced(self) -> bool:
        """True if another job has taken the run."""
        return self._fenced is not None

    @property
    def reason(self) -> str:
        """Reason of the last failed pass; empty if it succeeded or is running."""
        return self._trouble or ""

    def trouble(self) -> str | None:
        """Return the problem since the last success, once; None if there is none."""
        with self._changed:
            since = self._busy_since
            slow = since is not None and time.monotonic() - since > SLOW_SECS
            found = self._trouble or (f"the store has not answered for {SLOW_SECS:.0f} s" if slow else None)
            if found is None or self._reported:
                return None
            self._reported = True
            return found

    # The thread

    def _is_wanted(self, pause: float) -> bool:
        """Wait for the next pass; return False if the thread is to stop."""
        with self._changed:
            if pause:
                longest = _FLUSH_PAUSE_SECS if self._asked > self._done else pause
                self._changed.wait_for(self._is_flush_requested, min(pause, longest))
            else:
                # Wake-ups wait a moment, so that several become one pass; flushes do not wait.
                rest = max(0.0, self._rest_until - time.monotonic())
                self._changed.wait_for(self._is_flush_requested, rest)
                self._changed.wait_for(lambda: self._awake or self._is_flush_requested(), self._every_secs)
            self._awake, self._goal = False, self._asked
            return not self._stopping

    def _is_flush_requested(self) -> bool:
        """Return True if a flush or the stop was requested since the pass began."""
        return self._stopping or self._asked > self._goal

    def _step(self) -> bool:
        self._busy_since = time.monotonic()
        left: dict[str, object] = {}
        try:
            self._look_around()
            left.update(found := self._putter.changed(patient=self._goal == self._done))
            asked: float | None = None
            for name, seen in found.items():
                self._check_going_on()
                if asked is None or time.monotonic() - asked > _ASK_AGAIN_SECS:  # of whose run it is
                    self._may_put()
                    asked = time.monotonic()
                self._putter.put(name, seen)
                del left[name]
        finally:
            self._left, self._busy_since = tuple(left), None
        with self._changed:
            self._trouble, self._reported, self._failures = None, False, 0
            self._done, self._rest_until = self._goal, time.monotonic() + _LEAST_SECS
            self._changed.notify_all()
        return False

    def _failed(self, error: Exception) -> None:
        with self._changed:
            self._trouble = f"{error}" or type(error).__name__
            self._failures += 1
            self._changed.notify_all()
