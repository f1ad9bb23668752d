"""What an epoch consists of, as its readers see it, and where its files are; `codec` is the same on disk.

A manifest is layout-level: it says for every leaf which nodes hold which elements, and for every shard
file how long it is and what its header digests to. It does not repeat what the headers say, so its size
follows blobs + nodes and not their product.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import field
from functools import cached_property, partial
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

from torchrelay.checkpoint.format.layouts import Layout, Split, keys_held
from torchrelay.checkpoint.format.manifest.position import Facts, Position
from torchrelay.checkpoint.format.mesh import Mesh
from torchrelay.checkpoint.format.mesh_geometry import item_bytes_of
from torchrelay.checkpoint.format.names import ShardName, check_try, shard_file_name
from torchrelay.records import dataclass

Json = Any
R = TypeVar("R", bound=tuple[Any, ...])
OF_POSITION = ("rng", "gradient")
"""Roles of leaves that only a resume takes: nothing else loads, exports or refers to them."""
VALUE_LIMIT_BYTES = 64 << 10
"""Replicated values up to this lie in the manifest, larger ones in the first replica's shard."""


@dataclass(frozen=True)
class World:
    """The nodes of the epoch in the order of their ranks, and the hosts they ran on.

    `others` are nodes of earlier tries that leaves are referenced from; their numbers follow.
    """

    nodes: tuple[str, ...]
    hosts: tuple[str, ...]
    host_of: tuple[int, ...]
    others: tuple[str, ...] = ()

    @cached_property
    def names(self) -> tuple[str, ...]:
        """All node names by number."""
        return self.nodes + self.others

    @cached_property
    def number(self) -> Mapping[str, int]:
        """Node name to number."""
        return {name: index for index, name in enumerate(self.names)}


class BlobRow(NamedTuple):
    """A named blob: `kind` is `tensor`, `value` or `stateful`; `scope` is the registered or inferred one."""

    name: str
    kind: str
    scope: str


class LeafRow(NamedTuple):
    """A leaf: `layout` is a number into the manifest's layouts, `source` one into its tries.

    There are very many, hence named tuples: quickly made, and quickly turned into columns.
    """

    name: str
    blob: str
    kind: str
    role: str
    dtype: str | None
    shape: tuple[int, ...]
    nbytes: int
    scope: str
    group: str
    layout: int
    alias_of: str | None = None
    source: int = 0
    frozen: bool | None = None
    """Of a parameter or a tensor, whether it had no gradient; None where that is not known."""
    order: tuple[int, ...] | None = None
    """The dimensions of a tensor from the outermost in memory, where they do not lie as they are numbered."""
    order_changed: bool = False
    """Whether the program had built the tensor in another order than it was saved in."""
    device: str | None = None
    """The GPU of a parameter or a tensor, counted from the process's own: `cuda`, `cuda:1`. None: the CPU."""
    same_as: str | None = None
    """The leaf of another file that was the same tensor; both files hold it."""

    @property
    def gradient_is_odd(self) -> bool:
        """Whether a parameter had no gradient, or a tensor that is none had one."""
        return has_odd_gradient(self.role, self.frozen)

    @property
    def elements(self) -> int:
        """The number of elements; a value counts as one."""
        return prod(self.shape) if self.kind == "tensor" else 1

    @property
    def item_bytes(self) -> int:
        """Bytes of one element of a tensor."""
        return item_bytes_of(self.shape, self.nbytes) if self.kind == "tensor" else self.nbytes


def has_odd_gradient(role: str, frozen: bool | None) -> bool:
    """Whether a parameter has no gradient, or a tensor that is none has one."""
    return frozen is (role == "parameter")


class ShardRow(NamedTuple):
    """A shard file: sizes in bytes, the SHA-256 (hex) of its header. There are many, hence a named tuple."""

    node: int
    group: str
    part: int
    nbytes: int
    header_bytes: int
    header_sha256: str
    source: int = 0

    @property
    def holder(self) -> tuple[int, int, str]:
        """(try, node, group): whose file this is a part of."""
        return (self.source, self.node, self.group)


