"""A job of 10,000 ranks and 10,000 blobs in one process: plan, manifest, commit, and what readers do with it.

The code is the real one, with the replacements of `coordinator`. Besides rank 0 some other ranks plan by
themselves and write their files; the files of all others are holes of the right length. A failed check
raises AssertionError.
Seconds are those of the processor, of this one process.
"""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.coordinator import Aside, Coordinator, Crowd, Unsynced
from bench.everybody import Everybody, RankPeers, content_of
from torchrelay import open_checkpoint
from torchrelay.checkpoint.coordinator.session_log import LeaseInfo
from torchrelay.checkpoint.format.manifest import codec
from torchrelay.checkpoint.format.manifest.codec import encode
from torchrelay.checkpoint.format.manifest.schema import Manifest, shard_path
from torchrelay.checkpoint.format.mesh import Mesh
from torchrelay.checkpoint.format.mesh_geometry import local_target, uncovered, whole
from torchrelay.checkpoint.format.names import manifest_path
from torchrelay.checkpoint.format.position import Facts, Position
from torchrelay.checkpoint.load.reads.leaf_reader import LeafRead, LeafReader
from torchrelay.checkpoint.log.writer import LogWriter
from torchrelay.checkpoint.save import pipeline as saving
from torchrelay.checkpoint.save.agreement import SpecExchange
from torchrelay.checkpoint.save.assignments import SavePlan, elements, item_bytes
from torchrelay.checkpoint.save.pipeline import SaveJob, carry_out, make_plan
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.checkpoint.storage.work import Clock
from torchrelay.jobs.runtime import undisturbed
from torchrelay.jobs.session import Peers
from torchrelay.runners.distributed.agreement import StorePeers
from torchrelay.runners.distributed.rendezvous import Hosts

PER_HOST = 8
SOME = 64
"""Ranks whose shares of sharded leaves are looked at, where not those of all."""
Json = Any
Line = dict[str, Any]


class Save:
    """The saves of one job into `root`, seen from rank 0."""

    def __init__(self, root: Path, everybody: Everybody, written: Sequence[int]) -> None:
        self.everybody = everybody
        self.written = frozenset(written) | {0}
        self.aside = Aside()
        self.storage = Unsynced(root)
        self._writer = LogWriter.take(self.storage, "growth")
        view = self._writer.view
        self._holding = LeaseInfo("growth", "0" * 32, view.current.id, self._writer.generation)
        size = everybody.nodes
        hosts = Hosts.of(range(size)[first : first + PER_HOST] for first in range(0, size, PER_HOST))
        grouped = size > StorePeers.most_posts
        self._crowd = Crowd(size, self.aside, hosts if grouped else None)
        self._peers = StorePeers(self._crowd, 0, size)  # type: ignore[arg-type]
        self._peers.hosts = hosts if grouped else None
        self._exchange = SpecExchange()
        self._posts: list[Json] = []
        self._begun = 0.0
        self._state = everybody.state(0)

    def close(self) -> None:
        """Give the log back."""
        self._writer.close()

    @undisturbed()
    def save(self, epoch: int) -> tuple[SavePlan, Line]:
        """One save of all ranks: the plan, and what rank 0 computes for it."""
        job = self._job(0, self._peers, epoch)
        self._posts, self._crowd.said = [], self._told
        begin = self.aside.now()
        plan = make_plan(job, self._exchange)
        planned = self.aside.now()
        self._crowd.said = lambda rank, topic, value: self._reported(rank, topic, value, plan, epoch)
        carry_out(job, plan, Clock())
        acknowledged = self._crowd.answered_at["save: commit"]
        commit, stats = acknowledged - self._begun, self.aside.now() - acknowledged
        return plan, {"plan_secs": planned - begin, "commit_secs": commit, "stats_secs": stats}

    def plan_of(self, rank: int, epoch: int) -> SavePlan:
        """The plan that another rank makes by itself."""
        peers = RankPeers(rank, self.everybody.nodes, self.everybody)
        return make_plan(self._job(rank, peers, epoch), SpecExchange())

    def _told(self, rank: int, topic: str, value: Json) -> Json:
        return self.everybody.told(topic, rank, value)

    def _reported(self, rank: int, topic: str, value: Json, plan: SavePlan, epoch: int) -> Json:
        """What the others say once the plan is made; their files are there when they report them."""
        if topic != "save: write":
            return value
        if not self._posts:
            self._begun = self.aside.now()
            (made,) = (self.storage.root / "data").glob(f"e{epoch:08d}-*")
            self._posts = [{"value": [row]} for row in self._rows(plan, made.name, epoch)]
        return self._posts[rank]

    def _rows(self, plan: SavePlan, attempt_name: str, epoch: int) -> Iterator[Json]:
        groups: dict[int, list[str]] = {}
        for node, group in sorted(plan.writers):
            groups.setdefault(node, []).append(group)
        for rank in range(self.everybody.nodes):
            if rank in self.written and rank:
                job = self._job(rank, RankPeers(rank, self.everybody.nodes, self.everybody), epoch)
                yield saving._write_node(job, plan, attempt_name, job.states[0], {}).row()
            else:
                yield Coordinator.report(rank, groups.get(rank, []), plan.largest_share)

    def _job(self, rank: int, peers: Peers, epoch: int) -> SaveJob:
        return SaveJob(
            storage=self.storage,
            peers=peers,
            places=self.everybody.places,
            states=(self._state if rank == 0 else self.everybody.state(rank),),
            position=Position(epoch),
            facts=Facts(metrics={"loss": 0.5}),
            holding=self._holding,
            commit=self._writer.commit,
        )


