"""Random meshes, and saves and loads over them with all nodes in one process and no disk.

What decides and what moves bytes is the real code: plan, rule, shard writer, manifest, readers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch

from torchrelay.checkpoint.format.dtypes import memory_of
from torchrelay.checkpoint.format.manifest import codec
from torchrelay.checkpoint.format.manifest.schema import Manifest, ShardRow
from torchrelay.checkpoint.format.mesh import Mesh
from torchrelay.checkpoint.format.mesh_geometry import (
    LocalTarget,
    Placement,
    Replicated,
    Sharded,
    local_intervals,
    local_target,
)
from torchrelay.checkpoint.format.position import Facts, Position
from torchrelay.checkpoint.format.shard.header import ShardIdentity
from torchrelay.checkpoint.format.shard.writer import write_shard
from torchrelay.checkpoint.load.reads.leaf_reader import LeafRead, LeafReader
from torchrelay.checkpoint.log.view import LeaseInfo
from torchrelay.checkpoint.save import pipeline
from torchrelay.checkpoint.save.assignments import NodeClass
from torchrelay.checkpoint.save.capture import NodeState
from torchrelay.checkpoint.save.commit import compose, world_of
from torchrelay.checkpoint.save.plan import plan_classes
from torchrelay.checkpoint.state.leaf import Leaf, LeafSpec, Role, spec_of
from torchrelay.jobs.cluster import NodePlace

ATTEMPT_NAME = "e00000001-abcdef"


def random_mesh(rng: random.Random, shape: Sequence[int], most: int = 8) -> Mesh:
    """A mesh of 1 to 3 dimensions over some ranks, with placements that fit the shape, by either rule."""
    extents = [rng.randint(1, 4) for _ in range(rng.randint(1, 3))]
    while math.prod(extents) > most:
        extents[rng.randrange(len(extents))] = 1
    nodes = rng.sample(range(math.prod(extents) + rng.randint(0, 2)), math.prod(extents))
    placements = tuple(_placement(rng, len(shape)) for _ in extents)
    return Mesh(tuple(nodes), tuple(extents), placements, rng.choice([1, 2]))


def _placement(rng: random.Random, dims: int) -> Placement:
    if dims == 0 or rng.random() < 0.3:
        return Replicated()
    return Sharded(rng.randrange(dims), rng.choice([1, 1, 1, 2, 3]))


def random_shape(rng: random.Random, *, large: bool = False) -> tuple[int, ...]:
    """From 0 to 3 dimensions; uneven ones, empty ones, and if `large` some of more than a block."""
    if large and rng.random() < 0.05:
        return (rng.choice([700, 1031]), rng.choice([1024, 999]))
    return tuple(rng.choice([0, 1, 2, 3, 5, 7, 8, 12]) for _ in range(rng.randint(0, 3)))


def local_part(whole: torch.Tensor, mesh: Mesh, node: int) -> torch.Tensor:
    """A node's local tensor, by index lists and not by boxes."""
    place, coordinate = mesh.nodes.index(node), []
    for extent in reversed(mesh.extents):
        place, index = divmod(place, extent)
        coordinate.insert(0, index)
    for dim, size in enumerate(whole.shape):
        found = local_intervals(size, dim, mesh.extents, coordinate, mesh.placements)
        rows = [row for interval in found for row in range(*interval)]
        whole = whole.index_select(dim, torch.tensor(rows, dtype=torch.long))
    return whole


def target(mesh: Mesh, shape: Sequence[int], node: int) -> LocalTarget:
    """What the local tensor of a node takes."""
    return local_target(mesh.local_intervals(shape, node))


