"""Load an epoch into the hosted nodes; everything is checked before any object changes.

All processes check first and agree; only then bytes are read, verified on arrival, and installed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from typing import Any

import torch

from torchrelay.checkpoint.format.dtypes import memory_of
from torchrelay.checkpoint.format.manifest.schema import Manifest
from torchrelay.checkpoint.format.position import EVERYTHING, Selection
from torchrelay.checkpoint.load.reads.leaf_reader import LeafRead, LeafReader, ReadPlan
from torchrelay.checkpoint.load.reads.shared_reads import SharedReads, agreed, offer, options_of, shareable
from torchrelay.checkpoint.load.renaming import (
    LoadChanges,
    Renaming,
    ResumeOptions,
    excluded_leaves,
    gone_blobs,
    may_be_renamed,
    new_blobs,
    spec_of_row,
)
from torchrelay.checkpoint.load.reshard import (
    Assigned,
    assign,
    assign_replicated,
    blobs_of_absent_nodes,
    same_nodes,
)
from torchrelay.checkpoint.load.verify import Target
from torchrelay.checkpoint.state.checkpoint_set import RNG_BLOB, SetMember, left_out
from torchrelay.checkpoint.state.flatten import leaves_of
from torchrelay.checkpoint.state.restore.container import change_container
from torchrelay.checkpoint.state.restore.findings import RestoreOptions
from torchrelay.checkpoint.state.restore.gradients import REMEDY, Gradients
from torchrelay.checkpoint.state.restore.restoration import (
    Restoration,
    restoration,
    restore_learning_rates,
    restore_requires_grad,
    stay_as_built,
)
from torchrelay.checkpoint.state.tensor_memory import Read, form
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.checkpoint.storage.work import Clock, patience_secs, progress
from torchrelay.errors import PartiallyLoadedError, PeerError, RelayError, StorageError, UsageError
from torchrelay.jobs.cluster import NodePlace
from torchrelay.jobs.containers import is_container
from torchrelay.jobs.random import RandomStreams
from torchrelay.jobs.session import Session, together, warn
from torchrelay.jobs.workspace import Entry
from torchrelay.metadata.handlers import NodeStats, NodeTimes
from torchrelay.records import Json, dataclass


class RenamedReader(LeafReader):
    """Reads an epoch under its current names."""

    def __init__(self, reader: LeafReader, renaming: Renaming) -> None:
        self._stored = reader
        self._renaming = renaming
        self.manifest = renaming.renamed_manifest
        self.options, self.shards = reader.options, reader.shards

    def plan(self, reads: Iterable[LeafRead]) -> ReadPlan:
        """See `LeafReader.plan`."""
        old = self._renaming.stored
        return self._stored.plan(replace(read, leaf=old.get(read.leaf, read.leaf)) for read in reads)

    def value_json(self, leaf: str, node: str | None = None) -> Json:
        """A value in its typed form, with current names in it."""
        old = self._renaming.stored.get(leaf, leaf)
        return self._renaming.value(old, self._stored.value_json(old, node))

    def digest(self, leaf: str, node: str | None = None) -> str:
        """See `LeafReader.digest`."""
        return self._stored.digest(self._renaming.stored.get(leaf, leaf), node)


@dataclass(frozen=True)
class LoadJob:
    """Options and context of a load in this process."""

    storage: Storage
    session: Session
    target: Target
    stored_name: Callable[[str], str]
    members: Mapping[str, Mapping[str, SetMember]]
    registered: frozenset[str]
    """Names of blobs registered by any node of the job."""
    saved: frozenset[str]
    """Nodes that are saved; others load only what is replicated."""
    selection: Selection = EVERYTHING
    """The leaves that saves of this run take; others that the epoch lacks stay unchanged."""
    share_reads: bool = False
    """Whether what all nodes load is read by one host each; see `load/reads/shared_reads`."""
    resume: ResumeOptions = field(default_factory=ResumeOptions)
    """How differences of the program are treated."""

    @property
    def manifest(self) -> Manifest:
        """The manifest of the epoch."""
        return self.target.manifest

    @property
    def nodes(self) -> tuple[str, ...]:
        """Stored names of the job's nodes that are saved."""
        return tuple(self.stored_name(one.name) for one in self.session.nodes if one.name in self.saved)

    @property
    def anywhere(self) -> frozenset[str]:
        """The registered blobs of any node; empty if the epoch stores what each node registered."""
        return frozenset() if same_nodes(self.manifest, self.nodes) else self.registered


