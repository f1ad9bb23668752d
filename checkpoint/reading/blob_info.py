"""What can be known of an epoch's blobs without reading a tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from functools import cached_property

import xxhash

from torchrelay.checkpoint.format.canonical_json import dumps
from torchrelay.checkpoint.format.manifest.schema import BlobRow, LeafRow, Manifest
from torchrelay.checkpoint.format.names import nearest
from torchrelay.checkpoint.reading.leaf_reader import LeafReader
from torchrelay.errors import UsageError
from torchrelay.jobs.cluster import GRADIENTS
from torchrelay.records import dataclass


@dataclass(frozen=True)
class LeafInfo:
    """A leaf: `kind` `tensor` or `value`, `dtype` and `shape` of tensors, logical `bytes`, who has it."""

    name: str
    kind: str
    dtype: str | None
    shape: tuple[int, ...]
    scope: str
    bytes: int
    group: str
    nodes: tuple[str, ...]
    alias_of: str | None = None


@dataclass(frozen=True)
class BlobInfo:
    """A blob: `kind` is `tensor`, `value` or `stateful`; only a tensor has a dtype and a shape.

    `bytes` are those of one node's tensors and values, ties counted once; `nodes` are those that have it.
    """

    name: str
    kind: str
    dtype: str | None
    shape: tuple[int, ...] | None
    scope: str
    bytes: int
    nodes: tuple[str, ...]
    leaves: tuple[str, ...]
    _reader: LeafReader = field(repr=False, compare=False)

    @cached_property
    def digest(self) -> str:
        """A digest (hex) of the content, equal for equal content however many nodes wrote it.

        Reads shard headers, no tensors. Of content that differs between nodes it is that of all nodes.
        """
        hashed = xxhash.xxh3_128()
        for name in self.leaves:
            for node in _owners(self._reader.manifest, name):
                hashed.update(name.encode() + b"\0" + _content(self._reader, name, node) + b"\0")
        return str(hashed.hexdigest())


class Blobs(Mapping[str, BlobInfo]):
    """Blob name to what is known of it; an unknown name is an error that names the nearest."""

    def __init__(self, reader: LeafReader) -> None:
        self._reader = reader
        # Without the gradients of a position, which nobody registered.
        self._rows = {blob.name: blob for blob in reader.manifest.blobs if blob.name != GRADIENTS}

    def __getitem__(self, name: str) -> BlobInfo:
        if name not in self._rows:
            raise _UnknownBlobError(f"there is no blob {name!r}{nearest(name, self._rows)}")
        return _blob_info(self._rows[name], self._leaves.get(name, []), self._reader)

    @cached_property
    def _leaves(self) -> dict[str, list[LeafRow]]:
        found: dict[str, list[LeafRow]] = {}
        for leaf in self._reader.manifest.leaves:
            found.setdefault(leaf.blob, []).append(leaf)
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return f"<blobs {', '.join(self._rows)}>"


class _UnknownBlobError(UsageError, KeyError):
    """A KeyError too, so that `get` and `in` behave as for any mapping."""

    __str__ = UsageError.__str__


def leaf_info(manifest: Manifest, leaf: LeafRow) -> LeafInfo:
    """A row of the manifest for people."""
    return LeafInfo(
        leaf.name,
        leaf.kind,
        leaf.dtype,
        leaf.shape,
        leaf.scope,
        leaf.nbytes,
        leaf.group,
        _names(manifest, [leaf]),
        leaf.alias_of,
    )


def _blob_info(blob: BlobRow, leaves: Sequence[LeafRow], reader: LeafReader) -> BlobInfo:
    own = next((leaf for leaf in leaves if blob.kind == "tensor" and leaf.name == blob.name), None)
    sizes = {leaf.name: leaf.nbytes for leaf in leaves if leaf.alias_of is None}
    return BlobInfo(
        blob.name,
        blob.kind,
        own.dtype if own else None,
        own.shape if own else None,
        blob.scope,
        sum(sizes.values()),
        _names(reader.manifest, leaves),
        tuple(dict.fromkeys(leaf.name for leaf in leaves)),
        reader,
    )


def _names(manifest: Manifest, leaves: Sequence[LeafRow]) -> tuple[str, ...]:
    numbers = sorted({number for leaf in leaves for number in manifest.nodes_of(leaf)})
    return tuple(manifest.world.names[number] for number in numbers)


def _owners(manifest: Manifest, name: str) -> list[str | None]:
    """The nodes whose own content a leaf has; one None for content that all share."""
    rows = [manifest.leaves[row] for row in manifest.rows[name]]
    if len(rows) == 1 and rows[0].scope not in ("rank", "host"):
        return [None]
    return list(_names(manifest, rows))


def _content(reader: LeafReader, name: str, node: str | None) -> bytes:
    if reader.spec(name, node).kind == "value":
        return dumps(reader.value_json(name, node))
    return bytes.fromhex(reader.digest(name, node))
