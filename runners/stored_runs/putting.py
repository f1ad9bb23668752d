"""A workspace's files, put up where they have changed; one pass at a time, by one thread."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from torchrelay.records import dataclass
from torchrelay.runners.stored_runs.joining import STATUS
from torchrelay.runners.stored_runs.run_files import MOST_FILES, RunFiles
from torchrelay.runners.stored_runs.run_names import DEEPEST, in_order, is_name, travels

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
