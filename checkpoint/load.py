"""Loading an epoch into the hosted nodes: everything is checked before any object changes.

All processes check first and agree; only then bytes are read, verified on arrival, and installed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torchrelay.checkpoint.disk.dtypes import memory_of
from torchrelay.checkpoint.disk.manifest import LeafRow, Manifest
from torchrelay.checkpoint.disk.mesh import Mesh
from torchrelay.checkpoint.facts import Facts
from torchrelay.checkpoint.headway import headway
from torchrelay.checkpoint.ledger_words import Target
from torchrelay.checkpoint.load_shared import agreed, offer, shareable
from torchrelay.checkpoint.members import RNG_BLOB, Member
from torchrelay.checkpoint.reading.leaf_reader import LeafRead, LeafReader
from torchrelay.checkpoint.reading.shared_reads import SharedReads
from torchrelay.checkpoint.reading.shares import Ranges
from torchrelay.checkpoint.reading.sharing import options_of
from torchrelay.checkpoint.reshard import Assigned, assign
from torchrelay.checkpoint.selecting import left_out
from torchrelay.checkpoint.selection import EVERYTHING, Selection
from torchrelay.checkpoint.state.leaf import LeafSpec, Role
from torchrelay.checkpoint.state.restore import Restoration, restoration
from torchrelay.checkpoint.state.restoring import Read
from torchrelay.checkpoint.storage import Storage
from torchrelay.checkpoint.timing import Clock, patience_secs
from torchrelay.errors import PartiallyLoadedError, PeerError, RelayError, StorageError
from torchrelay.jobs.peers import together
from torchrelay.jobs.places import NodePlace
from torchrelay.jobs.random_streams import RandomStreams
from torchrelay.jobs.session import Session
from torchrelay.metadata.stats import NodeStats, NodeTimes


@dataclass(frozen=True)
class LoadJob:
    """What a load works on, in this process."""

    storage: Storage
    session: Session
    target: Target
    stored_name: Callable[[str], str]
    members: Mapping[str, Mapping[str, Member]]
    selection: Selection = EVERYTHING
    """What the saves of this run take; what they leave out, and the epoch lacks, stays as it is."""
    share_reads: bool = False
    """Whether what all nodes load is read by one host each; see `reading/shared_reads`."""

    @property
    def manifest(self) -> Manifest:
        """What the epoch consists of."""
        return self.target.manifest


@dataclass
class _NodeLoad:
    """One hosted node on its way."""

    place: NodePlace
    stored: str
    assigned: Assigned
    restoration: Restoration
    streams: RandomStreams
    clock: Clock = field(default_factory=Clock)
    bytes: int = 0


def load_all(job: LoadJob) -> tuple[dict[str, RandomStreams], NodeStats]:
    """Load everything into the workspaces; returns the random states and the times, by node.

    Raises the same error on all processes: before anything changed where names, shapes, dtypes or
    policies do not fit, PartiallyLoadedError after.
    """
    reader = LeafReader(job.storage, job.manifest, job.target.shards, options_of(job.session))
    loads: list[_NodeLoad] = []
    rows: dict[int, Read] = {}

    def check() -> Ranges | None:
        loads.extend(_prepare(job, reader, place) for place in job.session.local_nodes)
        if not job.share_reads:
            return None
        rows.update(shareable(job.manifest, loads[0].restoration.reads, node_of(job, loads[0].stored)))
        return offer(job.session, rows)

    offers = together(job.session.peers, "load: check", check)
    shared = agreed(job.session, reader, rows, offers)
    size = sum(leaf.nbytes for leaf in job.manifest.leaves)  # no node reads more than everything

    def read() -> list[dict[str, Any]]:
        _read_all(job, reader, loads, shared)
        return [_times(job, load) for load in loads]

    times = together(job.session.peers, "load: read", read, deadline_secs=patience_secs(size))
    reader.shards.forget()  # the target may be kept as long as the run
    streams = {load.place.name: load.streams for load in loads}
    return streams, NodeStats(NodeTimes(**row) for part in times for row in part)


def _prepare(job: LoadJob, reader: LeafReader, place: NodePlace) -> _NodeLoad:
    stored = job.stored_name(place.name)
    members = job.members.get(place.name, {})
    clock = Clock()
    with clock.spent("prove"):
        nodes = tuple(job.stored_name(one.name) for one in job.session.nodes)
        assigned = assign(job.manifest, replace(place, name=stored), nodes, members, reader)
        entries = job.session.workspace(place.name).entries()
        # Names that nobody registered are made anew: their tensors may have another shape by now.
        objects = {name: entry.value for name, entry in entries.items() if entry.blob is not None}
        objects = {name: objects[name] for name in objects if name in members and name not in assigned.kept}
        specs = {name: spec_of_row(row, job.manifest) for name, row in assigned.rows.items()}
        absent = left_out(objects, job.selection) - set(specs)
        why = job.manifest.facts.selection.why_not
        found = restoration(objects, specs, assigned.values, kept=assigned.kept | absent, why_absent=why)
        streams = _checked_streams(job, reader, assigned, place, stored)
    return _NodeLoad(place, stored, assigned, found, streams, clock)


def _read_all(
    job: LoadJob,
    reader: LeafReader,
    loads: Sequence[_NodeLoad],
    shared: tuple[SharedReads, frozenset[str]] | None,
) -> None:
    """Shared reads come first: nothing before them may keep one process from the others' broadcasts."""
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
                    LeafRead(read.leaf, memory_of(read.memory()), node_of(job, load.stored), read.target)
                    for read in load.restoration.reads
                ]
                changed = changed or bool(reads)
                load.bytes = sum(len(read.destination) for read in reads)
                with headway(f"loading epoch {job.manifest.position}", load.bytes):
                    reader.read_many(read for read in reads if read.leaf not in come)
            with load.clock.spent("restore"):
                changed = True
                workspace = job.session.workspace(load.place.name)
                for name, value in load.restoration.finish().items():
                    workspace.set_loaded(name, value)
                for name, value in load.assigned.computed.items():
                    workspace.set_loaded(name, value)
    except PeerError:
        raise  # another process is lost: that says more than what became of the objects
    except RelayError as error:
        if not changed:
            raise
        raise PartiallyLoadedError(
            f"loading epoch {job.manifest.position} failed after objects had changed: {error}; load another "
            "epoch before you use them, or restore the file from a copy and load this one again"
        ) from error


