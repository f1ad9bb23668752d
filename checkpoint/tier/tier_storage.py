"""The storage of a run with a near place: written near, read near and, where that lacks a file, far.

Only what belongs to tries is looked for far. The log, the job file and everything else of the near
directory are its own, for two logs that showed through each other would be a mixture of two histories.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import cast

from torchrelay.checkpoint.format.manifest.schema import DATA
from torchrelay.checkpoint.storage.base import LongReads, ReadHandle, SingleWriter, Storage, reads_of
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.checkpoint.storage.local_io import LocalReadHandle


class TierStorage(LocalStorage):
    """A local directory whose `data/` shows, behind it, that of `far`.

    A try is write-once and has one name in both places, so a file of that name has the same bytes in both, or
    it is damaged or unfinished in one of them: proofs tell.
    """

    def __init__(self, near: str | Path, far: Storage, *, single_writer: SingleWriter = None) -> None:
        super().__init__(near, single_writer=single_writer)
        self.far = far
        self.near = LocalStorage(near, single_writer=single_writer)
        """The same directory alone."""
        self._from_far: frozenset[str] = frozenset()

    def prefer_far(self, tries: Iterable[str]) -> None:
        """Read these tries far only from now on: their near files are damaged."""
        self._from_far |= frozenset(tries)

    def prefer_near(self, tries: Iterable[str]) -> None:
        """Read these tries near again."""
        self._from_far -= frozenset(tries)

    def prefers_far(self, try_name: str) -> bool:
        """Whether a try is read far only."""
        return try_name in self._from_far

    def stat(self, path: str) -> int | None:
        """The size near, else far."""
        if self._near_counts(path):
            size = super().stat(path)
            if size is not None or not _in_try(path):
                return size
        return self.far.stat(path)

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        """From near, else from far."""
        if self._near_counts(path):
            try:
                return self.near.read_range(path, offset, length)
            except FileNotFoundError:
                if not _in_try(path):
                    raise
        return self.far.read_range(path, offset, length)

    def read_into(self, path: str, offset: int, destination: memoryview) -> int:
        """From near, else from far."""
        if self._near_counts(path):
            try:
                return self.near.read_into(path, offset, destination)
            except FileNotFoundError:
                if not _in_try(path):
                    raise
        return self.far.read_into(path, offset, destination)

    def open_read(self, path: str) -> LocalReadHandle:
        """Near, else far: a handle of the place that has the file."""
        if self._near_counts(path):
            try:
                return super().open_read(path)
            except FileNotFoundError:
                if not _in_try(path):
                    raise
        far: ReadHandle
        far = self.far.open_read(path) if isinstance(self.far, LongReads) else reads_of(self.far, path)
        return cast(LocalReadHandle, far)  # the same methods; nobody asks for more

    def _near_counts(self, path: str) -> bool:
        return not (_in_try(path) and path.split("/")[1] in self._from_far)


def _in_try(path: str) -> bool:
    return path.startswith(f"{DATA}/") and path.count("/") == 2