@dataclass
class _NodeLoad:
    place: NodePlace
    stored: str
    assigned: Assigned
    restoration: Restoration
    gradients: Gradients
    streams: RandomStreams
    changes: LoadChanges
    requires_grad: Callable[[], list[str]]
    learning_rates: Callable[[], None]
    new_generators: list[str] = field(default_factory=list)
    turned: list[str] = field(default_factory=list)
    """Parameters whose memory order differs from the saved one."""
    relearning: list[str] = field(default_factory=list)
    """Parameters whose saved `requires_grad` differs from the program's."""
    clock: Clock = field(default_factory=Clock)
    bytes: int = 0

    def node_of(self, job: LoadJob, leaf: str) -> str | None:
        """The node whose value of a leaf is taken."""
        return self.assigned.nodes.get(leaf) or node_of(job, self.stored)


def load_all(job: LoadJob) -> tuple[dict[str, RandomStreams], dict[str, Gradients], NodeStats, LoadChanges]:
    """Load everything; returns random states, gradients and times, by node, and what has changed.

    Raises the same error on all processes: before any change if names, shapes, dtypes or policies do not fit,
    PartiallyLoadedError after.
    """
    reader = LeafReader(job.storage, job.manifest, job.target.shards, options_of(job.session))
    if job.resume.rename:
        blobs = frozenset(name for members in job.members.values() for name in members)
        reader = RenamedReader(reader, Renaming(job.manifest, job.resume.rename, blobs))
        job = replace(job, target=replace(job.target, manifest=reader.manifest), share_reads=False)
    loads: list[_NodeLoad] = []
    rows: dict[int, Read] = {}

    def check(exclude: tuple[str, ...] = ()) -> list[Any]:
        loads[:] = [_prepare(job, reader, place, exclude) for place in job.session.local_nodes]
        changes = LoadChanges.of_all(load.changes.to_json() for load in loads)
        if not job.share_reads:
            return [None, changes.to_json()]
        own = loads[0].assigned.nodes
        reads = [read for read in loads[0].restoration.reads if read.leaf not in own]
        rows.update(shareable(job.manifest, reads, node_of(job, loads[0].stored)))
        return [offer(job.session, rows), changes.to_json()]

    try:
        answers = together(job.session.peers, "load: check", check)
    except UsageError:  # a BlobError, or a blob without a policy for these nodes
        if not job.resume.exclude:
            raise
        answers = together(job.session.peers, "load: check", lambda: check(job.resume.exclude))
    shared = agreed(job.session, reader, rows, [ranges for ranges, _ in answers])
    changes = LoadChanges.of_all(one for _, one in answers)
    size = sum(leaf.nbytes for leaf in job.manifest.leaves)  # more than the whole epoch is never read

    def read() -> dict[str, Any]:
        _read_all(job, reader, loads, shared)
        changed = [name for load in loads for name in load.relearning]
        new = [f"{name} of {load.place}" for load in loads for name in load.new_generators]
        where = f"{job.storage.url}/{{}}.{job.manifest.position}"
        times = [[one.stored, where.format(one.stored), one.bytes, one.clock.secs] for one in loads]
        turned = [name for load in loads for name in load.turned]
        return {"times": times, "requires_grad": changed, "turned": turned, "new_generators": new}

    done = together(job.session.peers, "load: read", read, deadline_secs=patience_secs(size))
    times = [part["times"] for part in done]
    if job.session.peers.rank == 0:
        for what, text in _WARNINGS.items():
            names = list(dict.fromkeys(name for part in done for name in part[what]))
            if names:
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                warn(text.format(", ".join(names[:3]) + more), stacklevel=2)
    reader.shards.forget()  # the target may live as long as the run
    streams = {load.place.name: load.streams for load in loads}
    gradients = {load.place.name: load.gradients for load in loads}
    return streams, gradients, NodeStats(NodeTimes(*row) for part in times for row in part), changes