def table(kind: type[R], rows: Iterable[tuple[Any, ...]]) -> tuple[R, ...]:
    """Named tuples of a kind from rows that have all of its columns: of thousands, in half of the time."""
    return tuple(map(partial(tuple.__new__, kind), rows))


def columns(kind: type[LeafRow | BlobRow | ShardRow], *fields: str) -> itemgetter[tuple[Any, ...]]:
    """Columns of a row, which of very many rows come sooner by number than by name."""
    return itemgetter(*map(kind._fields.index, fields))


in_order = columns(ShardRow, "source", "group", "part", "node")
"""Sort key of a manifest's shards: source, group, part, node, the order in which their columns pack best."""


@dataclass(frozen=True)
class Manifest:
    """One epoch. `tries` are the directories it lives in, its own first."""

    job_uuid: str
    job_name: str
    position: Position
    branch: int
    generation: int
    tries: tuple[str, ...]
    world: World
    blobs: tuple[BlobRow, ...]
    leaves: tuple[LeafRow, ...]
    layouts: tuple[Layout, ...]
    shards: tuple[ShardRow, ...]
    plan_hash: str
    values: Mapping[int, Json] = field(default_factory=dict)
    """Leaf row to the tagged form of its value."""
    facts: Facts = field(default_factory=Facts)
    extra: Mapping[str, Json] = field(default_factory=dict)
    """What a newer minor version wrote and this one does not know; kept when written again."""

    def encode(self) -> bytes:
        """The bytes of `manifest.json`; see `manifest_disk.encode`."""
        from torchrelay.checkpoint.format.manifest import codec

        return codec.encode(self)

    @staticmethod
    def decode(data: bytes, *, what: str = "manifest.json") -> Manifest:
        """Read the bytes of a manifest; see `manifest_disk.decode` for what is refused."""
        from torchrelay.checkpoint.format.manifest import codec

        return codec.decode(data, what=what)

    @property
    def needs(self) -> tuple[str, ...]:
        """Earlier tries whose files this epoch refers to."""
        return self.tries[1:]

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups of files of this epoch."""
        return tuple(sorted({shard.group for shard in self.shards}))

    def removed(self, left: Collection[str]) -> frozenset[str]:
        """The groups whose files are not `left` any more (empty: all files are left).

        A group that never had files, an optimizer's whose values all stand in here, is not removed.
        """
        return frozenset(self.groups).difference(left) if left else frozenset()

    @cached_property
    def rows(self) -> Mapping[str, tuple[int, ...]]:
        """Leaf name to its rows: one, or several where node classes have different leaves of a name."""
        names = [leaf.name for leaf in self.leaves]
        once = dict(zip(names, zip(range(len(names)), strict=True), strict=True))
        if len(once) == len(names):
            return once
        found: dict[str, list[int]] = {}
        for row, name in enumerate(names):
            found.setdefault(name, []).append(row)
        return {name: tuple(rows) for name, rows in found.items()}

    @cached_property
    def files(self) -> Mapping[tuple[int, int, str], tuple[ShardRow, ...]]:
        """(try, node, group) to the parts of its file in order."""
        found: dict[tuple[int, int, str], list[ShardRow]] = {}
        for shard in self.shards:
            found.setdefault((shard.source, shard.node, shard.group), []).append(shard)
        return {holder: tuple(sorted(parts, key=itemgetter(2))) for holder, parts in found.items()}

    def nodes_of(self, leaf: LeafRow) -> tuple[int, ...]:
        """The numbers of the nodes that have this leaf."""
        return self.layouts[leaf.layout].nodes

    def owners_of(self, leaf: LeafRow) -> frozenset[int]:
        """The nodes of this epoch that own a leaf; of scope `host` all nodes of the hosts that have it.

        Nodes of earlier tries are none of them, nor are places of a mesh that is no node's.
        """
        asked = (leaf.layout, leaf.scope == "host")
        if asked not in self._owners:
            nodes = self.layouts[leaf.layout].nodes
            if leaf.scope == "host":
                hosts = {self.world.host_of[node] for node in nodes if node < len(self.world.host_of)}
                nodes = tuple(node for node, host in enumerate(self.world.host_of) if host in hosts)
            self._owners[asked] = frozenset(node for node in nodes if node < len(self.world.nodes))
        return self._owners[asked]

    @cached_property
    def _owners(self) -> dict[tuple[int, bool], frozenset[int]]:
        return {}

    def is_shared(self, leaf: LeafRow) -> bool:
        """Whether all nodes of this epoch own a leaf, with one content: then it is for any nodes."""
        one = leaf.scope != "rank" and (leaf.scope != "host" or len(self.nodes_of(leaf)) == 1)
        return one and len(self.owners_of(leaf)) == len(self.world.nodes)

    def stored_keys(self, source: int, node: int, group: str) -> Iterator[tuple[int, tuple[str, ...]]]:
        """The leaf rows of which a node's file holds something, and under which keys, as `keys_held` says."""
        for number, rows in self._rows_by_layout.get((source, group), {}).items():
            layout = self.layouts[number]
            near = rows & set(layout.items_of(node)) if isinstance(layout, Split) else rows
            for row in sorted(near):
                if keys := keys_held(layout, node, row, self.leaves[row]):
                    yield row, keys

    def whole_rows(self, source: int, node: int, group: str) -> list[int] | None:
        """The leaf rows that a node's file holds, if all of them whole; None where not, or unknown."""
        found: list[int] = []
        for number, rows in self._rows_by_layout.get((source, group), {}).items():
            layout = self.layouts[number]
            if isinstance(layout, Mesh):
                return None
            if isinstance(layout, Split):
                held = rows.intersection(layout.items_of(node))
                if any(layout.whole.get(row) != node for row in held):
                    return None
                found += held
            elif layout.stores(node):
                found += rows
        return found

    @cached_property
    def _rows_by_layout(self) -> Mapping[tuple[int, str], Mapping[int, set[int]]]:
        rows: dict[tuple[int, str, int], list[int]] = defaultdict(list)
        for row, leaf in enumerate(self.leaves):
            if leaf.alias_of is None and row not in self.values:
                rows[leaf.source, leaf.group, leaf.layout].append(row)
        found: dict[tuple[int, str], dict[int, set[int]]] = {}
        for (source, group, layout), some in rows.items():
            found.setdefault((source, group), {})[layout] = set(some)
        return found


