"""The set of shards becomes an epoch: the manifest is written, then the record. Rank 0 only.

What the manifest says of the leaves depends on the plan alone: of a new plan it is checked and encoded
while rank 0 waits for the shards of the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torchrelay.checkpoint.format.canonical_json import sha256
from torchrelay.checkpoint.format.log_state import Entry
from torchrelay.checkpoint.format.manifest import codec
from torchrelay.checkpoint.format.manifest.schema import (
    Manifest,
    ShardRow,
    columns,
    manifest_path,
    try_directory,
)
from torchrelay.checkpoint.planning.assignments import Plan, PlannedLeaf
from torchrelay.checkpoint.planning.compose import TryIdentity, compose, world_of
from torchrelay.checkpoint.report import Row, shards_in, values_in
from torchrelay.checkpoint.space import is_full
from torchrelay.checkpoint.state.leaf import Value
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.errors import SaveFailedError, StorageError
from torchrelay.jobs.runtime import undisturbed

if TYPE_CHECKING:
    from torchrelay.checkpoint.save import SaveJob

_FILE = columns(ShardRow, "node", "group")


@undisturbed()
def prepare(job: SaveJob, plan: Plan) -> None:
    """Do what `commit` then finds done for this plan; raises DamagedError for what no reader would accept."""
    unknown = dict.fromkeys(plan.inline_rows.values())
    manifest = _manifest(job, plan, job.position.directory("0" * 12), (), unknown)
    codec.prepare(manifest if job.reuse is None else job.reuse.completed(manifest))
    _ = plan.writers  # remembered there


def commit(job: SaveJob, plan: Plan, try_name: str, rows: list[Row]) -> Entry:
    """Write the manifest, then append the record. Rank 0 only."""
    try:
        with undisturbed():
            entry = _write_manifest(job, plan, try_name, rows)
    except Exception:
        discard(job, try_name)  # no record can name it yet
        raise
    try:
        job.commit(entry)
    except StorageError as error:
        if is_full(error) and not job.known(entry):
            discard(job, try_name)  # else the full epoch itself would keep every later one from being saved
        raise
    return entry


def discard(job: SaveJob, try_name: str) -> None:
    """Give back the space of a try that failed. Every process has reported, so nobody writes there."""
    if job.leads:
        with suppress(StorageError):
            for name in job.storage.list(try_directory(try_name)):
                job.storage.delete(f"{try_directory(try_name)}/{name}")
            job.storage.delete(try_directory(try_name))


def _write_manifest(job: SaveJob, plan: Plan, try_name: str, rows: list[Row]) -> Entry:
    """Check that the set of shards is exact, and say durably what the epoch consists of."""
    shards = shards_in(rows)
    _check_exact(job, plan, len(rows), shards)
    manifest = _manifest(job, plan, try_name, shards, values_in(rows))
    if job.reuse is not None:
        manifest = job.reuse.completed(manifest)
    data = codec.encode(manifest)
    _write_file(job.storage, manifest_path(try_name), data)
    job.storage.sync_dir(try_directory(try_name))
    return Entry(
        branch=manifest.branch,
        position=job.position,
        try_name=try_name,
        manifest_bytes=len(data),
        manifest_sha256=sha256(data),
        needs=manifest.needs,
        groups=manifest.groups,
    )


def _manifest(
    job: SaveJob, plan: Plan, try_name: str, shards: Sequence[ShardRow], values: Mapping[str, Any]
) -> Manifest:
    holding = job.holding
    identity = TryIdentity(
        holding.uuid, holding.job, job.position, holding.branch, holding.generation, try_name
    )
    world, sizes = world_of(job.places), _value_sizes(job, plan)
    return compose(plan, identity, world, shards, values, job.facts, sizes=sizes)


def _value_sizes(job: SaveJob, plan: Plan) -> dict[int, int]:
    """The bytes of the hosted nodes' values as they are now, by row of the plan."""
    sizes = {}
    for row in plan.value_rows:
        planned = plan.rows[row]
        for state in job.states:
            leaf = state.leaves.get(planned.leaf.name)
            if leaf is not None and isinstance(leaf.content, Value) and _holds(plan, planned, state.rank):
                sizes[row] = leaf.content.nbytes
    return sizes


def _holds(plan: Plan, planned: PlannedLeaf, node: int) -> bool:
    return node in plan.layouts[planned.layout].nodes


def _check_exact(job: SaveJob, plan: Plan, reports: int, shards: Sequence[ShardRow]) -> None:
    wanted = plan.writers
    found = set(map(_FILE, shards))
    if wanted != found or reports != len(job.places):
        names = {place.rank: place.name for place in job.places}
        missing = ", ".join(f"{names.get(node, node)} ({group})" for node, group in sorted(wanted ^ found))
        raise SaveFailedError(f"epoch {job.position}: the shards do not match the plan: {missing or reports}")


def _write_file(storage: Storage, path: str, data: bytes) -> None:
    handle = storage.open_exclusive(path)
    try:
        handle.write_at(0, memoryview(data))
        handle.sync_file()
    finally:
        handle.close()
