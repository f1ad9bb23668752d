"""Describe an epoch without reading tensors: tables for lists, blobs, and upstream stages.

Manifests are searched as text instead of parsed, so that lists of thousands of epochs are quick. This is
sound because their digest is verified and their JSON is canonical: keys are ordered, and quotation marks in
strings are escaped. The content is not validated as a load validates it.

A manifest is read once, because committed files never change.

A checkpoint of a run with upstream stages has a value `upstream.lineage` with a record per stage, by path of
aliases (`expert`, `expert/encoder`), and the tensors kept of a stage as `upstream.<alias>.<blob>`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import field
from functools import cached_property
from heapq import nlargest
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from torchrelay.checkpoint.format import canonical_json
from torchrelay.checkpoint.format.canonical_json import Fields, dumps
from torchrelay.checkpoint.format.manifest import codec
from torchrelay.checkpoint.format.manifest.codec import TableColumns
from torchrelay.checkpoint.format.manifest.schema import LeafRow, Manifest
from torchrelay.checkpoint.format.names import (
    LINEAGE,
    UPSTREAM,
    manifest_path,
    nearest,
    stats_path,
    unpack_names,
    unpack_numbers,
)
from torchrelay.checkpoint.format.position import CommittedPosition, Facts, facts_in
from torchrelay.checkpoint.load.reads.leaf_reader import LeafReader
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.errors import DamagedError, UsageError
from torchrelay.jobs.cluster import GRADIENTS
from torchrelay.jobs.runtime import undisturbed
from torchrelay.records import Json, dataclass

if TYPE_CHECKING:
    import torch

    from torchrelay.checkpoint.load.checkpoint import Checkpoint


LARGE_BYTES = 256 << 10
_decoder = json.JSONDecoder()


@dataclass(frozen=True)
class Glance:
    """Nodes that took part, bytes of the files of the epoch's own attempt, and facts of the run."""

    nodes: int
    own_bytes: int
    facts: Facts


def glance(storage: Storage, entry: CommittedPosition) -> Glance:
    """Read the summary of the manifest of a log entry; raises DamagedError if its digest differs."""
    data = codec.read_bytes(storage, entry)
    return _seen_in(data.decode("utf-8", "replace"), f"manifest of {entry.attempt_name}")


def glance_or_notes(storage: Storage, entry: CommittedPosition) -> Glance:
    """Like `glance`, for lists: a large manifest with notes from its save is compared by size only.

    The notes in `stats.json` are not verified and have only the metrics. Raises as `glance` does.
    """
    noted = None
    if entry.manifest_bytes > LARGE_BYTES:
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            data = storage.read_range(stats_path(entry.attempt_name), 0, LARGE_BYTES + 1)
            notes: Any = json.loads(data) if len(data) <= LARGE_BYTES else None
            metrics = {str(name): float(value) for name, value in notes["metrics"].items()}
            noted = Glance(len(notes["nodes"]), int(notes["bytes"]), Facts(metrics=metrics))
    if noted is None:
        return glance(storage, entry)
    codec.check_size(storage, entry)
    return noted


def _seen_in(text: str, what: str) -> Glance:
    facts, end = _object(text, "facts", 0, what)
    stamp, end = _object(text, "format", end, what)
    canonical_json.check_stamp(stamp.values, what=what)
    shards, end = _object(text, "shards", end, what)
    world, _ = _object(text, "world", text.rfind(',"world":{'), what)
    sizes = unpack_numbers(shards.items("bytes"), what)
    sources = unpack_numbers(shards.items("try"), what)
    return Glance(
        len(unpack_names(world.items("nodes"), what)),
        sum(size for size, source in zip(sizes, sources, strict=True) if source == 0),
        facts_in(facts),
    )


def _object(text: str, key: str, start: int, what: str) -> tuple[Fields, int]:
    """The first JSON object under this key from `start` on, and where it ends."""
    opening = f',"{key}":'
    at = text.find(opening + "{", max(start, 0))
    try:
        if at < 0:
            raise ValueError("missing")
        value, end = _decoder.raw_decode(text, at + len(opening))
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{what} is damaged: {key}: {error}") from error
    return Fields(value, what), end


class BlobLine(NamedTuple):
    """A blob or leaf; `shape` is None unless it is a single tensor, `bytes` are those of one node.

    `sources` are the numbers of the attempts whose files hold its bytes, 0 for the epoch's own.
    """

    name: str
    kind: str
    scope: str
    dtypes: tuple[str, ...]
    shape: tuple[int, ...] | None
    leaves: int
    bytes: int
    sources: tuple[int, ...]


