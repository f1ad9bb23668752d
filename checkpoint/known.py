"""What this process knows of the bytes on disk: the block digests of pieces, and whether memory has the same.

The pieces of an epoch are shared out between the processes as they were written, so together they know
all of it. After a load they are found in the headers of its files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchrelay.checkpoint.disk import dtypes
from torchrelay.checkpoint.disk.digest import BLOCK, SIZE, block_count, block_digests
from torchrelay.checkpoint.disk.layouts import Piece
from torchrelay.checkpoint.disk.manifest import LeafRow, Manifest
from torchrelay.checkpoint.disk.mesh import Mesh
from torchrelay.checkpoint.disk.names import format_key
from torchrelay.checkpoint.disk.parts import piece_key
from torchrelay.checkpoint.reading.shard_set import Holder, ShardSet
from torchrelay.checkpoint.storage import Storage
from torchrelay.errors import RelayError

if TYPE_CHECKING:
    import torch

MANY_BLOCKS = 8
"""Hashed at a time once the first block is as it was."""


@dataclass(frozen=True)
class KnownPiece:
    """Elements `first` up to, not including, `last` of a leaf, as a file has them.

    `rank` is the node that compares them with its own; `path` and `file_bytes` say where they lie.
    """

    rank: int
    leaf: str
    first: int
    last: int
    digests: bytes
    path: str
    file_bytes: int


@dataclass(frozen=True)
class Known:
    """The pieces that this process answers for; `lost` are leaves whose files cannot be read."""

    pieces: tuple[KnownPiece, ...] = ()
    lost: frozenset[str] = frozenset()


def known_of(storage: Storage, manifest: Manifest, nodes: Sequence[str], hosted: Iterable[int]) -> Known:
    """What the headers of an epoch's files say of the pieces that the hosted nodes answer for.

    `nodes` are the names of today's nodes. A node answers for what it wrote; what nodes that are gone
    wrote is shared out between all.
    """
    number_of = {name: rank for rank, name in enumerate(nodes)}
    mine, here = {}, set(hosted)
    for number, name in enumerate(manifest.world.names):
        rank = number_of.get(name, number % len(nodes))
        if rank in here:
            mine[number] = rank
    headers = _Headers(storage, manifest)
    pieces, lost = [], set()
    for leaf, piece in _pieces_of(manifest, mine):
        found = headers.find(leaf, piece)
        if found is None:
            lost.add(leaf.name)
        else:
            pieces.append(KnownPiece(mine[piece.node], leaf.name, piece.first, piece.last, *found))
    return Known(tuple(pieces), frozenset(lost))


def _pieces_of(manifest: Manifest, nodes: Iterable[int]) -> Iterator[tuple[LeafRow, Piece]]:
    numbers = sorted(nodes)
    for row, leaf in enumerate(manifest.leaves):
        if leaf.kind == "tensor" and leaf.alias_of is None and leaf.role != "rng":
            layout = manifest.layouts[leaf.layout]
            if isinstance(layout, Mesh):  # shards are never referenced
                continue
            for number in numbers:
                piece = layout.held_by(number, row, leaf.elements)
                if piece is not None:
                    yield leaf, piece


class _Headers:
    """The headers of an epoch's files; a file that cannot be opened is tried once."""

    def __init__(self, storage: Storage, manifest: Manifest) -> None:
        self._manifest = manifest
        self._shards = ShardSet(storage, manifest)
        self._broken: set[Holder] = set()

    def find(self, leaf: LeafRow, piece: Piece) -> tuple[bytes, str, int] | None:
        """Digests, path and size of the file of a piece; None when it cannot be read."""
        holder = (leaf.source, piece.node, leaf.group)
        if holder in self._broken:
            return None
        try:
            files = self._shards.open(holder)
        except (RelayError, OSError):
            self._broken.add(holder)
            return None
        key = format_key(piece_key(leaf, piece))
        for header, row in zip(files.headers, self._manifest.files[holder], strict=True):
            if key in header.entries:
                return bytes(header.entries[key].digests), header.path, row.nbytes
        return None


def changed_files(storage: Storage, pieces: Iterable[KnownPiece]) -> frozenset[str]:
    """The files that are gone or of another length."""
    sizes = {piece.path: piece.file_bytes for piece in pieces}
    return frozenset(path for path, nbytes in sizes.items() if storage.stat(path) != nbytes)


def compare(tensor: torch.Tensor, piece: KnownPiece) -> tuple[bool, bytes | None]:
    """Whether a tensor has the bytes of a known piece, and the digests of its own as far as they are whole.

    Ends at the first difference, so that what is trained costs one block.
    """
    width, count = tensor.element_size(), piece.last - piece.first
    if piece.last > tensor.numel() or len(piece.digests) != block_count(count * width) * SIZE:
        return False, None
    flat = tensor
    if count < tensor.numel() or count * width > BLOCK:
        flat = tensor.detach().reshape(-1)[piece.first : piece.last]
    if count * width <= BLOCK:
        found = block_digests(dtypes.stored_bytes(flat, piece.leaf))
        return found == piece.digests, found
    return _compare_blocks(flat, piece, BLOCK // width)


def _compare_blocks(flat: torch.Tensor, piece: KnownPiece, block: int) -> tuple[bool, bytes | None]:
    found, start, stop = bytearray(), 0, block
    while start < len(flat):
        found += block_digests(dtypes.stored_bytes(flat[start:stop], piece.leaf))
        if not piece.digests.startswith(found):
            return False, bytes(found) if stop >= len(flat) else None
        start, stop = stop, stop + MANY_BLOCKS * block
    return True, bytes(found)