_WARNINGS = {
    "requires_grad": "requires_grad of {} is as it was saved, and not as the program built it; to "
    "change it, set it at the top of an epoch's task. DistributedDataParallel "
    "averages only gradients of parameters that required them when it was constructed",
    "turned": "the memory order of {} is as the program built it, and not as a task or init had "
    "changed it before the save: steps may round differently. Call "
    "model.to(memory_format=...) where the model is built or in @job.setup, before "
    "DistributedDataParallel wraps it: later, its next gradients would be wrong",
    "new_generators": "{} begins as the program made it: the node is new",
}
"""Warnings of a load about names that any process found, each reported once."""


def _prepare(job: LoadJob, reader: LeafReader, place: NodePlace, exclude: tuple[str, ...]) -> _NodeLoad:
    """Plan the load of one node; leaves that match `exclude` stay unchanged."""
    stored = job.stored_name(place.name)
    members = job.members.get(place.name, {})
    clock = Clock()
    with clock.spent("prove"):
        entries = job.session.workspace(place.name).entries()
        # Values that are not registered are recreated, because their tensors may have another shape.
        registered = {
            name: one.target for name, one in entries.items() if one.blob is not None and name in members
        }
        changes = _changes(job, registered)
        excluded = excluded_leaves(job.manifest, exclude) if exclude else lambda name: False
        without = changes.gone | job.target.lost_blobs
        if place.name in job.saved:
            here = replace(place, name=stored)
            assigned = assign(job.manifest, here, job.nodes, members, reader, job.anywhere, without, excluded)
        else:
            changes.unsaved.add(place.name)
            assigned = assign_replicated(job.manifest, place, members, reader, without)
        changes.buffers.update(assigned.buffers)
        _check_computed(place, entries, assigned.computed)
        left = assigned.kept | job.target.lost_blobs
        objects = {name: one for name, one in registered.items() if name not in left}
        specs = {name: spec_of_row(row, job.manifest) for name, row in assigned.rows.items()}
        kept = assigned.kept | (left_out(objects, job.selection) - set(specs))
        if exclude:
            own = (one.name for one in leaves_of(objects))
            changes.excluded.update(filter(excluded, [*specs, *own, *assigned.excluded]))
            specs = {name: spec for name, spec in specs.items() if name not in changes.excluded}
            kept |= changes.excluded
        turned = stay_as_built(objects, specs)
        node, selection = node_of(job, stored), job.manifest.facts.selection
        options = RestoreOptions(
            kept=kept,
            offered=assigned.offered,
            untouched=changes.new,
            exclude="resume_exclude",
            excluded=exclude,
            may_lack=assigned.may_lack,
            why_absent=lambda name: selection.why_absent(name) or assigned.why_absent(name),
            same_content=lambda one, other: reader.same_content((one, node), (other, node)),
        )
        found = restoration(objects, specs, assigned.values, options)
        changes.excluded.update(found.left_out)
        changes.retyped.update(name for name in found.replaced if is_container(objects[name]))
        held = _gradients(job, place, objects, assigned, kept)
        streams = _streams(job, reader, assigned, place, stored)
    new = [name for name in sorted(assigned.kept) if name in members and members[name].generator]
    learn = partial(restore_requires_grad, objects, specs)
    rates = partial(restore_learning_rates, registered, specs)
    return _NodeLoad(
        place, stored, assigned, found, held, streams, changes, learn, rates, new, turned, clock=clock
    )


def _gradients(
    job: LoadJob, place: NodePlace, objects: Mapping[str, Any], assigned: Assigned, kept: Collection[str]
) -> Gradients:
    """Gradients of the open window; a warning if they belong to other nodes."""
    if assigned.lost_gradients and place.rank == 0:
        warn(
            f"epoch {job.manifest.position} was saved in an open window, whose gradients differ between "
            f"its {len(job.manifest.world.nodes)} nodes; there are {len(job.nodes)} now, so none is "
            f"loaded: {REMEDY}",
            stacklevel=2,
        )
    specs = {name: spec_of_row(row, job.manifest) for name, row in assigned.gradients.items()}
    return Gradients(objects, specs, assigned.values, kept)


