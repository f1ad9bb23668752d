"""Where the bytes of a tensor lie, part by part, and verified bytes out of a part. Needs no torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from torchrelay.checkpoint.format.manifest.keys import parts_of
from torchrelay.checkpoint.format.mesh_geometry import Bounds, Interval, range_boxes, runs, volume, whole
from torchrelay.checkpoint.format.names import Box, Flat, Key, format_key
from torchrelay.checkpoint.format.shard.read_plan import ReadRequest
from torchrelay.checkpoint.format.shard.reader import ShardHeader
from torchrelay.checkpoint.inspection.contents import Epoch, Item
from torchrelay.records import dataclass

CHUNK_BYTES = 8 << 20
"""So much of a part is read at a time."""
SMALL_BYTES = 32 << 10
"""Parts up to this are read together with others."""


@dataclass(frozen=True)
class Part:
    """A stored part of a leaf of `shape`: one entry of one file.

    `run` are the elements of the leaf that it holds, where these are one run in row-major order; `box`
    is the box of a part that is none.
    """

    header: ShardHeader
    key: str
    shape: tuple[int, ...]
    item_bytes: int
    run: Interval | None
    box: Bounds | None

    @property
    def digests(self) -> bytes:
        """One digest per block."""
        return self.header.entries[self.key].digests

    @property
    def nbytes(self) -> int:
        """Bytes stored."""
        return self.header.entries[self.key].nbytes

    @property
    def elements(self) -> int:
        """Elements stored."""
        return self.nbytes // self.item_bytes

    @property
    def boxes(self) -> Iterator[tuple[Bounds, int]]:
        """The boxes of the leaf that it consists of, in stored order, each with its first element."""
        found = [self.box] if self.box is not None else range_boxes(self.shape, *(self.run or (0, 0)))
        first = 0
        for box in found:
            yield box, first
            first += volume(box)

    def index_of(self, element: int) -> int:
        """Where an element of the part stands in the row-major order of the leaf."""
        if self.run is not None:
            return self.run[0] + element
        place, extents = 0, [stop - start for start, stop in self.box or ()]
        coordinate = []
        for extent in reversed(extents):
            element, at = divmod(element, extent)
            coordinate.append(at)
        for at, (start, _), size in zip(reversed(coordinate), self.box or (), self.shape, strict=True):
            place = place * size + start + at
        return place


def parts(epoch: Epoch, item: Item) -> list[Part]:
    """The stored parts of a tensor; opens and proves the headers of their files.

    Raises DamagedError or StorageError for what the storage has.
    """
    leaf = item.leaf
    layout = epoch.manifest.layouts[leaf.layout]
    found = []
    for node, key in parts_of(layout, item.row, leaf):
        if item.owner in (None, node):
            text = format_key(key)
            run, box = _extent(key, leaf.shape)
            header = epoch.reader.header(leaf, node, text)
            found.append(Part(header, text, leaf.shape, leaf.item_bytes, run, box))
    return found


def _extent(key: Key, shape: tuple[int, ...]) -> tuple[Interval | None, Bounds | None]:
    if isinstance(key, Flat):
        return (key.start, key.stop), None
    box = key.intervals if isinstance(key, Box) else whole(shape)
    found = list(itertools.islice(runs(whole(shape), box), 2))
    if volume(box) == 0:
        return (0, 0), None
    return (found[0], None) if len(found) == 1 else (None, box)


class Buffer:
    """Memory that is used again for every read of up to `CHUNK_BYTES`."""

    def __init__(self) -> None:
        self._memory = bytearray()

    def filled(self, epoch: Epoch, part: Part, start: int, stop: int) -> memoryview:
        """Bytes [start, stop) of a part, verified; good until the next call.

        Raises DamagedError naming file, key and block, or StorageError.
        """
        if len(self._memory) < stop - start:
            self._memory = bytearray(stop - start)
        view = memoryview(self._memory)[: stop - start]
        if view:
            epoch.reader.read_stored(part.header, [ReadRequest(part.key, start, stop, view)])
        return view


class Source:
    """Bytes of an epoch: small parts that were read together beforehand, others as they are asked for."""

    def __init__(self, epoch: Epoch) -> None:
        self.epoch = epoch
        self.buffer = Buffer()
        self._held: dict[tuple[str, str], memoryview] = {}

    def fetch(self, wanted: Iterable[Part]) -> None:
        """Read small parts, all of each, neighbours with one read; those of before are let go.

        Raises as `Buffer.filled` does.
        """
        self._held = {}
        files: dict[str, tuple[ShardHeader, list[ReadRequest]]] = {}
        for part in wanted:
            if 0 < part.nbytes <= SMALL_BYTES and (part.header.path, part.key) not in self._held:
                view = self._held[part.header.path, part.key] = memoryview(bytearray(part.nbytes))
                requests = files.setdefault(part.header.path, (part.header, []))[1]
                requests.append(ReadRequest(part.key, 0, part.nbytes, view))
        for header, requests in files.values():
            self.epoch.reader.read_stored(header, requests)

    def filled(self, part: Part, start: int, stop: int) -> memoryview:
        """Bytes [start, stop) of a part, verified; good until the next call. Raises as `fetch` does."""
        held = self._held.get((part.header.path, part.key))
        return self.buffer.filled(self.epoch, part, start, stop) if held is None else held[start:stop]
