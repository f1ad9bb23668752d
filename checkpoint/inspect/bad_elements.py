"""Find NaN and Inf in the tensors of an epoch: place, number, and the first of each leaf. Needs numpy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torchrelay.checkpoint.format.dtypes import BLOCK, SIZE, block_count
from torchrelay.checkpoint.inspect.contents import (
    CAN_BE_BAD,
    CHUNK_BYTES,
    Buffer,
    Epoch,
    LeafPart,
    NodeLeaf,
    parts,
)
from torchrelay.checkpoint.inspect.statistics import bad_in, steps
from torchrelay.records import dataclass


@dataclass(frozen=True)
class BadLeaf:
    """A tensor with `nan` NaN and `inf` Inf; `first` is the index of the first in row-major order."""

    name: str
    blob: str
    dtype: str
    shape: tuple[int, ...]
    nan: int
    inf: int
    first: int

    @property
    def index(self) -> tuple[int, ...]:
        """The index of the first, one number per dimension."""
        found, rest = [], self.first
        for extent in reversed(self.shape):
            rest, at = divmod(rest, extent)
            found.append(at)
        return tuple(reversed(found))


class BadElementSearch:
    """Searches epochs of one run; blocks that were good are not read again.

    With `nan_only` Inf is ignored, because masks contain some on purpose. `loads` counts the epochs.
    """

    def __init__(self, patterns: Sequence[str] = (), *, nan_only: bool = False) -> None:
        self.loads = 0
        self._patterns, self._nan_only = patterns, nan_only
        self._good: set[tuple[str, bytes]] = set()
        self._buffer = Buffer()

    def bad_leaves(self, epoch: Epoch) -> list[BadLeaf]:
        """All leaves that have a NaN or Inf, in the order of the manifest; deleted leaves are skipped.

        Raises DamagedError, naming file, leaf and block, or StorageError.
        """
        self.loads += 1
        there = (item for item in epoch.chosen(self._patterns).values() if not epoch.gone(item))
        able = (item for item in there if item.tensor and item.leaf.dtype in CAN_BE_BAD)
        return [bad for item in able if (bad := self._look(epoch, item)) is not None]

    def _look(self, epoch: Epoch, item: NodeLeaf) -> BadLeaf | None:
        leaf, dtype = item.leaf, str(item.leaf.dtype)
        nan = inf = 0
        firsts: list[int] = []
        for part in parts(epoch, item):
            for start, stop in self._unknown(part, dtype):
                more_nan, more_inf, first = self._count(epoch, part, start, stop, dtype)
                nan, inf = nan + more_nan, inf + more_inf
                if first is not None:
                    firsts.append(part.index_of(first))
                    continue
                for block in range(start // BLOCK, block_count(stop)):
                    self._good.add((dtype, part.digests[block * SIZE : (block + 1) * SIZE]))
        if not firsts:
            return None
        return BadLeaf(item.name, leaf.blob, dtype, leaf.shape, nan, inf, min(firsts))

    def _unknown(self, part: LeafPart, dtype: str) -> Iterator[tuple[int, int]]:
        """Byte ranges of blocks that are not known to be good, at most a chunk at a time."""
        start = stop = 0
        for block in range(block_count(part.nbytes)):
            first, last = block * BLOCK, min((block + 1) * BLOCK, part.nbytes)
            known = (dtype, part.digests[block * SIZE : (block + 1) * SIZE]) in self._good
            if start < stop and (known or last - start > CHUNK_BYTES):
                yield start, stop
                start = stop = first
            start, stop = (last, last) if known else (start, last)
        if start < stop:
            yield start, stop

    def _count(
        self, epoch: Epoch, part: LeafPart, start: int, stop: int, dtype: str
    ) -> tuple[int, int, int | None]:
        """NaN, Inf, and the first bad element of a part within bytes [start, stop)."""
        nan = inf = 0
        first: int | None = None
        at = start // part.item_bytes
        for values in steps(self._buffer.filled(epoch, part, start, stop), part.item_bytes, dtype):
            more_nan, more_inf, place = bad_in(values, nan_only=self._nan_only)
            nan, inf = nan + more_nan, inf + more_inf
            if first is None and place is not None:
                first = at + place
            at += values.size
        return nan, inf, first
