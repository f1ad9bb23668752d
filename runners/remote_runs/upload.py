"""Files of a workspace, uploaded where they have changed, by a thread that the training does not wait for.

    wake()    something has changed: a pass soon
    flush(s)  return when all that is here now was put, or after so many seconds
    close(s)  the same for the last time, trying again; then nothing is put any more

What the store has in another version too is joined: one of the two goes on.
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


def local_goes_on(name: str, local: Path, brought: Path) -> bool:
    """Whether this host's version has what the store's has, and more, which a lost process had not put.

    Of a file that grows it does where the store's is its beginning; of the status, where it is of a later
    generation, or written later in the same. Of all others the store's counts.
    """
    if local.is_symlink() or not local.is_file():
        return False
    if name == STATUS:
        return _age(local) > _age(brought)
    return grows(name) and _begins_with(local, brought)


def _age(path: Path) -> tuple[float, float]:
    try:
        found: dict[str, Any] = read_json(path) or {}
    except RelayError:
        return (-2.0, 0.0)
    known = [found.get(name) for name in ("generation", "updated")]
    generation, updated = (one if type(one) in (int, float) else -1.0 for one in known)
    return float(generation), float(updated)  # type: ignore[arg-type]


def _begins_with(longer: Path, shorter: Path) -> bool:
    try:
        with open_regular(longer) as one, open_regular(shorter) as other:
            while piece := other.read(_PIECE_BYTES):
                if one.read(len(piece)) != piece:
                    return False
    except OSError:
        return False
    return True


LONG_BYTES = 16 << 20
BYTES_PER_SEC = 256 << 10
"""A file that changes all the time is put again so rarely that it takes no more than this."""


@dataclass(frozen=True)
class Seen:
    """How a file looked when it was looked at; another look shows whether it was changed since."""

    size: int
    mtime_ns: int
    inode: int


class Putter:
    """Knows what of a workspace the store has. `wanted` says which names are ours to put.

    `links` are names that were passed over, because they are links or no files.
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
        """Names that lie in the store and were not brought: what is here must not take their place."""
        self._wanted, self._clock = wanted, clock
        self._put: dict[str, Seen] = {}
        self._not_before: dict[str, float] = {}
        self._status_version: str | None = None

    def changed(self, *, patient: bool) -> dict[str, Seen]:
        """What has to be put, in order; of a `patient` pass without what was put only just now."""
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
        if patient:  # nobody who looks is to wait for what takes long
            ordered.sort(key=lambda name: seen[name].size > LONG_BYTES)
        return {name: seen[name] for name in ordered}

    def put(self, name: str, seen: Seen) -> None:
        """Put one file as it is now. Raises StorageError; a file that is gone meanwhile is not put."""
        try:
            self.files.put_as_it_is(name, self.root / name)
        except FileNotFoundError:
            return
        self._put[name] = seen  # as it looked before: what was appended meanwhile is a change
        self._not_before[name] = self._clock() + seen.size / BYTES_PER_SEC
        if name == STATUS:
            self._status_version = self.files.version(name)

    def look_at_status(self) -> None:
        """Where somebody else has put a status over ours, ours is to be put again."""
        if self._status_version and self.files.version(STATUS) != self._status_version:
            self._put.pop(STATUS, None)

    def _scan(self) -> Iterator[tuple[str, Seen]]:
        left = [""]
        count = 0
        while left and count < MOST_FILES:
            here = left.pop()
            entries: list[os.DirEntry[str]] = []
            with suppress(OSError), os.scandir(self.root / here) as found:  # else it is gone meanwhile
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
"""How long an answer counts that the run is still ours, where a pass takes longer than that."""
_FLUSH_PAUSE_SECS = 2.0
"""The longest pause after a failure while somebody waits."""
SLOW_SECS = 60.0
"""A pass that takes longer is told of."""


class BackgroundUploader(Uploader):
    """Puts up with `putter`, every `every_secs` and when woken, until `close`.

    `may_put` is called before anything is put, again in a pass that takes long, and raises FencedError where
    the run is another's by now: then nothing is put any more. `look_around` is called once in a pass; it too
    may ask the store.
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
        """Flushes that were asked for, when the running pass began, and that are done; passes that failed."""
        self._rest_until = 0.0
        self._busy_since: float | None = None
        self._trouble: str | None = None
        self._told = False
        self._left: tuple[str, ...] = ()
        self.start()

    def flush(self, secs: float, *, again: bool = False) -> bool:
        """Whether all that is here now was put in so many seconds; `again`: though a pass failed."""
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
        """Put what is left, try again until then, and stop; returns the names that the store lacks."""
        clean = self.flush(secs, again=True)
        self.stop(0.5 if clean else 0.0)
        if clean:
            return ()
        return self._left or tuple(self._putter.changed(patient=False))

    @property
    def fenced(self) -> bool:
        """Whether the run is another's by now."""
        return self._fenced is not None

    @property
    def reason(self) -> str:
        """Why the last pass did not come to its end; empty where it did, or is on its way."""
        return self._trouble or ""

    def trouble(self) -> str | None:
        """What went wrong since all was well, told once; None where nothing did."""
        with self._changed:
            since = self._busy_since
            slow = since is not None and time.monotonic() - since > SLOW_SECS
            found = self._trouble or (f"the store has not answered for {SLOW_SECS:.0f} s" if slow else None)
            if found is None or self._told:
                return None
            self._told = True
            return found

    # The thread

    def _is_wanted(self, pause: float) -> bool:
        with self._changed:
            if pause:
                longest = _FLUSH_PAUSE_SECS if self._asked > self._done else pause
                self._changed.wait_for(self._is_asked_anew, min(pause, longest))
            else:
                # Nudges wait for a moment, so that many of them are one pass; who wants all of it does not.
                self._changed.wait_for(self._is_asked_anew, max(0.0, self._rest_until - time.monotonic()))
                self._changed.wait_for(lambda: self._awake or self._is_asked_anew(), self._every_secs)
            self._awake, self._goal = False, self._asked
            return not self._stopping

    def _is_asked_anew(self) -> bool:
        return self._stopping or self._asked > self._goal

    def _step(self) -> bool:
        self._busy_since = time.monotonic()
        try:
            self._put_all(patient=self._goal == self._done)
        finally:
            self._busy_since = None
        with self._changed:
            self._trouble, self._told, self._failures = None, False, 0
            self._done, self._rest_until = self._goal, time.monotonic() + _LEAST_SECS
            self._changed.notify_all()
        return False

    def _put_all(self, *, patient: bool) -> None:
        left: dict[str, object] = {}
        try:
            self._look_around()
            left.update(found := self._putter.changed(patient=patient))
            asked: float | None = None
            for name, seen in found.items():
                self._check_going_on()
                if asked is None or time.monotonic() - asked > _ASK_AGAIN_SECS:
                    self._may_put()
                    asked = time.monotonic()
                self._putter.put(name, seen)
                del left[name]
        finally:
            self._left = tuple(left)

    def _failed(self, error: Exception) -> None:
        with self._changed:
            self._trouble = f"{error}" or type(error).__name__
            self._failures += 1
            self._changed.notify_all()
