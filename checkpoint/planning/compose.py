"""From a plan and the reports of its writers to the manifest of an epoch: pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchrelay.checkpoint.disk.manifest import BlobRow, LeafRow, Manifest, ShardRow, World
from torchrelay.checkpoint.facts import Facts
from torchrelay.checkpoint.planning.assignments import Plan, PlannedLeaf
from torchrelay.checkpoint.position import Position
from torchrelay.jobs.places import NodePlace

Json = Any


@dataclass(frozen=True)
class TryIdentity:
    """Which job, position and try a manifest is of."""

    job_uuid: str
    job_name: str
    position: Position
    branch: int
    generation: int
    try_name: str


def world_of(places: Sequence[NodePlace]) -> World:
    """The world as a manifest keeps it, from the places of all nodes in rank order."""
    hosts = sorted({(place.host_index, place.host) for place in places})
    number = {host: index for index, host in enumerate(hosts)}
    return World(
        nodes=tuple(place.name for place in places),
        hosts=tuple(host for _, host in hosts),
        host_of=tuple(number[place.host_index, place.host] for place in places),
    )


def compose(
    plan: Plan,
    identity: TryIdentity,
    world: World,
    shards: Sequence[ShardRow],
    values: Mapping[str, Json],
    facts: Facts,
    blobs: Sequence[BlobRow] | None = None,
) -> Manifest:
    """The manifest of a try. `values` has the typed form of the plan's inline values, by leaf name.

    `blobs` adds blobs without leaves and forced scopes; what it leaves out is inferred from the leaves.
    """
    return Manifest(
        job_uuid=identity.job_uuid,
        job_name=identity.job_name,
        position=identity.position,
        branch=identity.branch,
        generation=identity.generation,
        tries=(identity.try_name,),
        world=world,
        blobs=_blobs(plan, blobs or ()),
        leaves=tuple(_leaf(planned) for planned in plan.rows),
        layouts=plan.layouts,
        shards=tuple(sorted(shards, key=lambda shard: shard.order)),
        plan_hash=plan.hash,
        values={
            row: values[planned.leaf.name]
            for row, planned in enumerate(plan.rows)
            if planned.inline and planned.leaf.alias_of is None
        },
        facts=facts,
    )


def blob_rows(plan: Plan) -> tuple[BlobRow, ...]:
    """The blobs of a plan, as its leaves tell of them."""
    return _blobs(plan, ())


def _leaf(planned: PlannedLeaf) -> LeafRow:
    leaf = planned.leaf
    return LeafRow(
        leaf.name, leaf.blob, leaf.kind, leaf.role.value, leaf.dtype, tuple(leaf.shape), leaf.nbytes,
        planned.scope, leaf.group, planned.layout, leaf.alias_of,
    )  # fmt: skip


def _blobs(plan: Plan, said: Sequence[BlobRow]) -> tuple[BlobRow, ...]:
    found = {blob.name: blob for blob in said}
    members: dict[str, list[PlannedLeaf]] = {}
    for planned in plan.rows:
        members.setdefault(planned.leaf.blob, []).append(planned)
    for name, leaves in members.items():
        scopes = {planned.scope for planned in leaves}
        scope = scopes.pop() if len(scopes) == 1 else "replicated"
        found.setdefault(name, BlobRow(name, _kind(name, leaves), scope))
    return tuple(found[name] for name in sorted(found))


def _kind(blob: str, leaves: Sequence[PlannedLeaf]) -> str:
    """A blob that is a leaf itself is a tensor or a value, unless only an object can take that leaf."""
    own = next((planned.leaf for planned in leaves if planned.leaf.name == blob), None)
    return "stateful" if own is None or own.role.value in ("state", "subclass") else own.kind