@dataclass(frozen=True)
class EpochTable:
    """Summary of a manifest; the columns of its leaves are parsed on demand."""

    facts: Facts
    nodes: tuple[str, ...]
    hosts: tuple[str, ...]
    blobs: Mapping[str, tuple[str, str]]
    """Kind and scope by name."""
    _leaves: TableColumns = field(repr=False)

    @cached_property
    def leaves(self) -> Sequence[str]:
        """The names of all leaves, aliases too."""
        return tuple(dict.fromkeys(self._names))

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Bytes of each blob on one node: a leaf of several nodes counts once, an alias not at all."""
        return self._summed(self._leaves.words("blob"))

    @cached_property
    def leaf_sizes(self) -> Mapping[str, int]:
        """Bytes of each leaf on one node."""
        return self._summed(self._names)

    def blob_lines(self, names: Collection[str]) -> Iterator[BlobLine]:
        """A line for each of these blobs, in the manifest's order."""
        rows = self._rows(self._leaves.words("blob"), names)
        for name in filter(names.__contains__, self.blobs):
            yield self._line(name, *self.blobs[name], rows.get(name, ()), self.sizes.get(name, 0))

    def leaf_lines(self, names: Collection[str]) -> Iterator[BlobLine]:
        """A line for each of these leaves, in the manifest's order."""
        kinds, scopes = self._leaves.words("kind"), self._leaves.words("scope")
        for name, rows in self._rows(self._names, names).items():
            yield self._line(name, kinds[rows[0]], scopes[rows[0]], rows, self.leaf_sizes.get(name, 0))

    def _line(self, name: str, kind: str, scope: str, rows: Sequence[int], nbytes: int) -> BlobLine:
        single = rows and self._names[rows[0]] == name and kind == "tensor"
        dtypes, sources, shapes = self._columns
        return BlobLine(
            name,
            kind,
            scope,
            tuple(sorted({dtypes[row] for row in rows} - {""})),
            tuple(shapes[rows[0]]) if single else None,
            len({self._names[row] for row in rows}),
            nbytes,
            tuple(sorted({sources[row] for row in rows})),
        )

    def _rows(self, column: Sequence[str], names: Collection[str]) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for row, name in enumerate(column):
            if name in names:
                found.setdefault(name, []).append(row)
        return found

    def _summed(self, column: Sequence[str]) -> Mapping[str, int]:
        sizes: dict[str, int] = defaultdict(int)
        aliases = {row for row, _ in self._leaves.fields.items("alias_of")}
        seen: set[str] = set()
        rows = zip(column, self._names, self._leaves.numbers("bytes"), strict=True)
        for row, (unit, leaf, nbytes) in enumerate(rows):
            if leaf not in seen and row not in aliases:
                sizes[unit] += nbytes
                seen.add(leaf)
        return sizes

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return self._leaves.names("name")

    @cached_property
    def _columns(self) -> tuple[tuple[str, ...], tuple[int, ...], tuple[Json, ...]]:
        """Element types, attempt numbers and shapes of all rows."""
        return self._leaves.words("dtype"), self._leaves.numbers("try"), self._leaves.each("shape")


def largest(sizes: Mapping[str, int], names: Sequence[str], count: int) -> set[str]:
    """The `count` names with the most bytes."""
    return set(names if len(names) <= count else nlargest(count, names, key=lambda one: sizes.get(one, 0)))