def _changes(job: LoadJob, registered: Mapping[str, Any]) -> LoadChanges:
    """New and removed blobs. What only an absent node owned does not count as removed: see `assign`."""
    changes = LoadChanges()
    if not job.resume.strict:
        changes.new.update(new_blobs(job.manifest, registered))
        gone = gone_blobs(job.manifest, {*registered, *job.anywhere})
        changes.gone.update(gone - blobs_of_absent_nodes(job.manifest, job.nodes))
    if len(changes.new) == len(changes.gone) == 1:
        (gone_one,), (new_one,) = changes.gone, changes.new
        if may_be_renamed(job.manifest, gone_one, new_one, registered):
            changes.renamed[gone_one] = new_one
    return changes


def _check_computed(place: NodePlace, entries: Mapping[str, Entry], computed: Mapping[str, Any]) -> None:
    """Raise for results of reshard callables that do not fit objects which others hold too."""
    for name, value in computed.items():
        held = entries[name].target
        if isinstance(held, torch.Tensor):
            fits = isinstance(value, torch.Tensor) and form(value) == form(held)
        else:
            fits = not is_container(held) or type(value) is type(held)
        if not fits:
            gave, has = (
                form(one) if isinstance(one, torch.Tensor) else type(one).__name__ for one in (value, held)
            )
            raise UsageError(
                f"blob {name!r} of {place}: its reshard callable returned a {gave}, but a {has} is "
                "registered: return one of that form"
            )


def _read_all(
    job: LoadJob,
    reader: LeafReader,
    loads: Sequence[_NodeLoad],
    shared: tuple[SharedReads, frozenset[str]] | None,
) -> None:
    """Read into all objects; shared reads first: an error before would leave others in a broadcast."""
    changed = shared is not None
    come: frozenset[str] = frozenset()
    try:
        if shared is not None:
            with loads[0].clock.spent("read"):
                shared[0].run()
            come = shared[1]
        for load in loads:
            with load.clock.spent("read"):
                reads = [
                    LeafRead(read.leaf, memory_of(read.memory()), load.node_of(job, read.leaf), read.target)
                    for read in (*load.restoration.reads, *load.gradients.reads)
                ]
                changed = changed or bool(load.restoration.reads)
                load.bytes = sum(len(read.destination) for read in reads)
                with progress(f"loading epoch {job.manifest.position}", load.bytes):
                    reader.read_many(read for read in reads if read.leaf not in come)
            with load.clock.spent("restore"):
                changed = True
                workspace = job.session.workspace(load.place.name)
                created = load.restoration.finish()
                for name, value in created.items():
                    workspace.set_loaded(name, value)
                load.gradients.made(created)
                load.relearning = load.requires_grad()
                load.learning_rates()
                for name, value in load.assigned.computed.items():
                    held = workspace.entries()[name].target
                    workspace.set_loaded(name, change_container(held, value) if is_container(held) else value)
    except PeerError:
        raise  # a lost process is the more important error
    except RelayError as error:
        if not changed:
            raise
        raise PartiallyLoadedError(
            f"loading epoch {job.manifest.position} failed after objects had changed: {error}; load "
            "another epoch before you use them"
        ) from error


def node_of(job: LoadJob, stored: str) -> str | None:
    """The stored node of the same name; None for a node that the epoch lacks."""
    return stored if stored in job.manifest.world.number else None


def _streams(
    job: LoadJob, reader: LeafReader, assigned: Assigned, place: NodePlace, stored: str
) -> RandomStreams:
    manifest, found = job.manifest, dict[str, bytes]()
    try:
        for name in (name for name in assigned.random if name.startswith(f"{RNG_BLOB}.")):
            data = bytearray(reader.spec(name, stored).nbytes)
            reader.read_into(name, memoryview(data), stored)
            found[name.removeprefix(f"{RNG_BLOB}.")] = bytes(data)
        if found:
            return RandomStreams.decode(found)
    except StorageError as error:
        raise type(error)(
            f"epoch {manifest.position} in {job.storage.url} cannot be loaded, nothing was changed: "
            f"{error}; choose another epoch"
        ) from error
    seed = manifest.facts.seed  # without one, all nodes agree on the number of the run
    seed = seed if seed is not None else int(manifest.job_uuid.replace("-", "")[:15], 16)
    return RandomStreams.derive(seed, place.rank, manifest.position.epoch)
