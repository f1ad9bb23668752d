"""Small epochs without an engine: the real plan, shard writer, manifest and log, all nodes in one process.

    with Writing(tmp_path) as run:
        run.save(1, [parameter("model.weight", tensor), value("total", 3)], nodes=2)

shows how the pieces of the checkpoint room fit together.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from given_entries import ShardEntry, write_shard

from torchrelay.checkpoint.format import values
from torchrelay.checkpoint.format.canonical_json import sha256
from torchrelay.checkpoint.format.manifest import codec
from torchrelay.checkpoint.format.manifest.schema import Manifest, ShardRow
from torchrelay.checkpoint.format.names import Flat, Whole, attempt_directory, manifest_path
from torchrelay.checkpoint.format.position import CommittedPosition, Facts, Position
from torchrelay.checkpoint.format.shard.header import ShardIdentity
from torchrelay.checkpoint.log.view import LeaseInfo
from torchrelay.checkpoint.log.writer import LogWriter
from torchrelay.checkpoint.save.assignments import NodeClass, SavePlan
from torchrelay.checkpoint.save.commit import compose, world_of
from torchrelay.checkpoint.save.plan import plan_classes, with_references
from torchrelay.checkpoint.state.leaf import Leaf, Role, Value, spec_of
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.jobs.cluster import NodePlace

Leaves = Sequence[Leaf] | Sequence[Sequence[Leaf]]


def parameter(name: str, tensor: torch.Tensor, alias_of: str | None = None) -> Leaf:
    return Leaf(name, _blob(name), Role.PARAMETER, "main", tensor, alias_of)


def buffer(name: str, tensor: torch.Tensor) -> Leaf:
    return Leaf(name, _blob(name), Role.BUFFER, "main", tensor)


def moment(name: str, tensor: torch.Tensor) -> Leaf:
    return Leaf(name, _blob(name), Role.OPTIMIZER, "optim", tensor)


def tensor(name: str, content: torch.Tensor) -> Leaf:
    return Leaf(name, _blob(name), Role.TENSOR, "main", content)


def value(name: str, content: Any, group: str = "main") -> Leaf:
    return Leaf(name, _blob(name), Role.VALUE, group, Value(values.encode(content, name)))


def _blob(name: str) -> str:
    return name.split(".", maxsplit=1)[0]


def places(count: int, per_host: int = 1) -> list[NodePlace]:
    return [
        NodePlace(f"trainer_{rank}", rank, count, f"gpu{rank // per_host:02d}", rank // per_host)
        for rank in range(count)
    ]


class Writing:
    """A job's log, taken over; `save` commits epochs into it."""

    def __init__(self, root: Path | Storage, job: str = "test") -> None:
        self.storage: Storage = LocalStorage(root) if isinstance(root, Path) else root
        self.storage.mkdir("")
        self.log = LogWriter.take(self.storage, job)
        self.manifests: dict[Position, Manifest] = {}

    def __enter__(self) -> Writing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.log.release()

    def save(
        self,
        epoch: int,
        leaves: Leaves,
        nodes: int = 1,
        *,
        step: int = 0,
        scopes: Mapping[str, str] | None = None,
        facts: Facts | None = None,
        referenced: tuple[Manifest, Sequence[str]] | None = None,
        world: Sequence[NodePlace] | None = None,
    ) -> CommittedPosition:
        """Commit an epoch. `leaves` are those of every node, or one list per node."""
        world = world or places(nodes)
        by_node = _by_node(leaves, len(world))
        kept = referenced[1] if referenced else ()
        plan = _plan(by_node, scopes, [place.host_index for place in world], kept)
        position = Position(epoch, step)
        view = self.log.view
        lease = LeaseInfo(str(view.job_name), str(view.job_uuid), view.state.current, self.log.generation)
        attempt_name = position.directory(secrets.token_hex(6))
        self.storage.mkdir(attempt_directory(attempt_name))
        shards = [
            row
            for place in world
            for row in self._shards(plan, lease.job, position, attempt_name, place, by_node[place.rank])
        ]
        inline = {
            leaf.name: leaf.content.json
            for node in by_node
            for leaf in node
            if isinstance(leaf.content, Value)
        }
        manifest = compose(
            plan, lease, position, attempt_name, world_of(world), shards, inline, facts or Facts()
        )
        if referenced:
            manifest = with_references(manifest, *referenced)
        self.manifests[position] = manifest
        return self._commit(manifest)

    def _shards(
        self,
        plan: SavePlan,
        job_name: str,
        position: Position,
        attempt_name: str,
        place: NodePlace,
        leaves: Sequence[Leaf],
    ) -> list[ShardRow]:
        content = {leaf.name: leaf.content for leaf in leaves}
        rows = []
        for group, assignments in plan.files(place.rank).items():
            entries, shard_values = [], {}
            for one in assignments:
                found = content[one.leaf.name]
                if isinstance(found, Value):
                    shard_values[one.leaf.name] = found.json
                    continue
                key = Whole(one.leaf.name) if one.whole else Flat(one.leaf.name, one.first, one.last)
                data = found if one.whole else found.reshape(-1)[one.first : one.last]
                entries.append(ShardEntry(key, str(one.leaf.dtype), one.leaf.shape, data))
            name = ShardIdentity(job_name, position, place.name, group, attempt_name)
            directory = attempt_directory(attempt_name)
            reports = write_shard(self.storage, directory, name, entries, values=shard_values)
            for part, report in enumerate(reports, 1):
                rows.append(
                    ShardRow(place.rank, group, part, report.bytes, report.header_bytes, report.header_sha256)
                )
        return rows

    def _commit(self, manifest: Manifest) -> CommittedPosition:
        data = codec.encode(manifest)
        self.storage.link_exclusive(manifest_path(manifest.tries[0]), data)
        entry = CommittedPosition(
            manifest.branch, manifest.position, manifest.tries[0], len(data), sha256(data), manifest.needs,
            manifest.groups, resumable=True,
        )  # fmt: skip
        self.log.commit(entry)
        return entry


def _by_node(leaves: Leaves, nodes: int) -> list[Sequence[Leaf]]:
    if leaves and not isinstance(leaves[0], Leaf):
        return list(leaves)  # type: ignore[arg-type]
    return [leaves] * nodes  # type: ignore[list-item]


def _plan(
    by_node: Sequence[Sequence[Leaf]],
    scopes: Mapping[str, str] | None,
    hosts: Sequence[int],
    referenced: Sequence[str],
) -> SavePlan:
    """Nodes with equal leaves become one class; a node of its own each is as good for a test."""
    alike = all(node is by_node[0] for node in by_node)
    if alike:
        specs = tuple(spec_of(leaf) for leaf in by_node[0])
        classes = [NodeClass(tuple(range(len(by_node))), specs)]
    else:
        classes = [
            NodeClass((rank,), tuple(spec_of(leaf) for leaf in node)) for rank, node in enumerate(by_node)
        ]
    return plan_classes(classes, scopes=scopes, hosts=hosts, referenced=referenced)
