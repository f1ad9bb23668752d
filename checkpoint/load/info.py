"""What can be known of an epoch without reading a tensor: its blobs, its metrics, what it was built on.

A manifest is read once, for what is committed never changes.

Every checkpoint of such a run has a value `upstream.lineage` with a record per stage, by the path of aliases
that leads there (`expert`, `expert/encoder`), and the tensors kept of a stage as `upstream.<alias>.<blob>`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import xxhash

from torchrelay.checkpoint.format.canonical_json import dumps
from torchrelay.checkpoint.format.manifest import codec
from torchrelay.checkpoint.format.manifest.position import Entry
from torchrelay.checkpoint.format.manifest.schema import BlobRow, LeafRow, Manifest
from torchrelay.checkpoint.format.names import nearest
from torchrelay.checkpoint.load.reads.leaf_reader import LeafReader
from torchrelay.checkpoint.log.retention import Best, Keeping, Scores
from torchrelay.checkpoint.log.view import LogView
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.errors import UsageError
from torchrelay.jobs.cluster import GRADIENTS
from torchrelay.records import dataclass

if TYPE_CHECKING:
    import torch

    from torchrelay.checkpoint.load.checkpoint import Checkpoint


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


_EXPECTED = 3
"""So many positions may well have no metrics: the first state, and epochs that were not evaluated."""


class KnownMetrics:
    """Metrics of the healthy whole epochs of the current branch, as far as they were read."""

    def __init__(self) -> None:
        self._known: dict[str, Mapping[str, float]] = {}
        self._unread: dict[Entry, OSError] = {}

    def look(self, storage: Storage, view: LogView) -> None:
        """Read what is not known yet; what cannot be read is asked for again the next time."""
        line = [entry for entry in view.line() if entry.position.boundary and entry.healthy]
        self._known = {one.try_name: self._known[one.try_name] for one in line if one.try_name in self._known}
        self._unread = {}
        for entry in line:
            if entry.try_name in self._known:
                continue
            try:
                self._known[entry.try_name] = codec.read(storage, entry).facts.metrics
            except OSError as error:
                self._unread[entry] = error

    def told(self, keeping: Keeping) -> Keeping:
        """The same rules, knowing the scores that they ask for."""
        if keeping.best is None:
            return keeping
        unread = frozenset(entry.try_name for entry in self._unread)
        return replace(keeping, scores=Scores(self._values(keeping.best), unread))

    def missing(self, best: Best) -> str:
        """Why no epoch is the best, for people; empty where one is."""
        if self._unread or any(map(math.isfinite, self._values(best).values())):
            return ""
        names = sorted({name for found in self._known.values() for name in found})
        there = ", ".join(names) or "none at all"
        return f"no epoch has a finite value of metric {best.metric!r}; there is {there}"

    def doubts(self, best: Best) -> Iterator[str]:
        """What keeps epochs that might have to go, for people."""
        if len(self._known) > _EXPECTED and (missing := self.missing(best)):
            yield f"{missing}: as long as none is known to be the best, all stay"
        for entry, error in self._unread.items():
            yield f"epoch {entry.position} may be the best and stays: its metrics cannot be read ({error})"

    def _values(self, best: Best) -> dict[str, float]:
        return {name: found[best.metric] for name, found in self._known.items() if best.metric in found}


UPSTREAM = "upstream."
"""What the names of these blobs begin with."""
LINEAGE = f"{UPSTREAM}lineage"
"""The blob of records."""


def records_in(checkpoint: Checkpoint) -> dict[str, Any]:
    """The records of all stages by path of aliases; empty where a run was built on none."""
    if LINEAGE not in checkpoint.blobs or checkpoint.blobs[LINEAGE].kind != "value":
        return {}
    found = checkpoint.value(LINEAGE)
    return found if isinstance(found, dict) else {}


class UpstreamStage:
    """A stage that a run was built on, as an epoch of the run knows it. Nothing of the stage is opened."""

    def __init__(self, checkpoint: Checkpoint, path: str, records: Mapping[str, Any]) -> None:
        self._checkpoint = checkpoint
        self._prefix = "".join(f"{UPSTREAM}{alias}." for alias in path.split("/"))
        self.path = path
        self.record: Mapping[str, Any] = records[path]
        self.upstream = Upstreams(checkpoint, path, records)

    def __repr__(self) -> str:
        return f"<stage {self.path}: epoch {self.epoch} of {self.record.get('path')}>"

    @property
    def run_id(self) -> str | None:
        """Which run it was; None where that was not known."""
        return self.record.get("run_id")

    @property
    def epoch(self) -> int:
        """The epoch that was taken."""
        return int(self.record["epoch"])

    @property
    def metrics(self) -> Mapping[str, float]:
        """The reduced metrics of that epoch."""
        return dict(self.record.get("metrics", {}))

    @property
    def blobs(self) -> tuple[str, ...]:
        """The blobs of the stage that this checkpoint keeps, by the names that they had there."""
        names = self._checkpoint.blobs
        return tuple(name[len(self._prefix) :] for name in names if name.startswith(self._prefix))

    def load_tensors(self, patterns: str | Sequence[str] = "*", **options: Any) -> dict[str, torch.Tensor]:
        """Kept tensors by their names in the stage; options are those of `Checkpoint.load_tensors`."""
        given = [patterns] if isinstance(patterns, str) else list(patterns)
        found = self._checkpoint.load_tensors([self._prefix + one for one in given], **options)
        return {name.removeprefix(self._prefix): tensor for name, tensor in found.items()}


class Upstreams(Mapping[str, UpstreamStage]):
    """Alias to stage; an unknown alias is an error that names the nearest."""

    def __init__(
        self, checkpoint: Checkpoint, above: str = "", records: Mapping[str, Any] | None = None
    ) -> None:
        self._checkpoint = checkpoint
        self._records = records_in(checkpoint) if records is None else records
        self._head = f"{above}/" if above else ""

    def __getitem__(self, alias: str) -> UpstreamStage:
        if alias not in list(self):
            raise _UnknownStageError(
                f"this run was built on no stage {alias!r:.80}{nearest(str(alias), self)}"
            )
        return UpstreamStage(self._checkpoint, self._head + alias, self._records)

    def __iter__(self) -> Iterator[str]:
        inner = (path[len(self._head) :] for path in self._records if path.startswith(self._head))
        return (path for path in inner if "/" not in path)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"<built on {', '.join(self) or 'nothing'}>"


class _UnknownStageError(UsageError, KeyError):
    """A KeyError too, so that `get` and `in` behave as for any mapping."""

    __str__ = UsageError.__str__
