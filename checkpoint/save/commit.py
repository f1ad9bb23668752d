"""Turn written shards into an epoch: reports of writers, the manifest, the record; check free space.

Reports are rows of few strings, which rank 0 decodes quickly even for ten thousand nodes. What the manifest
states of leaves depends on the plan only: for a new plan it is checked and encoded while rank 0 waits for the
shards of the others.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

from torchrelay.checkpoint.format.canonical_json import sha256
from torchrelay.checkpoint.format.manifest import codec
from torchrelay.checkpoint.format.manifest.schema import (
    EpochNodes,
    Manifest,
    ShardRow,
    columns,
    in_order,
    table,
)
from torchrelay.checkpoint.format.names import Recent, attempt_directory, manifest_path
from torchrelay.checkpoint.format.position import CommittedPosition, Facts, Position
from torchrelay.checkpoint.log.view import LeaseInfo
from torchrelay.checkpoint.save.assignments import SavePlan
from torchrelay.checkpoint.state.leaf import Value
from torchrelay.checkpoint.storage.base import Storage, SupportsFreeSpace
from torchrelay.errors import SaveFailedError, StorageError
from torchrelay.jobs.cluster import NodePlace
from torchrelay.jobs.runtime import undisturbed
from torchrelay.records import Json, dataclass

if TYPE_CHECKING:
    from torchrelay.checkpoint.save.pipeline import SaveJob


def world_of(places: Sequence[NodePlace]) -> EpochNodes:
    """The nodes as a manifest stores them, by rank; the same object while the places are the same."""
    asked = tuple(places)

    def make() -> tuple[tuple[NodePlace, ...], EpochNodes]:
        hosts = sorted({(place.host_index, place.host) for place in asked})
        number = {host: index for index, host in enumerate(hosts)}
        return asked, EpochNodes(
            nodes=tuple(place.name for place in asked),
            hosts=tuple(host for _, host in hosts),
            host_of=tuple(number[place.host_index, place.host] for place in asked),
        )

    return _worlds.get(lambda one: one[0] == asked, make)[1]


_worlds: Recent[tuple[tuple[NodePlace, ...], EpochNodes]] = Recent(1)


def compose(
    plan: SavePlan,
    holding: LeaseInfo,
    position: Position,
    attempt_name: str,
    world: EpochNodes,
    shards: Sequence[ShardRow],
    values: Mapping[str, Json],
    facts: Facts,
    sizes: Mapping[int, int] | None = None,
) -> Manifest:
    """The manifest of an attempt: `values` are inline values by leaf, `sizes` bytes of values by row."""
    return Manifest(
        job_uuid=holding.uuid,
        job_name=holding.job,
        position=position,
        branch=holding.branch,
        generation=holding.generation,
        tries=(attempt_name,),
        world=world,
        blobs=plan.blob_rows,
        leaves=plan.rows_with(sizes or {}),
        layouts=plan.layouts,
        shards=tuple(sorted(shards, key=in_order)),
        plan_hash=plan.hash,
        values={row: values[name] for row, name in plan.inline_rows.items()},
        facts=facts,
    )


FILE_BYTES = 8 << 10
"""Disk space of a file beside its data: padding of the header, directory entry."""
OWN_FILES = 4
"""Disk space of the attempt's directory, its manifest, its timings, the record."""


def check_room(
    storage: Storage, plan: SavePlan, position: Position, nodes: Collection[int] | None = None
) -> None:
    """Raise SaveFailedError, with needed and free bytes, for a save that cannot fit.

    `nodes` are those that write to this storage (None: all). Passes if the storage does not know its free
    space; other writers may still fill it meanwhile.
    """
    room = storage.room() if isinstance(storage, SupportsFreeSpace) else None
    if room is None:
        return
    free_bytes, free_files = room
    files = sum(1 for node, _ in plan.writers if nodes is None or node in nodes) + OWN_FILES
    total = plan.total_bytes
    if nodes is not None:
        total = sum(one.nbytes for node in nodes for one in plan.assignments(node) if not one.inline)
    nbytes = total + files * FILE_BYTES
    if nbytes > free_bytes:
        raise _full(
            f"No space left for epoch {position} in {storage.url}: it needs {nbytes} bytes, {free_bytes} "
            "are free; free some space"
        )
    if files > free_files:
        raise _full(
            f"No space left for epoch {position} in {storage.url}: it needs {files} files, {free_files} "
            "can be made (inodes); delete files there"
        )


def _full(text: str) -> SaveFailedError:
    error = SaveFailedError(text)
    error.errno = errno.ENOSPC
    return error


Row = list[Json]
"""A report as JSON: see `NodeReport.row`."""


@dataclass(frozen=True)
class NodeReport:
    """A node's report: its files, its values for the manifest, and its seconds by phase."""

    rank: int
    shards: tuple[ShardRow, ...]
    values: Mapping[str, Json]
    secs: Mapping[str, float]

    def row(self) -> Row:
        """The report as JSON: see `shards_in` and `secs_in` for the texts."""
        shards = "\n".join(
            f"{one.group} {one.part} {one.nbytes} {one.header_bytes} {one.header_sha256}"
            for one in self.shards
        )
        secs = " ".join(f"{phase}={spent:.6f}" for phase, spent in self.secs.items())
        return [self.rank, shards, dict(self.values) or None, secs]


