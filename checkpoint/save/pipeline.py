"""Run one save: capture, plan, write, commit, acknowledge. All processes take part.

Each phase ends with an exchange, so that an error of one process fails the save on all and nothing is
committed. Only rank 0 accesses the log.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from math import isfinite
from typing import TYPE_CHECKING, Any

import torch

from torchrelay.checkpoint.format.dtypes import BLOCK, SIZE, block_digests
from torchrelay.checkpoint.format.manifest.schema import ShardRow
from torchrelay.checkpoint.format.names import DATA, attempt_directory, stats_path
from torchrelay.checkpoint.format.position import CommittedPosition, Facts, Position
from torchrelay.checkpoint.format.shard import writer
from torchrelay.checkpoint.format.shard.entries import Entries
from torchrelay.checkpoint.format.shard.header import ShardIdentity
from torchrelay.checkpoint.format.shard.writer import write_shard
from torchrelay.checkpoint.log.record import entry_json, entry_of
from torchrelay.checkpoint.log.view import LeaseInfo
from torchrelay.checkpoint.save.agreement import SpecExchange
from torchrelay.checkpoint.save.assignments import SavePlan
from torchrelay.checkpoint.save.capture import NodeState
from torchrelay.checkpoint.save.change_detection import hash_threads
from torchrelay.checkpoint.save.commit import (
    Apart,
    NodeReport,
    Row,
    bytes_in,
    check_room,
    commit,
    discard,
    prepare,
    secs_in,
)
from torchrelay.checkpoint.save.dedup import Reuse
from torchrelay.checkpoint.state.leaf import Leaf, Value
from torchrelay.checkpoint.state.names import Kind, kind_of
from torchrelay.checkpoint.state.tree_leaves import container_tensors
from torchrelay.checkpoint.storage.base import Placed, Storage
from torchrelay.checkpoint.storage.local_io import WORTH_IT
from torchrelay.checkpoint.storage.work import WRITERS, Clock, beside, patience_secs, progress
from torchrelay.errors import ChangedAfterAllError, PeerError, SaveFailedError, StorageError
from torchrelay.jobs.cluster import NodePlace
from torchrelay.jobs.session import Peers, Session, decide, is_agreed, together, warn
from torchrelay.metadata.handlers import NodeStats, NodeTimes
from torchrelay.records import dataclass

if TYPE_CHECKING:
    from torchrelay.checkpoint.save.replicas import WholeBytes


@dataclass(frozen=True)
class SaveJob:
    """Context of a save in this process."""

    storage: Storage
    peers: Peers
    places: tuple[NodePlace, ...]
    """All nodes of the job under their stored names, in the order of ranks."""
    states: tuple[NodeState, ...]
    """The hosted nodes."""
    position: Position
    facts: Facts
    holding: LeaseInfo
    """Job and branch of the directory."""
    commit: Callable[[CommittedPosition], None]
    """Appends the commit record; called on rank 0 only."""
    known: Callable[[CommittedPosition], bool] = lambda entry: True
    """Reads the log again; whether it may name an entry. Called on rank 0 when its commit failed."""
    make_room: Callable[[], object] = lambda: None
    """Called on rank 0 before anything is written: returns when pending deletions are done."""
    written: Callable[[], None] = lambda: None
    """Called when the hosted nodes are on disk; an error fails the save of all processes."""
    reuse: Reuse | None = None
    """Finds unchanged leaves to reference; None writes all."""
    assume_unchanged: bool = False
    """Treat a tensor as unchanged if its first bytes match; `carry_out` verifies this before the commit."""
    writers: int = WRITERS
    """Threads that write a file."""
    apart: Apart | None = None
    """Set if hosts write to per-host directories."""

    @property
    def leads(self) -> bool:
        """Whether this process creates and deletes directories where it writes."""
        return self.peers.rank == (0 if self.apart is None else min(self.apart.ranks))

    def of_nodes(self, saved: Mapping[int, NodePlace | None]) -> SaveJob:
        """The same job for some nodes: their places by rank, None for the others."""
        if all(saved.get(place.rank) is not None for place in self.places):
            return self
        states = [replace(one, place=place) for one in self.states if (place := saved[one.rank]) is not None]
        places = tuple(place for place in saved.values() if place is not None)
        return replace(self, places=places, states=tuple(states))

    def with_rank_scope(self, names: set[str]) -> SaveJob:
        """The same job with these leaves owned by each node; `self` if they are already."""
        if all(state.scopes.get(name, "rank") == "rank" for state in self.states for name in names):
            return self
        states = tuple(
            replace(
                state,
                scopes={name: "rank" if name in names else scope for name, scope in state.scopes.items()},
            )
            for state in self.states
        )
        return replace(self, states=states)


def make_plan(job: SaveJob, exchange: SpecExchange) -> SavePlan:
    """Compute the plan on each process, from the leaves of all nodes, and compare its hash.

    The hash of the last plan travels with the leaves, so an unchanged plan needs no further exchange.
    """
    try:
        classes, scopes = exchange.classes(job.peers, job.states, job.places)
        hosts = tuple(place.host_index for place in job.places)
        plan = exchange.plan(classes, scopes, hosts)
        if job.reuse is not None:
            unchanged = job.reuse.choose(job, plan, patience_secs(plan.largest_share))
            plan = exchange.plan(classes, scopes, hosts, frozenset(unchanged))
        if job.reuse is None and plan.hash == exchange.confirmed:
            return plan
        hashes = job.peers.exchange("save: plan", plan.hash)
        odd = [rank for rank, one in enumerate(hashes) if one != hashes[0]]
        if odd:
            raise SaveFailedError(
                f"epoch {job.position}: the plan of rank {', '.join(map(str, odd))} differs from that of "
                "rank 0: all ranks must run the same version of the program and of torchrelay"
            )
        exchange.agreed = plan.hash
        return plan
    except BaseException:
        if job.reuse is not None:
            job.reuse.let_go()
        raise


def save_epoch(
    job: SaveJob, plan: SavePlan, clock: Clock, whole: WholeBytes | None, exchange: SpecExchange
) -> NodeStats:
    """Call `carry_out`; repeat it once with a new plan if a leaf assumed unchanged has changed."""
    try:
        with suppress(ChangedAfterAllError):
            return carry_out(job, plan, clock, whole)
        job = replace(job, assume_unchanged=False)
        with clock.spent("plan"):
            plan = make_plan(job, exchange)
        return carry_out(job, plan, clock, whole)
    finally:
        if job.reuse is not None:
            job.reuse.let_go()


def carry_out(job: SaveJob, plan: SavePlan, clock: Clock, whole: WholeBytes | None = None) -> NodeStats:
    """Write, commit and acknowledge; returns times by node, on rank 0 only.

    `whole` is a full comparison of replicas that is hashed while the device is busy, and compared before the
    commit. Raises ChangedAfterAllError on all processes if a leaf assumed unchanged has changed; nothing is
    committed then.
    """
    with clock.spent("plan"):
        attempt_name = _make_attempt(job, plan)
    try:
        with progress(f"saving epoch {job.position}", plan.largest_share * len(job.states)):
            rows = [row for part in _write_all(job, plan, attempt_name, clock, whole) for row in part or ()]
        if job.reuse is not None and job.assume_unchanged:
            job.reuse.check_assumed(job.peers, job.position)
        if whole is not None:
            whole.compare(job.peers)
    except Exception as error:
        if is_agreed(error):  # else another process may still write there
            discard(job, attempt_name)
        raise
    begin = time.monotonic()

    def append() -> Any:  # other hosts need the entry
        entry = commit(job, plan, attempt_name, rows)
        return None if job.apart is None else entry_json(entry)

    entry = decide(job.peers, "save: commit", append)
    if job.apart is not None:
        job.apart.committed(entry_of(entry, "the commit"))
    if job.reuse is not None:
        job.reuse.committed(attempt_name)
    took = {"commit": time.monotonic() - begin}
    times: list[NodeTimes] = []
    for row in rows:
        name = job.places[row[0]].name
        secs = {**secs_in(row), **({} if times else took)}
        times.append(NodeTimes(name, f"{job.storage.url}/{name}.{job.position}", bytes_in(row), secs))
    stats = NodeStats(times)
    if job.peers.rank == 0:
        _write_stats(job, stats_path(attempt_name), stats)
    return stats


def _write_stats(job: SaveJob, path: str, stats: NodeStats) -> None:
    """Write timings and metrics for lists, as texts because JSON has no NaN; errors only warn."""
    metrics = {name: value if isfinite(value) else str(value) for name, value in job.facts.metrics.items()}
    try:
        job.storage.replace(path, json.dumps({**stats.to_json(), "metrics": metrics}).encode())
    except StorageError as error:
        warn(f"the epoch is saved, its timings are not: {error}", stacklevel=2)


def _make_attempt(job: SaveJob, plan: SavePlan) -> str:
    def make(name: str) -> str:
        job.make_room()
        check_room(job.storage, plan, job.position, None if job.apart is None else job.apart.ranks)
        job.storage.mkdir(attempt_directory(name))
        job.storage.sync_dir(DATA)
        job.storage.sync_dir("")
        return name

    made = str(decide(job.peers, "save: try", lambda: make(job.position.directory(secrets.token_hex(6)))))
    if job.apart is not None:  # the leaders of the hosts that do not see rank 0's directory
        others = job.leads and job.peers.rank != 0
        try:
            together(job.peers, "save: attempt of each host", lambda: make(made) if others else None)
        except PeerError:
            raise
        except Exception:
            discard(job, made)
            raise
    return made


def _write_all(
    job: SaveJob, plan: SavePlan, attempt_name: str, clock: Clock, whole: WholeBytes | None
) -> list[list[Row] | None]:
    """Write and sync the shards of this process's nodes and their directory, and report to rank 0."""

    def store() -> list[Row]:
        rows = [_write_node(job, plan, attempt_name, state, dict(clock.secs)).row() for state in job.states]
        job.storage.sync_dir(attempt_directory(attempt_name))
        return rows

    def write() -> list[Row]:
        left = chain(*(one.each_left() for one in (whole, job.reuse) if one is not None))
        if (first := next(left, None)) is None:
            rows = store()
        else:
            helpers = 1 if whole is not None else hash_threads()
            rows = beside(store, chain([first], left), helpers, name="torchrelay-hash")
        job.written()
        return rows

    def meanwhile() -> None:
        if job.peers.rank == 0 and "leaf_rows" not in vars(plan):  # not cached yet
            with suppress(Exception):  # the commit fails with the same error, and reports it
                prepare(job, plan)

    secs = patience_secs(plan.largest_share) + (0.0 if job.reuse is None else job.reuse.patience_secs)
    return together(job.peers, "save: write", write, deadline_secs=secs, for_first=True, meanwhile=meanwhile)