class MemoryStorage:
    """Files in memory: what writing shards and reading them needs of a storage."""

    url = "memory:"

    def __init__(self) -> None:
        self.files: dict[str, bytearray] = {}
        self.bytes_read = 0

    def open_exclusive(self, path: str) -> Any:
        """A file to write."""
        data = self.files[path] = bytearray()

        def write_at(offset: int, view: memoryview) -> None:
            if len(data) < offset + len(view):
                data.extend(bytes(offset + len(view) - len(data)))
            data[offset : offset + len(view)] = view

        def nothing(*_: Any) -> None:
            return

        return SimpleNamespace(
            write_at=write_at,
            preallocate=nothing,
            sync_file=nothing,
            close=nothing,
            path=path,
            alignment=0,
        )

    def stat(self, path: str) -> int | None:
        """The size, None for what is not there."""
        return len(self.files[path]) if path in self.files else None

    def read_range(self, path: str, start: int, length: int) -> bytes:
        """Some bytes; FileNotFoundError for what is not there."""
        if path not in self.files:
            raise FileNotFoundError(path)
        self.bytes_read += length
        return bytes(self.files[path][start : start + length])

    def read_into(self, path: str, start: int, target: memoryview) -> int:
        """Some bytes into memory; how many there were."""
        found = self.files[path][start : start + len(target)]
        target[: len(found)] = found
        self.bytes_read += len(found)
        return len(found)

    def delete(self, path: str) -> None:
        """Take a file away."""
        del self.files[path]


@dataclass
class Saved:
    """A save of whole tensors as the nodes of meshes have them; None is a tensor that all have whole."""

    wholes: dict[str, torch.Tensor]
    meshes: dict[str, Mesh | None]
    world: int
    storage: MemoryStorage = field(default_factory=MemoryStorage)

    def run(self) -> LeafReader:
        """Plan, write all shards, encode the manifest and open it again."""
        return LeafReader(self.storage, codec.decode(codec.encode(self.manifest())))  # type: ignore[arg-type]

    def manifest(self) -> Manifest:
        """Plan and write all shards."""
        places = [NodePlace(f"trainer_{rank}", rank, self.world, "host", 0) for rank in range(self.world)]
        specs = tuple(self._spec(name) for name in self.wholes)
        plan = plan_classes([NodeClass(tuple(range(self.world)), specs)])
        rows = [row for place in places for row in self._write(plan, place)]
        written = LeaseInfo("job", "uuid", 0, 0), Position(1), ATTEMPT_NAME
        return compose(plan, *written, world_of(places), rows, {}, Facts())

    def _spec(self, name: str) -> LeafSpec:
        return replace(spec_of(self._leaf(name, self.wholes[name])), sharding=self.meshes[name])

    def _leaf(self, name: str, content: torch.Tensor) -> Leaf:
        return Leaf(name, name, Role.PARAMETER, "main", content)

    def _write(self, plan: Any, place: NodePlace) -> list[ShardRow]:
        leaves = {name: self._leaf(name, self._part(name, place.rank)) for name in self.wholes}
        state = NodeState(place, leaves, (), {}, {})
        job: Any = SimpleNamespace(reuse=None)
        found = []
        for group in plan.files(place.rank):
            entries, _ = pipeline._contents(job, plan, state, group)
            identity = ShardIdentity("job", Position(1), place.name, group, ATTEMPT_NAME)
            storage: Any = self.storage
            for part, report in enumerate(
                write_shard(storage, f"data/{ATTEMPT_NAME}", identity, entries, values={}), 1
            ):
                size, head, digest = report.bytes, report.header_bytes, report.header_sha256
                found.append(ShardRow(place.rank, group, part, size, head, digest))
        return found

    def _part(self, name: str, node: int) -> torch.Tensor:
        mesh = self.meshes[name]
        if mesh is None:
            return self.wholes[name]
        return local_part(self.wholes[name], mesh, node) if node in mesh.nodes else torch.empty(0)


def load(reader: LeafReader, name: str, like: torch.Tensor, wanted: LocalTarget | None) -> torch.Tensor:
    """Read a leaf, or the part of it for a target."""
    out = torch.empty(like.shape if wanted is None else wanted.shape, dtype=like.dtype)
    reader.read_many([LeafRead(name, memory_of(out), None, wanted)])
    return out