def read_table(storage: Storage, entry: CommittedPosition) -> EpochTable:
    """Read the table of a log entry; raises DamagedError if the manifest's digest differs."""
    data, what = codec.read_bytes(storage, entry), manifest_path(entry.attempt_name)
    try:
        with undisturbed():
            return _table(Fields(json.loads(data), what), what)
    except (ValueError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise DamagedError(f"{what} is damaged: {error}") from error


def _table(fields: Fields, what: str) -> EpochTable:
    canonical_json.check_stamp(fields.values.get("format"), what=what)
    words = fields.texts("words")
    blobs, world = TableColumns(fields.fields("blobs"), words), fields.fields("world")
    rows = zip(blobs.names("name"), blobs.words("kind"), blobs.words("scope"), strict=True)
    return EpochTable(
        facts_in(fields.fields("facts")),
        unpack_names(world.items("nodes"), what),
        unpack_names(world.items("hosts"), what),
        {name: (kind, scope) for name, kind, scope in rows},
        TableColumns(fields.fields("leaves"), words),
    )


@dataclass(frozen=True)
class LeafInfo:
    """A leaf: `kind` is `tensor` or `value`; `dtype` and `shape` of tensors, logical `bytes`, its nodes."""

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
        """Digest (hex) of the content, equal for equal content however many nodes wrote it.

        Reads shard headers, no tensors. If content differs between nodes, it covers that of all nodes.
        """
        reader, hashed = self._reader, xxhash.xxh3_128()
        for name in self.leaves:
            rows = [reader.manifest.leaves[row] for row in reader.manifest.rows[name]]
            alike = len(rows) == 1 and rows[0].scope not in ("rank", "host")
            for node in [None] if alike else _names(reader.manifest, rows):
                if reader.spec(name, node).kind == "value":
                    content = dumps(reader.value_json(name, node))
                else:
                    content = bytes.fromhex(reader.digest(name, node))
                hashed.update(name.encode() + b"\0" + content + b"\0")
        return str(hashed.hexdigest())


class Blobs(Mapping[str, BlobInfo]):
    """Mapping of blob names to `BlobInfo`; an unknown name raises with the closest name."""

    def __init__(self, reader: LeafReader) -> None:
        self._reader = reader
        # without the gradients of a position, which no program registers
        self._rows = {blob.name: blob for blob in reader.manifest.blobs if blob.name != GRADIENTS}

    def __getitem__(self, name: str) -> BlobInfo:
        if name not in self._rows:
            raise UnknownNameError(f"no blob {name!r}{nearest(name, self._rows)}")
        blob, leaves = self._rows[name], self._leaves.get(name, [])
        own = next((leaf for leaf in leaves if blob.kind == "tensor" and leaf.name == name), None)
        sizes = {leaf.name: leaf.nbytes for leaf in leaves if leaf.alias_of is None}
        return BlobInfo(
            name,
            blob.kind,
            own.dtype if own else None,
            own.shape if own else None,
            blob.scope,
            sum(sizes.values()),
            _names(self._reader.manifest, leaves),
            tuple(dict.fromkeys(leaf.name for leaf in leaves)),
            self._reader,
        )

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


class UnknownNameError(UsageError, KeyError):
    """Raised for an unknown name; a KeyError too, so that `get` and `in` work."""

    __str__ = UsageError.__str__


def leaf_info(manifest: Manifest, leaf: LeafRow) -> LeafInfo:
    """Describe a row of the manifest."""
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


def _names(manifest: Manifest, leaves: Sequence[LeafRow]) -> tuple[str, ...]:
    numbers = sorted({number for leaf in leaves for number in manifest.nodes_of(leaf)})
    return tuple(manifest.world.names[number] for number in numbers)


def records_in(checkpoint: Checkpoint) -> dict[str, Any]:
    """Records of all upstream stages by path of aliases; empty without any."""
    if LINEAGE not in checkpoint.blobs or checkpoint.blobs[LINEAGE].kind != "value":
        return {}
    found = checkpoint.value(LINEAGE)
    return found if isinstance(found, dict) else {}


class UpstreamStage:
    """A stage that a run was built on, as recorded in an epoch of the run. Opens nothing of the stage."""

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
        """Identity of the stage's run; None if unknown."""
        return self.record.get("run_id")

    @property
    def epoch(self) -> int:
        """The epoch of the stage that was used."""
        return int(self.record["epoch"])

    @property
    def metrics(self) -> Mapping[str, float]:
        """The reduced metrics of that epoch."""
        return dict(self.record.get("metrics", {}))

    @property
    def blobs(self) -> tuple[str, ...]:
        """Blobs of the stage that this checkpoint keeps, by their names in the stage."""
        names = self._checkpoint.blobs
        return tuple(name[len(self._prefix) :] for name in names if name.startswith(self._prefix))

    def load_tensors(self, patterns: str | Sequence[str] = "*", **options: Any) -> dict[str, torch.Tensor]:
        """Load kept tensors by their names in the stage; options as in `Checkpoint.load_tensors`."""
        given = [patterns] if isinstance(patterns, str) else list(patterns)
        found = self._checkpoint.load_tensors([self._prefix + one for one in given], **options)
        return {name.removeprefix(self._prefix): tensor for name, tensor in found.items()}


class Upstreams(Mapping[str, UpstreamStage]):
    """Mapping of aliases to stages; an unknown alias raises with the closest one."""

    def __init__(
        self, checkpoint: Checkpoint, above: str = "", records: Mapping[str, Any] | None = None
    ) -> None:
        self._checkpoint = checkpoint
        self._records = records_in(checkpoint) if records is None else records
        self._head = f"{above}/" if above else ""

    def __getitem__(self, alias: str) -> UpstreamStage:
        if alias not in list(self):
            raise UnknownNameError(f"no stage {alias!r:.80} in this run{nearest(str(alias), self)}")
        return UpstreamStage(self._checkpoint, self._head + alias, self._records)

    def __iter__(self) -> Iterator[str]:
        inner = (path[len(self._head) :] for path in self._records if path.startswith(self._head))
        return (path for path in inner if "/" not in path)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"<built on {', '.join(self) or 'nothing'}>"
