"""Decide which unchanged leaves an epoch may reference in earlier ones instead of writing them.

`change_detection` finds the unchanged bytes. Here a leaf must also be the same for the same nodes on disk,
and a reference must be worth what it keeps:

- At most 8 earlier attempts, because each must be read and verified with the epoch; those that retention
  keeps with them count too.
- At least half of an attempt's bytes are still in use.
- At least 4 KiB of a file are in use, because less is cheaper to write than a header to read.

Each process sends one bit per leaf that differs. Rank 0 chooses among the others, and sends its choice to
all. If processes know different epochs, all of them write everything.

In synchronous saves the blocks of long parts whose first bytes match are compared during the write; a
difference then fails the attempt (`check_assumed`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING

from torchrelay.checkpoint.format.manifest import codec
from torchrelay.checkpoint.format.manifest.schema import (
    OF_POSITION,
    BlobRow,
    Layout,
    LeafRow,
    Manifest,
    has_odd_gradient,
)
from torchrelay.checkpoint.format.mesh import Mesh
from torchrelay.checkpoint.format.mesh_geometry import volume
from torchrelay.checkpoint.format.names import format_keys
from torchrelay.checkpoint.format.position import Position
from torchrelay.checkpoint.format.shard.writer import ShardReport
from torchrelay.checkpoint.log.view import LogView, needed_by
from torchrelay.checkpoint.save.assignments import Assignment, PlannedLeaf, SavePlan, elements
from torchrelay.checkpoint.save.change_detection import (
    ChangeScan,
    KnownFile,
    LeafRange,
    OwnFiles,
    TensorOf,
    known_of,
    look,
)
from torchrelay.checkpoint.save.plan import with_references
from torchrelay.checkpoint.state.leaf import LeafSpec, Value, is_sharded
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.errors import ChangedAfterAllError, RelayError
from torchrelay.jobs.session import Peers, decide, together
from torchrelay.records import dataclass

if TYPE_CHECKING:
    import torch

    from torchrelay.checkpoint.save.pipeline import SaveJob


MAX_EARLIER_ATTEMPTS = 8
MIN_FILE_BYTES = 4096
_SCOPES = ("replicated", "rank", "sharded")
_Holder = tuple[int, int, str]


def comparable(plan: SavePlan) -> tuple[str, ...]:
    """The names of stored tensors, in order, whose bytes are compared."""
    return tuple(sorted({planned.leaf.name for planned in plan.rows if _is_comparable(planned)}))


def _is_comparable(planned: PlannedLeaf) -> bool:
    """False for random states and gradients, which are always written because they change."""
    leaf = planned.leaf
    stored = leaf.kind == "tensor" and leaf.alias_of is None and leaf.nbytes > 0
    return stored and leaf.role.value not in OF_POSITION and planned.scope in _SCOPES


def same_leaves(
    plan: SavePlan, nodes: Sequence[str], manifest: Manifest, among: Collection[str]
) -> frozenset[str]:
    """Those of the names `among` whose leaves an epoch has exactly as the plan does.

    Compared are type, shape, role, scope, gradient and nodes, and the mesh and placements of a sharded leaf.
    `nodes` are the names of the plan's nodes. A leaf that all nodes of both share is the same for any number.
    """
    planned: dict[str, list[PlannedLeaf]] = {}
    for one in plan.rows:
        if one.leaf.name in among:
            planned.setdefault(one.leaf.name, []).append(one)
    return frozenset(
        name
        for name, rows in planned.items()
        if all(map(_is_comparable, rows)) and _alike(plan, rows, nodes, manifest)
    )


def _alike(plan: SavePlan, rows: Sequence[PlannedLeaf], nodes: Sequence[str], manifest: Manifest) -> bool:
    old = [manifest.leaves[row] for row in manifest.rows.get(rows[0].leaf.name, ())]
    planned = [
        _stated(one.leaf, one.leaf.role.value, one.scope, elements(one.leaf),
                has_odd_gradient(one.leaf.role.value, one.leaf.frozen))
        for one in rows
    ]  # fmt: skip
    stored = [
        [] if one.alias_of is not None
        else _stated(one, one.role, one.scope, one.elements, has_odd_gradient(one.role, one.frozen))
        for one in old
    ]  # fmt: skip
    if sorted(planned) != sorted(stored):
        return False
    if len(rows) == 1 and rows[0].scope == "replicated":
        world, known = set(range(len(nodes))), set(range(len(manifest.world.nodes)))
        if set(plan.layouts[rows[0].layout].nodes) == world and known <= set(manifest.nodes_of(old[0])):
            return True
    new_places = sorted(_places(plan.layouts[one.layout], nodes) for one in rows)
    return new_places == sorted(_places(manifest.layouts[one.layout], manifest.world.names) for one in old)


def _places(layout: Layout, names: Sequence[str]) -> list[str]:
    """Nodes that have a leaf; on a mesh, the place of each and what is split over them."""
    found = [names[node] for node in layout.nodes]
    if isinstance(layout, Mesh):
        return [repr(layout.extents), repr(layout.placements), *found]
    return sorted(found)


def _stated(leaf: LeafSpec | LeafRow, *more: object) -> list[str]:
    """What must be equal of a leaf in a plan and in a manifest, in a form that can be sorted."""
    own = (leaf.blob, leaf.group, leaf.dtype, leaf.shape, leaf.order, leaf.order_changed)
    return [str(one) for one in (*own, leaf.device, leaf.same_as, *more)]


@dataclass(frozen=True)
class EarlierTry:
    """Sizes for the limits: data bytes of an attempt, and the attempts that stay while it is needed."""

    nbytes: int
    kept_with: frozenset[str]


def within_limits(
    manifest: Manifest, names: Collection[str], tries: Mapping[str, EarlierTry]
) -> frozenset[str]:
    """Those of the unchanged leaves `names` that are worth a reference, in attempts of `tries`."""
    kept = frozenset(names)
    alike: dict[tuple[object, ...], _LeafFiles] = {}
    lying: dict[str, list[_LeafFiles]] = {}
    for name in kept:
        for row in manifest.rows[name]:
            leaf = manifest.leaves[row]
            layout = manifest.layouts[leaf.layout]
            form = layout.alike(name, leaf.shape, leaf.item_bytes) if isinstance(layout, Mesh) else row
            key = (leaf.source, leaf.layout, leaf.group, form)
            if key not in alike:
                alike[key] = _LeafFiles(leaf.source, tuple(_stored(layout, row, leaf)))
            lying.setdefault(name, []).append(alike[key])
    while True:
        fewer = _worth_it(lying, kept, manifest, tries)
        if fewer == kept:
            return kept
        kept = fewer


def _worth_it(
    lying: Mapping[str, Sequence[_LeafFiles]],
    names: frozenset[str],
    manifest: Manifest,
    known: Mapping[str, EarlierTry],
) -> frozenset[str]:
    by_file: Counter[_Holder] = Counter()
    for place, leaves in Counter(place for name in names for place in lying[name]).items():
        for holder, nbytes in place.stored:
            by_file[holder] += nbytes * leaves
    by_attempt: Counter[str] = Counter()
    for (source, _, _), nbytes in by_file.items():
        by_attempt[manifest.tries[source]] += nbytes
    enough = {one: used for one, used in by_attempt.items() if one in known and used * 2 >= known[one].nbytes}
    tries: set[str] = set()
    along: frozenset[str] = frozenset()
    for one in sorted(enough, key=lambda one: (-enough[one], one)):
        if len(along | known[one].kept_with) <= MAX_EARLIER_ATTEMPTS:
            tries.add(one)
            along |= known[one].kept_with
    sources = {number for number, one in enumerate(manifest.tries) if one in tries}
    files = {holder for holder, used in by_file.items() if used >= MIN_FILE_BYTES and holder[0] in sources}
    return frozenset(
        name
        for name in names
        if all(place.source in sources for place in lying[name])
        and any(holder in files for place in lying[name] for holder, _ in place.stored)
    )


@dataclass(frozen=True, eq=False)
class _LeafFiles:
    """The files that hold a leaf, and its bytes in each; shared by leaves in the same files."""

    source: int
    stored: tuple[tuple[_Holder, int], ...]


def _stored(layout: Layout, row: int, leaf: LeafRow) -> Iterator[tuple[_Holder, int]]:
    """The files that hold a leaf, and its bytes in each."""
    if isinstance(layout, Mesh):
        for node in frozenset[int]().union(*layout.writers(leaf.name, leaf.shape, leaf.item_bytes)):
            boxes = layout.stored_by(node, leaf.name, leaf.shape, leaf.item_bytes)
            yield (leaf.source, node, leaf.group), sum(map(volume, boxes)) * leaf.item_bytes
        return
    for piece in layout.pieces(row, leaf.elements):
        yield (leaf.source, piece.node, leaf.group), (piece.last - piece.first) * leaf.item_bytes


def own_bytes(manifest: Manifest) -> int:
    """Data bytes that an attempt itself wrote, without headers."""
    return sum(shard.nbytes - shard.header_bytes for shard in manifest.shards if shard.source == 0)


def in_bits(names: Collection[str], order: Sequence[str]) -> str:
    """Which names in `order` are among `names`: one bit each, as hex."""
    bits = bytearray(-(-len(order) // 8))
    for index, name in enumerate(order):
        if name in names:
            bits[index // 8] |= 1 << index % 8
    return bits.hex()


def of_bits(bits: str, order: Sequence[str]) -> frozenset[str]:
    """The names that `in_bits` has encoded."""
    data = bytes.fromhex(bits)
    names = order[: 8 * len(data)]
    return frozenset(name for index, name in enumerate(names) if data[index // 8] >> index % 8 & 1)


def of_any(several: Iterable[str], order: Sequence[str]) -> frozenset[str]:
    """The names in any of several bit strings; short messages, because thousands of processes send one."""
    merged = 0
    for bits in set(several):
        merged |= int.from_bytes(bytes.fromhex(bits), "little")
    return of_bits(merged.to_bytes(-(-len(order) // 8), "little").hex(), order)


_World = tuple[int, tuple[str, ...], tuple[int, ...]]
"""Number of processes, names of all nodes, ranks of the hosted ones: decides who compares which parts."""
_Table = tuple[Sequence[Assignment], dict[str, LeafRange]]
"""What a node writes into its files of one group, and the part of each key in them."""


@dataclass(frozen=True)
class _Base:
    """The epoch that a save is compared with. Only rank 0 needs the manifest."""

    attempt_name: str
    world: _World
    known: OwnFiles
    manifest: Manifest | None


@dataclass
class _Current:
    """State of the save in flight."""

    world: _World = (0, (), ())
    referenced: frozenset[str] = frozenset()
    blobs: tuple[BlobRow, ...] = ()
    patience_secs: float = 0.0
    """Seconds that the others wait for threads that hash the remaining blocks."""
    found: ChangeScan = field(default_factory=ChangeScan)
    written: list[KnownFile] = field(default_factory=list)
    tables: dict[int, _Table] = field(default_factory=dict)
    """Cached by the identity of the assignments."""
    manifest: Manifest | None = None


class Reuse:
    """Remembers the content of the newest epoch between saves; `view` returns the log, on rank 0 only."""

    def __init__(self, storage: Storage, view: Callable[[], LogView]) -> None:
        self._storage = storage
        self._view = view
        self._loaded: Manifest | None = None
        self._base: _Base | None = None
        self._current = _Current()
        self._written: dict[str, int] = {}
        self._tables: dict[int, _Table] = {}
        self._order: tuple[SavePlan, tuple[str, ...]] | None = None
        self._surprising: set[str] = set()
        """Leaves that were once wrongly assumed unchanged: now hashed before the write."""
        self._turn = 0

    def forget(self) -> None:
        """Know no epoch: the next save writes everything."""
        self._loaded, self._base = None, None

    def loaded(self, manifest: Manifest) -> None:
        """Note that memory has the content of this epoch; its headers are read on demand."""
        self._loaded, self._base = manifest, None

    def choose(self, job: SaveJob, plan: SavePlan, deadline_secs: float) -> frozenset[str]:
        """The leaves that need not be written; all processes get the same. `plan` writes all leaves."""
        names = tuple(place.name for place in job.places)
        self._current = _Current(
            world=(job.peers.size, names, tuple(state.rank for state in job.states)),
            patience_secs=deadline_secs if job.assume_unchanged else 0.0,
        )
        if self._order is None or self._order[0] is not plan:
            self._order = plan, comparable(plan)
        order = self._order[1]
        looks = together(
            job.peers,
            "save: changed leaves",
            lambda: self._look(job, plan, order),
            deadline_secs=deadline_secs,
        )
        if any(one is None or one[0] != looks[0][0] for one in looks):
            return frozenset()
        unchanged = set(order) - of_any((bits for _, bits in looks), order)
        if not unchanged:
            return frozenset()
        chosen = decide(job.peers, "save: references", lambda: self._chosen(plan, order, unchanged))
        self._current.referenced = of_bits(chosen, order)
        self._current.blobs = plan.blob_rows
        return self._current.referenced

    def _look(self, job: SaveJob, plan: SavePlan, order: Sequence[str]) -> list[str] | None:
        """The attempt to compare with, and which leaves differ from it; None without one."""
        world = self._current.world
        if self._loaded is not None:
            manifest, self._loaded = self._loaded, None
            known = known_of(self._storage, manifest, world[1], world[2])
            self._base = _Base(manifest.tries[0], world, known, manifest)
        elif self._base is not None and self._base.world != world:  # the nodes have changed
            self._base = None
        base = self._base
        if base is None:
            return None
        self._turn += 1
        files = base.known.files
        there = [file for file in files if self._storage.stat(file.path) == file.nbytes]
        missing = [file for file in files if file not in there] if len(there) < len(files) else []
        gone = {part.leaf for file in missing for part in file.parts if part is not None}
        surprising = self._surprising
        assume_unchanged = (lambda leaf: leaf not in surprising) if job.assume_unchanged else None
        found = self._current.found = look(there, _tensors(job, plan), self._turn, assume_unchanged)
        return [base.attempt_name, in_bits(found.changed | gone | base.known.lost, order)]

    def _chosen(self, plan: SavePlan, order: Sequence[str], unchanged: Collection[str]) -> str:
        """The unchanged leaves to reference, as bits. Rank 0 only."""
        base, view = self._base, self._view()
        if base is None or base.manifest is None:
            return ""
        seen = {entry.attempt_name for entry in view.line() if entry.healthy and entry.resumable}
        if base.attempt_name not in seen:
            return ""
        manifest = base.manifest
        bad = {entry.attempt_name for entry in view.entries if not entry.healthy}
        tries = {number for number, name in enumerate(manifest.tries) if name not in bad}
        names = {
            name
            for name in same_leaves(plan, base.world[1], manifest, unchanged)
            if all(manifest.leaves[row].source in tries for row in manifest.rows[name])
        }
        known = {
            name: EarlierTry(nbytes, frozenset(needed_by(view, {name})))
            for name, nbytes in self._sizes(manifest).items()
        }
        return in_bits(within_limits(manifest, names, known), order)

    def _sizes(self, manifest: Manifest) -> dict[str, int]:
        self._written[manifest.tries[0]] = own_bytes(manifest)
        for name in manifest.tries:
            if name not in self._written:
                try:
                    self._written[name] = own_bytes(codec.read_of_attempt(self._storage, name))
                except (RelayError, OSError):
                    continue
        self._written = {name: self._written[name] for name in manifest.tries if name in self._written}
        return self._written

    @property
    def patience_secs(self) -> float:
        """Extra seconds, beyond the write, to wait for the slowest process; the same on all."""
        return self._current.patience_secs

    def each_left(self) -> Iterator[Callable[[], None]]:
        """The pending hashes of referenced leaves; any thread may call them."""
        return self._current.found.each_left(self._current.referenced)

    def check_assumed(self, peers: Peers, position: Position) -> None:
        """Raise ChangedAfterAllError on all if a referenced leaf changed on any; all remember it."""
        referenced = self._current.referenced
        if not referenced:  # on all of them
            return
        order = sorted(referenced)
        differs = self._current.found.not_as_assumed(referenced)
        names = of_any(peers.exchange("save: assumed leaves", in_bits(differs, order)), order)
        if names:
            self._surprising |= names
            raise ChangedAfterAllError(f"epoch {position}: {min(names)!r} has changed beyond its first bytes")

    def let_go(self) -> None:
        """Release all references to the user's memory, after any outcome."""
        self._current.found = ChangeScan()

    def digests(self, rank: int, assignment: Assignment) -> bytes | None:
        """Digests of the first blocks of what a node writes, if computed already."""
        hashed = self._current.found.digests
        if not hashed:
            return None
        name, box = assignment.leaf.name, assignment.box
        return hashed.get((rank, name, assignment.first, assignment.last, box))

    def wrote(self, rank: int, assignments: Sequence[Assignment], report: ShardReport) -> None:
        """Remember the parts that a node wrote into one file."""
        known = self._current.tables.get(id(assignments)) or self._tables.get(id(assignments))
        if known is None or known[0] is not assignments:
            # The parts by key, without random states, gradients and values, which are never referenced.
            found = [
                one for one in assignments if one.leaf.kind == "tensor" and one.leaf.role not in OF_POSITION
            ]
            ranges = [LeafRange(one.leaf.name, one.first, one.last, one.nbytes, one.box) for one in found]
            known = assignments, dict(zip(format_keys([one.key for one in found]), ranges, strict=True))
        self._current.tables[id(assignments)] = known
        parts = tuple(map(known[1].get, report.keys))
        probes = {part: one for key, one in report.probes.items() if (part := known[1].get(key)) is not None}
        file = KnownFile(rank, report.path, report.bytes, parts, report.digests, probes)
        self._current.written.append(file)

    def completed(self, manifest: Manifest) -> Manifest:
        """The manifest of what was written, merged with what it references. Rank 0 only."""
        current, base = self._current, self._base
        if current.referenced and base is not None and base.manifest is not None:
            manifest = replace(manifest, blobs=current.blobs)
            manifest = with_references(manifest, base.manifest, current.referenced, for_all=True)
        current.manifest = manifest
        return manifest

    def committed(self, attempt_name: str) -> None:
        """Note the commit: the next save is compared with this attempt."""
        current = self._current
        kept = self._base.known.files if self._base is not None and current.referenced else ()
        files = [file for one in kept if (file := one.of(current.referenced, current.found.probes)).parts]
        known = OwnFiles((*files, *current.written))
        self._base = _Base(attempt_name, current.world, known, current.manifest)
        self._tables = current.tables
        self._current = _Current()


def _tensors(job: SaveJob, plan: SavePlan) -> TensorOf:
    """The tensors of the hosted nodes, by rank and part; a box only if the plan writes that box."""
    states = {state.rank: state for state in job.states}
    boxes: dict[int, dict[tuple[str, object], Assignment]] = {}

    def tensor_of(rank: int, part: LeafRange) -> torch.Tensor | None:
        if part.box is None:
            leaf = states[rank].leaves.get(part.leaf)
            if leaf is None or isinstance(leaf.content, Value) or is_sharded(leaf.content):
                return None
            return leaf.content
        if rank not in boxes:
            boxes[rank] = {(a.leaf.name, a.box): a for a in plan.assignments(rank) if a.box is not None}
        assignment = boxes[rank].get((part.leaf, part.box))
        return None if assignment is None else states[rank].tensor(assignment)

    return tensor_of
