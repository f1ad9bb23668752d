"""Who writes which bytes of an epoch: pure, computed alike by every rank without talking.

Only parameters and optimizer tensors are split between the nodes that replicate them: module buffers
differ between replicas by design, and values are small. Split leaves form one byte string per replica
set and group (item size descending, then name), so that a parameter and its optimizer state are spread
over all replicas. Other replicated leaves are written whole by the first replica, `rank` leaves by
their node, `host` leaves by the lowest rank of each host that has them. Sharded leaves lie on their mesh,
whose rule says who stores which box.

Nodes may have different leaves (pipeline stages): a plan is made for node classes, and a replica set is
every node whose class has an identical leaf.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING

from torchrelay.checkpoint.format import canonical_json
from torchrelay.checkpoint.format.manifest.schema import Layout, PerNode, Replicated, Split, table
from torchrelay.checkpoint.format.mesh_geometry import Replicated as ReplicatedPlacement
from torchrelay.checkpoint.format.names import Recent, first_of_each
from torchrelay.checkpoint.save.planning.assignments import (
    CUT_BYTES,
    NodeClass,
    Plan,
    PlannedLeaf,
    cuts_between,
    item_bytes,
    same,
    sorted_leaves,
)
from torchrelay.errors import SaveFailedError
from torchrelay.records import dataclass

if TYPE_CHECKING:
    from torchrelay.checkpoint.state.leaf import LeafSpec


Held = tuple["LeafSpec", tuple[int, ...]]
"""A leaf and the nodes that have it."""


def joined(held: Sequence[Held]) -> list[Held]:
    """Leaves of one name and form that lie on several sub-meshes are replicas: one leaf on one mesh.

    The joined mesh has the sub-meshes, by their first nodes, along a new first dimension. Raises
    SaveFailedError, naming the leaf, where a node of a mesh does not have it, or sub-meshes overlap.
    """
    distinct = [(id(leaf.sharding), id(nodes)) for leaf, nodes in held]  # many are the same objects
    for leaf, nodes in first_of_each(distinct, held).values():
        check_complete(leaf, nodes)
    named: dict[str, list[Held]] = {}
    for leaf, nodes in held:
        named.setdefault(leaf.name, []).append((leaf, nodes))
    return [one for group in named.values() for one in (group if len(group) == 1 else _joined_forms(group))]


def _joined_forms(group: Sequence[Held]) -> list[Held]:
    """Of leaves of one name, those that differ only in the nodes of their mesh are made one."""
    found: list[Held] = []
    alike: dict[LeafSpec, list[Held]] = {}
    for leaf, nodes in group:
        if leaf.sharding is None:
            found.append((leaf, nodes))
        else:
            apart = replace(leaf, sharding=replace(leaf.sharding, nodes=()))
            alike.setdefault(apart, []).append((leaf, nodes))
    return found + [_joined(some) if len(some) > 1 else some[0] for some in alike.values()]


def _joined(group: Sequence[Held]) -> Held:
    leaf = group[0][0]
    meshes = sorted((leaf.sharding for leaf, _ in group if leaf.sharding), key=lambda mesh: min(mesh.nodes))
    places = tuple(node for mesh in meshes for node in mesh.nodes)
    if len(set(places)) != len(places):
        raise SaveFailedError(
            f"{leaf.name!r} is sharded over meshes that overlap ({', '.join(str(m.nodes) for m in meshes)}): "
            "build its device mesh alike on all ranks"
        )
    extents = (len(meshes), *meshes[0].extents)
    whole = replace(
        meshes[0], nodes=places, extents=extents, placements=(ReplicatedPlacement(), *meshes[0].placements)
    )
    return replace(leaf, sharding=whole), tuple(sorted({node for _, some in group for node in some}))


def check_complete(leaf: LeafSpec, nodes: Sequence[int]) -> None:
    """Raises SaveFailedError, naming the leaf, where a node of its mesh is not one that has it."""
    mesh = leaf.sharding
    if mesh is not None and (absent := sorted(set(mesh.nodes) - set(nodes))):
        raise SaveFailedError(
            f"{leaf.name!r} is sharded over ranks {list(mesh.nodes)}, but rank "
            f"{', '.join(map(str, absent))} has no such leaf, or has it placed otherwise: build it with the "
            "same device mesh and placements on all ranks of the mesh"
        )


PLAN_VERSION = 2
SPLIT_ROLES = ("parameter", "optimizer")


@dataclass(frozen=True)
class Question:
    """Everything that decides a plan.

    `scopes` gives the scope of leaves by name (`replicated` where it says nothing), `hosts` the host
    number of every node. Leaves in `referenced` are unchanged since an earlier try, which keeps them:
    nobody writes them and they are no rows of the plan.
    """

    classes: tuple[NodeClass, ...]
    cut: int = CUT_BYTES
    scopes: Mapping[str, str] = field(default_factory=dict)
    hosts: tuple[int, ...] | None = None
    referenced: frozenset[str] = frozenset()

    def scope_of(self, leaf: LeafSpec) -> str:
        """The scope of a leaf."""
        return "sharded" if leaf.sharding is not None else self.scopes.get(leaf.name, "replicated")


def plan_replicas(
    specs: Sequence[LeafSpec],
    nodes: int,
    *,
    cut: int = CUT_BYTES,
    scopes: Mapping[str, str] | None = None,
    hosts: Sequence[int] | None = None,
    referenced: Collection[str] = (),
) -> Plan:
    """Plan a save of `nodes` nodes that all have the leaves `specs`; see `Question` for the rest."""
    everybody = NodeClass(tuple(range(nodes)), tuple(specs))
    return plan_classes([everybody], cut=cut, scopes=scopes, hosts=hosts, referenced=referenced)


def plan_classes(
    classes: Sequence[NodeClass],
    *,
    cut: int = CUT_BYTES,
    scopes: Mapping[str, str] | None = None,
    hosts: Sequence[int] | None = None,
    referenced: Collection[str] = (),
) -> Plan:
    """Plan a save of nodes of several classes; see `Question`."""
    known_hosts = None if hosts is None else tuple(hosts)
    question = Question(tuple(classes), cut, dict(scopes or {}), known_hosts, frozenset(referenced))
    return _make(question, plan_hash(question))


def unusual(scopes: Mapping[str, str]) -> dict[str, str]:
    """Scopes by name but `replicated`, which is what no scope means."""
    return {name: scope for name, scope in scopes.items() if scope != "replicated"}


def plan_hash(question: Question) -> str:
    """SHA-256 (hex) over all that decides a plan; ranks compare it before they write."""
    classes = [
        b"[%b,%b]" % (canonical_json.dumps_read(one.nodes), canonical_json.dumps(one.digest))
        for one in question.classes
    ]
    stated = {
        "version": canonical_json.dumps(PLAN_VERSION),
        "cut": canonical_json.dumps(question.cut),
        "scopes": canonical_json.dumps(unusual(question.scopes)),
        "hosts": canonical_json.dumps_read(question.hosts),
        "referenced": canonical_json.dumps(sorted(question.referenced)),
        "classes": b"[%b]" % b",".join(classes),
    }
    return canonical_json.sha256(canonical_json.object_of(stated))


def _make(question: Question, key: str) -> Plan:
    held = _holders(question.classes, question.referenced)
    rows = tuple(leaf for leaf, _ in held)
    layouts = _Layouts()
    numbers, scopes = [-1] * len(rows), [question.scope_of(leaf) for leaf in rows]
    strings: dict[tuple[int, str], tuple[tuple[int, ...], list[int]]] = {}  # of node sets by identity
    for row, (leaf, nodes) in enumerate(held):
        scope = scopes[row]
        if leaf.sharding is not None:
            numbers[row] = layouts.number(leaf.sharding)
        elif scope == "replicated" and _splits(leaf):
            strings.setdefault((id(nodes), leaf.group), (nodes, []))[1].append(row)
        else:
            numbers[row] = layouts.unsplit(scope, nodes, question.hosts)
    for nodes, _, members in sorted((nodes, group, rows) for (_, group), (nodes, rows) in strings.items()):
        number = layouts.number(_split_layout(nodes, members, rows, question.cut))
        for row in members:
            numbers[row] = number
    planned = table(PlannedLeaf, zip(rows, scopes, numbers, strict=True))
    return Plan(planned, tuple(layouts.found), key)


def _holders(
    classes: Sequence[NodeClass], referenced: frozenset[str]
) -> list[tuple[LeafSpec, tuple[int, ...]]]:
    """Every distinct leaf with the nodes that have it, by name and first node."""
    if len(classes) == 1:  # within a class names differ
        nodes = tuple(sorted(classes[0].nodes))
        leaves = [leaf for leaf in sorted_leaves(classes[0].leaves) if leaf.name not in referenced]
        for leaf in first_of_each([id(leaf.sharding) for leaf in leaves], leaves).values():
            check_complete(leaf, nodes)
        return [(leaf, nodes) for leaf in leaves]
    found: dict[object, tuple[LeafSpec, list[int]]] = {}
    unlike = shared_unlike(classes)
    for number, node_class in enumerate(classes):
        for leaf in node_class.leaves:
            if leaf.name not in referenced:
                first, numbers = found.setdefault(key := same(leaf), (leaf, []))
                numbers.append(number)
                same_as = None if leaf.name in unlike else first.same_as or leaf.same_as
                if same_as != first.same_as:
                    found[key] = replace(first, same_as=same_as), numbers
    sets: dict[tuple[int, ...], tuple[int, ...]] = {}
    held = []
    for leaf, numbers in found.values():
        some = tuple(numbers)
        if some not in sets:
            sets[some] = tuple(sorted(node for number in some for node in classes[number].nodes))
        held.append((leaf, sets[some]))
    return sorted(joined(held), key=lambda pair: (pair[0].name, pair[1]))


def shared_unlike(classes: Sequence[NodeClass]) -> dict[str, str]:
    """Leaves that some nodes share with the leaf of the second name, and others keep apart from it.

    Of those a plan says of no node that they are shared; of others it says it of all, as loads look whether
    both are there.
    """
    shared = {leaf.name: leaf.same_as for one in classes for leaf in one.leaves if leaf.same_as is not None}
    found: dict[str, str] = {}
    for some in [one.leaves for one in classes] if shared else ():
        known = {leaf.name: leaf.same_as for leaf in some}
        unlike = {name: other for name, other in shared.items() if known.get(name, other) != other}
        found.update({name: other for name, other in unlike.items() if other in known or known[name]})
    return found


def _splits(leaf: LeafSpec) -> bool:
    return leaf.kind == "tensor" and leaf.role.value in SPLIT_ROLES and leaf.alias_of is None


def _unsplit_layout(scope: str, nodes: tuple[int, ...], hosts: Sequence[int] | None) -> Layout:
    if scope == "rank":
        return PerNode(nodes)
    if scope == "host":
        return PerNode(_lowest_of_hosts(nodes, hosts))
    return Replicated(nodes)


def _lowest_of_hosts(nodes: tuple[int, ...], hosts: Sequence[int] | None) -> tuple[int, ...]:
    lowest: dict[int, int] = {}
    for node in nodes:
        lowest.setdefault(hosts[node] if hosts else 0, node)
    return tuple(sorted(lowest.values()))


def _split_layout(nodes: tuple[int, ...], members: list[int], rows: Sequence[LeafSpec], cut: int) -> Split:
    widths = {row: item_bytes(rows[row]) for row in members}  # in the order of their names
    order = sorted(members, key=widths.__getitem__, reverse=True)
    cuts = cuts_between([rows[row].nbytes for row in order], [widths[row] for row in order], len(nodes), cut)
    return Split(nodes, tuple(order), cuts)


class _Layouts:
    """Numbers layouts, an equal one once. Many leaves have the same object, which is then not compared."""

    def __init__(self) -> None:
        self.found: list[Layout] = []
        self._numbers: dict[Layout, int] = {}
        self._same: dict[object, int] = {}
        self._kept: list[Layout] = []

    def number(self, layout: Layout) -> int:
        if id(layout) not in self._same:
            if layout not in self._numbers:
                self._numbers[layout] = len(self.found)
                self.found.append(layout)
            self._same[id(layout)] = self._numbers[layout]
            self._kept.append(layout)
        return self._same[id(layout)]

    def unsplit(self, scope: str, nodes: tuple[int, ...], hosts: Sequence[int] | None) -> int:
        key = (scope, id(nodes))
        if key not in self._same:
            self._same[key] = self.number(_unsplit_layout(scope, nodes, hosts))
        return self._same[key]


_REMEMBERED = 4
"""Plans: a save that refers to older bytes asks twice."""


@dataclass(frozen=True, eq=False)
class _Answered:
    """A plan and what was asked. Classes and scopes are compared by identity: they never change."""

    classes: tuple[NodeClass, ...]
    scopes: Mapping[str, str]
    hosts: tuple[int, ...]
    referenced: frozenset[str]
    plan: Plan

    def to(self, classes: object, scopes: object, hosts: tuple[int, ...], referenced: frozenset[str]) -> bool:
        """Whether this was asked."""
        same = self.classes is classes and self.scopes is scopes
        return same and self.hosts == hosts and self.referenced == referenced


class RepeatedPlans:
    """Remembers the last few plans; anything that is not the same object is asked anew."""

    def __init__(self) -> None:
        self._answered: Recent[_Answered] = Recent(_REMEMBERED)

    def plan(
        self,
        classes: tuple[NodeClass, ...],
        scopes: Mapping[str, str],
        hosts: tuple[int, ...],
        referenced: frozenset[str] = frozenset(),
    ) -> Plan:
        """The plan of `plan_classes` for the same arguments."""

        def make() -> _Answered:
            plan = plan_classes(classes, scopes=scopes, hosts=hosts, referenced=referenced)
            return _Answered(classes, scopes, hosts, referenced, plan)

        return self._answered.get(lambda one: one.to(classes, scopes, hosts, referenced), make).plan