def shards_in(rows: Sequence[Row]) -> tuple[ShardRow, ...]:
    """All files in the rows of reports."""
    words = " ".join([shards for _, shards, _, _ in rows]).split()
    ranks = [rank for rank, shards, _, _ in rows for _ in shards.splitlines()]
    groups, parts, sizes, headers, digests = (words[at::5] for at in range(5))
    numbers = (map(int, column) for column in (parts, sizes, headers))
    return table(ShardRow, zip(ranks, groups, *numbers, digests, [0] * len(ranks), strict=True))


def bytes_in(row: Row) -> int:
    """The bytes of all files of one node."""
    return sum(int(line.split()[2]) for line in row[1].splitlines())


def values_in(rows: Sequence[Row]) -> dict[str, Json]:
    """All values for the manifest, by leaf name."""
    return {name: value for _, _, values, _ in rows if values for name, value in values.items()}


def secs_in(row: Row) -> dict[str, float]:
    """The seconds by phase of one node."""
    pairs = (one.split("=") for one in row[3].split())
    return {phase: float(spent) for phase, spent in pairs}


_FILE = columns(ShardRow, "node", "group")


@undisturbed()
def prepare(job: SaveJob, plan: SavePlan) -> None:
    """Compute ahead what `commit` needs for this plan; raises DamagedError if no reader would accept it."""
    unknown = dict.fromkeys(plan.inline_rows.values())
    manifest = _manifest(job, plan, job.position.directory("0" * 12), (), unknown)
    codec.prepare(manifest if job.reuse is None else job.reuse.completed(manifest))
    _ = plan.writers  # cached there


def commit(job: SaveJob, plan: SavePlan, attempt_name: str, rows: list[Row]) -> CommittedPosition:
    """Write the manifest, then append the record. Rank 0 only."""
    try:
        with undisturbed():
            entry = _write_manifest(job, plan, attempt_name, rows)
    except Exception:
        discard(job, attempt_name)  # no record can name it yet
        raise
    try:
        job.commit(entry)
    except StorageError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and not job.known(entry):
            discard(job, attempt_name)  # else a full disk would fail all later saves
        raise
    return entry


def discard(job: SaveJob, attempt_name: str) -> None:
    """Delete the files of an attempt that failed. Every process has reported, so none writes there."""
    if job.leads:
        with suppress(StorageError):
            for name in job.storage.list(attempt_directory(attempt_name)):
                job.storage.delete(f"{attempt_directory(attempt_name)}/{name}")
            job.storage.delete(attempt_directory(attempt_name))


def _write_manifest(job: SaveJob, plan: SavePlan, attempt_name: str, rows: list[Row]) -> CommittedPosition:
    """Check that the set of shards is exact, and write the manifest durably."""
    shards = shards_in(rows)
    wanted, found = plan.writers, set(map(_FILE, shards))
    if wanted != found or len(rows) != len(job.places):
        names = {place.rank: place.name for place in job.places}
        missing = ", ".join(f"{names.get(node, node)} ({group})" for node, group in sorted(wanted ^ found))
        raise SaveFailedError(
            f"epoch {job.position}: the shards do not match the plan: {missing or len(rows)}"
        )
    manifest = _manifest(job, plan, attempt_name, shards, values_in(rows))
    if job.reuse is not None:
        manifest = job.reuse.completed(manifest)
    data = codec.encode(manifest)
    with closing(job.storage.open_exclusive(manifest_path(attempt_name))) as handle:
        handle.write_at(0, memoryview(data))
        handle.sync_file()
    job.storage.sync_dir(attempt_directory(attempt_name))
    return CommittedPosition(
        branch=manifest.branch,
        position=job.position,
        attempt_name=attempt_name,
        manifest_bytes=len(data),
        manifest_sha256=sha256(data),
        needs=manifest.needs,
        groups=manifest.groups,
    )


def _manifest(
    job: SaveJob, plan: SavePlan, attempt_name: str, shards: Sequence[ShardRow], values: Mapping[str, Any]
) -> Manifest:
    sizes = {}  # current bytes of the hosted nodes' values, by row of the plan
    for row in plan.value_rows:
        planned = plan.rows[row]
        for state in job.states:
            leaf = state.leaves.get(planned.leaf.name)
            holds = state.rank in plan.layouts[planned.layout].nodes
            if leaf is not None and isinstance(leaf.content, Value) and holds:
                sizes[row] = leaf.content.nbytes
    written = (job.holding, job.position, attempt_name, world_of(job.places))
    return compose(plan, *written, shards, values, job.facts, sizes=sizes)


@dataclass(frozen=True)
class Apart:
    """Processes that share a directory; the lowest makes directories, `committed` follows each commit."""

    ranks: tuple[int, ...]
    committed: Callable[[CommittedPosition], None]