def _write_node(
    job: SaveJob, plan: SavePlan, attempt_name: str, state: NodeState, before: dict[str, float]
) -> NodeReport:
    secs = {**before, "hash": 0.0, "write": 0.0, "fsync": 0.0}
    shards: list[ShardRow] = []
    where = attempt_directory(attempt_name)
    for group, assignments in plan.files(state.rank).items():
        identity = ShardIdentity(job.holding.job, job.position, state.place.name, group, attempt_name)
        entries, values = _contents(job, plan, state, group)
        for part, report in enumerate(
            write_shard(job.storage, where, identity, entries, values=values, writers=job.writers), 1
        ):
            size, head, digest = report.bytes, report.header_bytes, report.header_sha256
            shards.append(ShardRow(state.rank, group, part, size, head, digest))
            if job.reuse is not None:
                job.reuse.wrote(state.rank, assignments, report)
            for phase in ("hash", "write", "fsync"):
                secs[phase] += report.seconds.secs.get(phase, 0.0)
    inline = {a.leaf.name: _json(state.leaves[a.leaf.name]) for a in plan.assignments(state.rank) if a.inline}
    return NodeReport(state.rank, tuple(shards), inline, secs)


def _contents(job: SaveJob, plan: SavePlan, state: NodeState, group: str) -> tuple[Entries, dict[str, Any]]:
    data: list[torch.Tensor | memoryview] = []
    values: dict[str, Any] = {}
    for assignment in plan.files(state.rank)[group]:
        leaf = state.leaves[assignment.leaf.name]
        if isinstance(leaf.content, Value):
            values[leaf.name] = leaf.content.json
        else:
            piece = state.piece(assignment)
            digests = None if job.reuse is None else job.reuse.digests(state.rank, assignment)
            if (
                digests is not None
                and isinstance(piece, memoryview)
                and block_digests(piece[: len(digests) // SIZE * BLOCK]) != digests
            ):
                raise SaveFailedError(
                    f"{leaf.name!r} changed while being copied in the background: before such writes call "
                    "ctx.before_mutation(), or the Checkpointer's wait()"
                )
            data.append(piece)
    return plan.tensors(state.rank, group).of(data), values


def _json(leaf: Leaf) -> Any:
    return leaf.content.json if isinstance(leaf.content, Value) else None


def touch_buffers(storage: Storage, session: Session) -> None:
    """Allocate write buffers if the registered tensors are large enough for direct writes."""
    if isinstance(storage, Placed) and sum(_sizes(session)) // len(session.nodes) >= WORTH_IT:
        with suppress(StorageError):  # a save that gets no memory raises by itself
            writer.pool().touch(WRITERS)


def _sizes(session: Session) -> Iterator[int]:
    for place in session.local_nodes:
        for name, entry in session.workspace(place.name).entries().items():
            value = entry.value
            if entry.blob is not None and isinstance(value, torch.nn.Module):
                yield from map(_size, value.parameters())
            elif entry.blob is not None and isinstance(value, torch.Tensor):
                yield _size(value)
            elif entry.blob is not None and kind_of(value) is Kind.CONTAINER:
                yield from (_size(one) for _, one in container_tensors(name, value))


def _size(tensor: torch.Tensor) -> int:
    """Bytes of a tensor; 0 for one that cannot be stored, for which the save raises."""
    return tensor.nbytes if tensor.layout == torch.strided else 0
