"""Files of a workspace, uploaded where they have changed, by a thread that the training does not wait for.

    nudge()   something has changed: a pass soon
    flush(s)  return when all that is here now was put, or after so many seconds
    close(s)  the same for the last time, trying again; then nothing is put any more

What the store has in another version too is joined: one of the two goes on.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torchrelay.errors import FencedError, RelayError
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
            for entry in _entries(self.root / here):
                name = f"{here}/{entry.name}" if here else entry.name
                if not is_name(entry.name) or not travels(name) or name.count("/") >= DEEPEST:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    left.append(name)
                elif not self._wanted(name):
                    continue
                elif not entry.is_file(follow_symlinks=False):
                    self.links.add(name)
                elif (seen := _seen(entry)) is not None:
                    count += 1
                    yield name, seen


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError:  # gone meanwhile
        return []


def _seen(entry: os.DirEntry[str]) -> Seen | None:
    try:
        found = entry.stat(follow_symlinks=False)
    except OSError:
        return None
    return Seen(found.st_size, found.st_mtime_ns, found.st_ino)


EVERY_SECS = 5.0
_LEAST_SECS = 1.0
_ASK_AGAIN_SECS = 5.0
"""How long an answer counts that the run is still ours, where a pass takes longer than that."""
_LONGEST_SECS = 60.0
SLOW_SECS = 60.0
"""A pass that takes longer is told of."""


class BackgroundUploader:
    """Puts up with `putter`, every `every_secs` and when nudged, until `close`.

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
        self._putter, self._may_put, self._look_around = putter, may_put, look_around
        self._every_secs = every_secs
        self._turn = threading.Condition()
        self._asked = self._done = self._failures = 0
        self._nudged = self._over = self._fenced = False
        self._busy_since: float | None = None
        self._trouble: str | None = None
        self._told = False
        self._left: tuple[str, ...] = ()
        self._thread = threading.Thread(target=self._run, name="torchrelay-put-up", daemon=True)
        self._thread.start()

    def nudge(self) -> None:
        """Look soon; returns at once."""
        with self._turn:
            self._nudged = True
            self._turn.notify_all()

    def flush(self, secs: float) -> bool:
        """Whether all that is here now was put within so many seconds; False too after a first failure."""
        return self._flush(secs, again=False)

    def close(self, secs: float) -> tuple[str, ...]:
        """Put what is left, try again until then, and stop; returns the names that the store lacks."""
        clean = self._flush(secs, again=True)
        with self._turn:
            self._over = True
            self._turn.notify_all()
        self._thread.join(timeout=0.5 if clean else 0.0)
        if clean or self._fenced:
            return ()
        return self._left or tuple(self._putter.changed(patient=False))

    @property
    def fenced(self) -> bool:
        """Whether the run is another's by now."""
        return self._fenced

    @property
    def reason(self) -> str:
        """Why the last pass did not come to its end; empty where it did, or is on its way."""
        return self._trouble or ""

    def trouble(self) -> str | None:
        """What went wrong since all was well, told once; None where nothing did."""
        with self._turn:
            since = self._busy_since
            slow = since is not None and time.monotonic() - since > SLOW_SECS
            found = self._trouble or (f"the store has not answered for {SLOW_SECS:.0f} s" if slow else None)
            if found is None or self._told:
                return None
            self._told = True
            return found

    def _flush(self, secs: float, *, again: bool) -> bool:
        until = time.monotonic() + secs
        with self._turn:
            self._asked += 1
            goal, failures = self._asked, self._failures
            self._turn.notify_all()

            def over() -> bool:
                return self._done >= goal or self._over or (not again and self._failures > failures)

            self._turn.wait_for(over, timeout=max(0.0, until - time.monotonic()))
            return self._done >= goal

    # The thread

    def _run(self) -> None:
        while True:
            with self._turn:
                self._turn.wait_for(self._is_time, timeout=self._pause_secs())
                if self._over:
                    return
                goal, patient = self._asked, self._asked == self._done
                self._nudged, self._busy_since = False, time.monotonic()
            trouble = self._pass(patient=patient)
            with self._turn:
                self._busy_since = None
                self._note(trouble, goal)
                if self._fenced:
                    return
                # Nudges wait for a moment, so that many of them are one pass; who wants all of it does not.
                self._rest(_LEAST_SECS if trouble is None else self._pause_secs(), goal)

    def _rest(self, secs: float, goal: int) -> None:
        self._turn.wait_for(lambda: self._over or self._asked > goal, timeout=secs)

    def _is_time(self) -> bool:
        return self._nudged or self._over or self._asked > self._done

    def _pause_secs(self) -> float:
        if not self._failures:
            return self._every_secs
        longest = 2.0 if self._asked > self._done else _LONGEST_SECS
        return float(min(0.25 * 2 ** min(self._failures, 10), longest))

    def _note(self, trouble: str | None, goal: int) -> None:
        self._trouble = trouble
        if trouble is None:
            self._done, self._failures, self._told = max(self._done, goal), 0, False
        else:
            self._failures += 1
        if self._fenced:
            self._done = self._asked
        self._turn.notify_all()

    def _pass(self, *, patient: bool) -> str | None:
        """What went wrong; None where the store has all that it is to have by now."""
        left: dict[str, object] = {}
        try:
            self._look_around()
            left.update(found := self._putter.changed(patient=patient))
            asked: float | None = None
            for name, seen in found.items():
                if self._over:
                    return "it was given up"
                if asked is None or time.monotonic() - asked > _ASK_AGAIN_SECS:
                    self._may_put()
                    asked = time.monotonic()
                self._putter.put(name, seen)
                del left[name]
        except FencedError:
            self._fenced = True
        except Exception as error:  # whatever a client of a store raises, the training goes on
            return f"{error}" or type(error).__name__
        finally:
            self._left = tuple(left)
        return None
