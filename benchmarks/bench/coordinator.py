"""The coordinator of a large job, alone in a process: real code without the other ranks.

Rank 0 executes what it executes in a job: `make_plan`, `carry_out`, the exchanges of `StorePeers`
(posts decoded, answers encoded) and the writer of the log. These are replaced:

- The store keeps its values in a dictionary, so that no network is measured.
- The posts of the other ranks are the texts that they would send.
- Shards are not written.
- `Unsynced` does everything but wait for the device.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torchrelay.checkpoint.format.manifest.schema import ShardRow
from torchrelay.checkpoint.format.mesh import Mesh
from torchrelay.checkpoint.format.mesh_geometry import Replicated, Sharded
from torchrelay.checkpoint.format.position import CommittedPosition, Facts, Position
from torchrelay.checkpoint.log.view import LeaseInfo
from torchrelay.checkpoint.log.writer import LogWriter
from torchrelay.checkpoint.save.agreement import SpecExchange
from torchrelay.checkpoint.save.assignments import SavePlan
from torchrelay.checkpoint.save.capture import NodeState
from torchrelay.checkpoint.save.commit import NodeReport
from torchrelay.checkpoint.save.pipeline import SaveJob, carry_out, make_plan
from torchrelay.checkpoint.state.leaf import MAIN_GROUP, LeafSpec, Role
from torchrelay.checkpoint.storage.local import LocalStorage, LocalWriteHandle
from torchrelay.checkpoint.storage.work import Clock
from torchrelay.jobs.cluster import NodePlace
from torchrelay.jobs.runtime import undisturbed
from torchrelay.runners.distributed.agreement import StorePeers, joined
from torchrelay.runners.distributed.rendezvous import Hosts

PER_HOST = 8
HEADER_BYTES = 16384
_SHAPES = ((1024, 1024), (4096, 1024), (1024,), (3072, 1024), (1024, 4096), (4096,), (50257, 64), (80, 80))

Json = Any


class _UnsyncedHandle(LocalWriteHandle):
    def sync_file(self) -> None:
        """Do nothing: the device is left aside."""


class Unsynced(LocalStorage):
    """Local files without the device: no verb of this storage waits for it, nothing here is durable."""

    def open_exclusive(self, path: str) -> LocalWriteHandle:
        """Create a file whose `sync_file` does nothing."""
        return self._aside(super().open_exclusive(path))

    def link_exclusive(self, path: str, data: bytes) -> None:
        """Write and link as ever, unsynced."""
        full = self._path(path)
        temporary = full.with_name(f".tmp-{secrets.token_hex(8)}")
        self._write_whole(temporary, data, sync=False)
        os.link(temporary, full)
        temporary.unlink()

    def sync_dir(self, path: str) -> None:
        """Do nothing: the device is left aside."""

    def room(self) -> None:
        """Do not check free space: shards are not written."""

    @staticmethod
    def _aside(handle: LocalWriteHandle) -> LocalWriteHandle:
        handle.__class__ = _UnsyncedHandle
        return handle


@dataclass
class Aside:
    """Seconds that are none of the coordinator's, because here it plays the others, too."""

    secs: float = 0.0

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Leave the time of a block out."""
        begin = time.process_time()
        try:
            yield
        finally:
            self.secs += time.process_time() - begin

    def now(self) -> float:
        """Processor seconds of the coordinator until now."""
        return time.process_time() - self.secs


class Crowd:
    """A store to which all others post at once: `said(rank, topic, value of rank 0)` is what they say.

    Of `hosts`, if any, the reports are there as well.
    """

    def __init__(self, size: int, aside: Aside, hosts: Hosts | None) -> None:
        self.size = size
        self._hosts = hosts.members[1:] if hosts else ()
        self.said: Callable[[int, str, Json], Json] = lambda rank, topic, value: value
        self.answered = 0
        self.waited_at: dict[str, float] = {}
        """When rank 0 began to wait for the others at each topic last, and when it answered."""
        self.answered_at: dict[str, float] = {}
        self._topic = ""
        self._aside = aside
        self._values: dict[str, bytes] = {}

    def put(self, key: str, value: bytes) -> None:
        """Keep a post of rank 0, and make those of the others; or count an answer's bytes."""
        with self._aside.kept():
            self._values[key] = value
            prefix, _, rank = key.rpartition("/")
            if rank == "0":
                entry = json.loads(value)
                self._topic = entry["topic"]
                for other in range(1, self.size):
                    said = self.said(other, entry["topic"], entry["value"])
                    self._values[f"{prefix}/{other}"] = json.dumps({**entry, "value": said}).encode()
                for host in self._hosts:
                    posts = [self._values[f"{prefix}/{other}"] for other in host]
                    self._values[f"{prefix}/host/{host[0]}"] = joined(posts)
            else:
                self.answered += len(value)
                self.answered_at[self._topic] = self._aside.now()

    def get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of keys that exist."""
        return [self._values[key] for key in keys]

    def has(self, *keys: str) -> bool:
        """Whether all keys exist."""
        return all(key in self._values for key in keys)

    def wait(self, keys: Sequence[str], secs: float = 1.0) -> bool:
        """Whether all keys exist: everybody has posted already."""
        self.waited_at[self._topic] = self._aside.now()
        return all(key in self._values for key in keys)

    def add(self, key: str, amount: int) -> int:
        """No counter moves: no rank exits."""
        return 0

    def delete(self, *keys: str) -> None:
        """Forget keys, and those of the others with rank 0's."""
        with self._aside.kept():
            for key in keys:
                prefix, _, rank = key.rpartition("/")
                others = range(self.size) if rank == "0" else ()
                leaders = [f"host/{host[0]}" for host in self._hosts] if rank == "0" else ()
                for gone in (key, *(f"{prefix}/{other}" for other in (*others, *leaders))):
                    self._values.pop(gone, None)