def node_of(job: LoadJob, stored: str) -> str | None:
    """The node whose own values are meant; None for one that the epoch does not know."""
    return stored if stored in job.manifest.world.number else None


def _checked_streams(
    job: LoadJob, reader: LeafReader, assigned: Assigned, place: NodePlace, stored: str
) -> RandomStreams:
    try:
        return _streams(job, reader, assigned, place, stored)
    except StorageError as error:
        raise type(error)(
            f"epoch {job.manifest.position} in {job.storage.url} cannot be loaded, nothing was changed: "
            f"{error}; choose another epoch, or restore the file from a copy"
        ) from error


def _streams(
    job: LoadJob, reader: LeafReader, assigned: Assigned, place: NodePlace, stored: str
) -> RandomStreams:
    """The node's own random states; a node that is new derives its streams."""
    names = [name for name in assigned.random if name.startswith(f"{RNG_BLOB}.")]
    if not names:
        facts, position = job.manifest.facts, job.manifest.position
        return RandomStreams.derive(_seed(job.manifest, facts), place.rank, position.epoch)
    found = {}
    for name in names:
        data = bytearray(reader.spec(name, stored).nbytes)
        reader.read_into(name, memoryview(data), stored)
        found[name.removeprefix(f"{RNG_BLOB}.")] = bytes(data)
    return RandomStreams.decode(found)


def _seed(manifest: Manifest, facts: Facts) -> int:
    """The run's seed; of a run without one a number that all its nodes agree on."""
    return facts.seed if facts.seed is not None else int(manifest.job_uuid.replace("-", "")[:15], 16)


def _times(job: LoadJob, load: _NodeLoad) -> dict[str, Any]:
    path = f"{job.storage.url}/{load.stored}.{job.manifest.position}"
    return {"node": load.stored, "path": path, "bytes": load.bytes, "secs": load.clock.secs}


def spec_of_row(row: LeafRow, manifest: Manifest) -> LeafSpec:
    """A stored leaf as planning and checks know it."""
    layout = manifest.layouts[row.layout]
    return LeafSpec(
        row.name, row.blob, Role(row.role), row.group, "tensor" if row.kind == "tensor" else "value",
        row.dtype, row.shape, row.nbytes, row.alias_of, layout if isinstance(layout, Mesh) else None,
    )  # fmt: skip
