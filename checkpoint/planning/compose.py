"""From a plan and the reports of its writers to the manifest of an epoch: pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchrelay.checkpoint.format.manifest.position import Facts, Position
from torchrelay.checkpoint.format.manifest.schema import BlobRow, Manifest, ShardRow, World, in_order
from torchrelay.checkpoint.format.utils import Recent
from torchrelay.checkpoint.planning.assignments import Plan
from torchrelay.jobs.cluster import NodePlace
from torchrelay.records import dataclass

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
    """The world as a manifest keeps it, from the places of all nodes in rank order.

    The last one is remembered, so that it is the same object while the places are the same.
    """
    asked = tuple(places)
    return _worlds.get(lambda one: one[0] == asked, lambda: (asked, _world_of(asked)))[1]


_worlds: Recent[tuple[tuple[NodePlace, ...], World]] = Recent(1)


def _world_of(places: Sequence[NodePlace]) -> World:
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
    sizes: Mapping[int, int] | None = None,
) -> Manifest:
    """The manifest of a try. `values` has the typed form of the plan's inline values, by leaf name.

    `sizes` are the bytes of values by row, where they may be others than when the plan was made.
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
        blobs=_with_said(plan.blob_rows, blobs) if blobs else plan.blob_rows,
        leaves=plan.rows_with(sizes or {}),
        layouts=plan.layouts,
        shards=tuple(sorted(shards, key=in_order)),
        plan_hash=plan.hash,
        values={row: values[name] for row, name in plan.inline_rows.items()},
        facts=facts,
    )


def _with_said(found: Sequence[BlobRow], said: Sequence[BlobRow]) -> tuple[BlobRow, ...]:
    blobs = {blob.name: blob for blob in (*found, *said)}
    return tuple(blobs[name] for name in sorted(blobs))