class Unopened:
    """In the place of shard files: a plan of reads then names who holds what, and opens nothing."""

    def __init__(self, node: int = 0) -> None:
        self.path = f"{node:06d}"
        self.opened: dict[tuple[int, int, str], Unopened] = {}

    def open(self, holder: tuple[int, int, str]) -> Unopened:
        """The file of a holder."""
        return Unopened(holder[1])

    def with_key(self, key: str) -> Unopened:
        """The file itself."""
        return self

    def entry(self, key: str) -> None:
        """Nothing is known of what it holds."""


def measured(root: Path, kind: str, blobs: int, nodes: int, *, every: bool = False) -> Line:
    """One kind: figures of all phases. `every`: the shares of all ranks, however long that takes."""
    forget_peak()
    everybody = Everybody.of(kind, blobs, nodes)
    whose = sorted({nodes // 3, nodes // 2, nodes - 1})
    line: Line = {"what": "scale", "kind": kind, "ranks": nodes, "blobs": blobs}
    save = Save(root, everybody, whose)
    plan, figures = save.save(0)
    line |= {f"first_{key}": secs for key, secs in figures.items()}
    again, figures = save.save(1)
    assert again is plan, "the same leaves are planned once"
    line |= figures
    with taking(line, "other_ranks_plan_secs", len(whose)):
        for rank in whose:
            assert save.plan_of(rank, 1).hash == plan.hash, f"rank {rank} plans otherwise"
    line |= shares_of_all(plan, nodes, every=every)
    save.close()
    line |= read_back(root, everybody, plan, nodes // 2, save.written)
    line["peak_memory_mb"] = peak_mb()
    return line


def shares_of_all(plan: SavePlan, nodes: int, *, every: bool) -> Line:
    """What all ranks write, or some where leaves lie on meshes of all: every element once, by one rank."""
    sharded = any(isinstance(layout, Mesh) for layout in plan.layouts)
    ranks = range(nodes) if every or not sharded else range(0, nodes, max(1, nodes // SOME))
    written: Counter[str] = Counter()
    parts, spent = 0, 0.0
    for rank in ranks:
        begin = time.process_time()
        files = replace(plan).files(rank)  # a plan remembers what it was asked, and ranks ask for their own
        spent += time.process_time() - begin
        for assignment in (one for group in files.values() for one in group):
            written[assignment.leaf.name] += assignment.last - assignment.first
            parts += 1
    if len(ranks) == nodes:
        assert all(written[leaf.name] == elements(leaf) for leaf, _, _ in plan.rows), "not every element once"
    for leaf, _, layout in plan.rows[:: max(1, len(plan.rows) // 32)]:
        stored = plan.layouts[layout]
        if isinstance(stored, Mesh):
            boxes = [box for _, box in stored.stored(leaf.name, leaf.shape, item_bytes(leaf))]
            assert uncovered(leaf.shape, boxes) is None, f"{leaf.name} is not covered"
    return {"shares_ranks": len(ranks), "shares_parts": parts, "share_secs": spent / len(ranks)}


def read_back(root: Path, everybody: Everybody, plan: SavePlan, rank: int, written: frozenset[int]) -> Line:
    """Open the newest epoch as anybody would, plan the load of one rank's part, and read what is there."""
    line: Line = {}
    fill(root)
    with taking(line, "open_secs"):
        ckpt = open_checkpoint(root)  # proves the record, the manifest and the sizes of all files
    manifest = ckpt.manifest
    assert (ckpt.epoch, manifest.leaves, manifest.layouts) == (1, plan.leaf_rows, plan.layouts)
    data = LocalStorage(root).read_range(manifest_path(manifest.tries[0]), 0, 1 << 26)
    line["manifest_bytes"] = len(data)
    with taking(line, "decode_secs"):
        decoded = codec.decode(data)
    assert decoded == manifest and encode(decoded) == data, "another manifest was read"
    reads = list(part_of(everybody, rank))
    planner = LeafReader(LocalStorage(root), manifest, Unopened())  # type: ignore[arg-type]
    with taking(line, "load_plan_secs"):
        found, boxes = planner.planned(reads)
        slabs = [request.stop - request.start for _, request in boxes.wanted()]
    asked = sum(request.stop - request.start for _, request in [*found, *boxes.straight]) + sum(slabs)
    assert asked == sum(len(read.destination) for read in reads), "not every byte of its part is read once"
    line["load_plan_reads"], line["load_plan_bytes"] = len(found) + len(boxes.straight) + len(slabs), asked
    return line | really_read(root, manifest, everybody, rank, written)


def really_read(
    root: Path, manifest: Manifest, everybody: Everybody, rank: int, written: frozenset[int]
) -> Line:
    """Of a rank's part that whose holders have really written; every element is compared."""
    reader = LeafReader(LocalStorage(root), manifest)
    there = [read for read in part_of(everybody, rank) if written.issuperset(reader.boxes(read).parts.nodes)]
    there = [replace(read, destination=memoryview(bytearray(len(read.destination)))) for read in there]
    line: Line = {"read_blobs": len(there), "read_bytes": sum(len(read.destination) for read in there)}
    with taking(line, "read_secs"):
        reader.read_many(there)
    shapes = {leaf.name: leaf.shape for leaf in manifest.leaves}
    for read in there:
        shape, target = shapes[read.leaf], read.target
        box = whole(shape) if target is None else target.windows[0].box if target.windows else None
        if box is not None:
            wanted = content_of(read.leaf, shape, box).reshape(-1)
            assert torch.equal(torch.frombuffer(read.destination, dtype=torch.float32), wanted), read.leaf
    assert there, "nothing that the rank needs was really written"
    return line


def part_of(everybody: Everybody, rank: int) -> Iterator[LeafRead]:
    """What a rank loads of each of its leaves. The memory is the same for all."""
    memory = memoryview(bytearray(1 << 26))
    for leaf in everybody.classes[everybody.stage_of(rank)]:
        if leaf.sharding is None:
            yield LeafRead(leaf.name, memory[: leaf.nbytes])
        else:
            target = local_target(leaf.sharding.local_intervals(leaf.shape, rank))
            size = leaf.nbytes // elements(leaf)
            for extent in target.shape:
                size *= extent
            yield LeafRead(leaf.name, memory[:size], target=target)


def fill(root: Path) -> None:
    """Put holes of the right length in place of the files that were not written."""
    for made in sorted((root / "data").iterdir()):
        manifest = codec.decode((made / "manifest.json").read_bytes())
        for row in manifest.shards:
            path = root / shard_path(manifest, row)
            if not path.exists():
                with path.open("xb") as file:
                    file.truncate(row.nbytes)


@contextmanager
def taking(line: Line, key: str, times: int = 1) -> Iterator[None]:
    """Processor seconds of a block, divided by the times that it did something."""
    begin = time.process_time()
    yield
    line[key] = (time.process_time() - begin) / times


def forget_peak() -> None:
    """Let the kernel count the peak of this process's memory from now on, if it can."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def peak_mb() -> int:
    """The most memory that this process has had, in MB."""
    try:
        told = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1000
    return round(next(int(line.split()[1]) for line in told if line.startswith("VmHWM:")) * 1024 / 1e6)