DATA = "data"
MANIFEST = "manifest.json"
STATS = "stats.json"
_STAMP = re.compile(r"e([0-9]{8})(?:s([0-9]{6,9}))?-.*", re.ASCII)


def try_directory(try_name: str) -> str:
    """The directory of a try; raises DamagedError for what is no try's name."""
    return f"{DATA}/{check_try(try_name)}"


def manifest_path(try_name: str) -> str:
    """The manifest of a try."""
    return f"{try_directory(try_name)}/{MANIFEST}"


def stats_path(try_name: str) -> str:
    """How long a try took."""
    return f"{try_directory(try_name)}/{STATS}"


def position_of(try_name: str) -> Position:
    """The position that a try was written at."""
    match = _STAMP.fullmatch(check_try(try_name))
    epoch, step = match.groups() if match else ("0", None)
    return Position(int(epoch), int(step or 0))


def shard_path(manifest: Manifest, shard: ShardRow, *, escape: str = "") -> str:
    """A shard's file; `escape` as in `names.shard_file_name`."""
    try_name = manifest.tries[shard.source]
    name = ShardName(manifest.world.names[shard.node], position_of(try_name), shard.group, shard.part)
    return f"{try_directory(try_name)}/{shard_file_name(name, escape=escape)}"


def shard_paths(manifest: Manifest, node: str) -> list[str]:
    """All files of the node that is stored under this name."""
    return [shard_path(manifest, one) for one in manifest.shards if manifest.world.names[one.node] == node]