def specs_of(kind: str, blobs: int, nodes: int) -> tuple[LeafSpec, ...]:
    """The leaves of `blobs` float32 tensors: `ddp` replicated, `fsdp` on one mesh, `hsdp` on n/8 x 8."""
    mesh = _mesh(kind, nodes)
    return tuple(leaf_of(index, mesh) for index in range(blobs))


def places_of(nodes: int) -> tuple[NodePlace, ...]:
    """All ranks, eight to a host."""
    return tuple(
        NodePlace(
            f"trainer_{rank}", rank, nodes, f"host{rank // PER_HOST:04d}", rank // PER_HOST, process=rank
        )
        for rank in range(nodes)
    )


def leaf_of(index: int, mesh: Mesh | None) -> LeafSpec:
    """One of the leaves, on a mesh or replicated."""
    shape = _SHAPES[index % len(_SHAPES)]
    name, nbytes = f"model.layers.{index:05d}.weight", 4
    for extent in shape:
        nbytes *= extent
    return LeafSpec(name, name, Role.PARAMETER, MAIN_GROUP, "tensor", "float32", shape, nbytes, sharding=mesh)


def _mesh(kind: str, nodes: int) -> Mesh | None:
    if kind == "ddp":
        return None
    if kind == "fsdp":
        return Mesh(tuple(range(nodes)), (nodes,), (Sharded(0),))
    return Mesh(tuple(range(nodes)), (nodes // PER_HOST, PER_HOST), (Replicated(), Sharded(0)))


@dataclass
class Coordinator:
    """Rank 0 of a job of `nodes` ranks that saves the same leaves again and again into `root`.

    `flat`: it reads the post of every rank, however many there are.
    """

    root: Path
    kind: str
    blobs: int
    nodes: int
    flat: bool = False
    epoch: int = 0
    aside: Aside = field(default_factory=Aside)

    def __post_init__(self) -> None:
        self._storage = Unsynced(self.root)
        self._writer = LogWriter.take(self._storage, "growth")
        job = self._writer.view
        self._holding = LeaseInfo("growth", "0" * 32, job.current.id, self._writer.generation)
        self._places = places_of(self.nodes)
        self._specs = specs_of(self.kind, self.blobs, self.nodes)
        self._exchange = SpecExchange()
        hosts = Hosts.of(
            range(self.nodes)[first : first + PER_HOST] for first in range(0, self.nodes, PER_HOST)
        )
        grouped = not self.flat and self.nodes > StorePeers.most_posts
        self._crowd = Crowd(self.nodes, self.aside, hosts if grouped else None)
        self._planned: SavePlan | None = None
        self._posts: list[Json] = []
        self._peers = StorePeers(self._crowd, 0, self.nodes)  # type: ignore[arg-type]
        self._peers.hosts = hosts if grouped else None

    def close(self) -> None:
        """Give the log back."""
        self._writer.close()

    @undisturbed()
    def save(self) -> dict[str, float]:
        """One save, without the garbage collector as in `Engine.save`; returns bytes and processor seconds.

        The seconds are those of:

        - planning;
        - committing: from the first exchange after the plan to the acknowledgement, without the following;
        - what is computed between the attempt and the wait for the others' shards;
        - recording how long each node took, after that.
        """
        found: dict[str, float] = {}
        with self.aside.kept():
            job = self._job()
        self._crowd.answered = 0
        self._crowd.said = lambda rank, topic, value: value
        begin = self.aside.now()
        plan = make_plan(job, self._exchange)
        found["plan_secs"] = self.aside.now() - begin
        told = self._crowd.answered
        if plan is not self._planned:  # what ranks report is none of the coordinator's work
            self._planned, self._posts = plan, self._reports(plan)
        rows = self._posts
        self._crowd.said = lambda rank, topic, value: rows[rank] if topic == "save: write" else value
        begin = self.aside.now()
        carry_out(replace(job, states=()), plan, Clock())
        committed = self._crowd.answered_at["save: commit"]
        found["beside_secs"] = self._crowd.waited_at["save: write"] - self._crowd.answered_at["save: try"]
        found["commit_secs"] = committed - begin - found["beside_secs"]
        found["stats_secs"] = self.aside.now() - committed
        manifest = max(self.root.glob(f"data/e{self.epoch:08d}-*/manifest.json"))
        found["manifest_bytes"] = manifest.stat().st_size
        found["plan_answer_bytes"], found["commit_answer_bytes"] = told, self._crowd.answered - told
        self.epoch += 1
        return found

    def _job(self) -> SaveJob:
        """The leaves are described by the same objects save after save, as if remembered."""
        specs = self._specs
        scopes = {spec.name: "replicated" for spec in specs}
        return SaveJob(
            storage=self._storage,
            peers=self._peers,
            places=self._places,
            states=(NodeState(self._places[0], {}, specs, scopes, {}),),
            position=Position(self.epoch),
            facts=Facts(),
            holding=self._holding,
            commit=self._commit,
        )

    def _commit(self, entry: CommittedPosition) -> None:
        self._writer.commit(entry)

    def _reports(self, plan: SavePlan) -> list[Json]:
        """What every rank reports of its shards; rank 0 has none here, so rank 1 reports its node too.

        Sizes differ from node to node without any order, so that no column of the manifest packs well.
        """
        groups: dict[int, list[str]] = {}
        for node, group in sorted(plan.writers):
            groups.setdefault(node, []).append(group)
        rows = [
            self.report(place.rank, groups.get(place.rank, []), plan.largest_share) for place in self._places
        ]
        posts: list[Json] = [{"value": [row]} for row in rows]
        posts[1]["value"] = rows[:2]
        return posts

    @staticmethod
    def report(rank: int, groups: Sequence[str], nbytes: int) -> Json:
        """What a rank says of the files that it has not written."""
        shards = tuple(
            ShardRow(
                rank,
                group,
                1,
                HEADER_BYTES + nbytes - rank * 7919 % 4096,
                HEADER_BYTES,
                secrets.token_hex(32),
            )
            for group in groups
        )
        secs = {name: secrets.randbelow(10**6) / 1e6 for name in ("stage", "plan", "hash", "write", "fsync")}
        return NodeReport(rank, shards, {}, secs).row()
