"""All ranks of a simulated job beside rank 0: what their leaves are, what they post, and the files of some.

A job of `nodes` ranks and `blobs` blobs of float32. Kinds:

- `ddp`: replicated;
- `fsdp`: on one mesh of all ranks;
- `hsdp`: on n/8 x 8;
- `stages`: pipeline stages of equal length, each on its own mesh of n/stages/8 x 8. A rank has only the blobs
  of its stage, and there are as many classes of nodes as stages.

The content of an element follows from its blob and its place, so that readers can check it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import torch

from bench.coordinator import PER_HOST, leaf_of, places_of
from torchrelay.checkpoint.format.mesh import Mesh
from torchrelay.checkpoint.format.mesh_geometry import Bounds, Replicated, Sharded, whole
from torchrelay.checkpoint.save.agreement import Described, class_json
from torchrelay.checkpoint.save.assignments import Assignment
from torchrelay.checkpoint.save.capture import NodeState
from torchrelay.checkpoint.state.leaf import Leaf, LeafSpec
from torchrelay.jobs.cluster import NodePlace

KINDS = ("ddp", "fsdp", "hsdp", "stages")
STAGES = 10
PERIOD = 1 << 20
"""Contents repeat after so many elements; float32 holds all of these numbers exactly."""
Json = Any


@dataclass(frozen=True)
class Everybody:
    """Who has which leaves. Ranks that have the same leaves have the same objects."""

    kind: str
    blobs: int
    nodes: int
    stages: int = field(default=1)

    @staticmethod
    def of(kind: str, blobs: int, nodes: int) -> Everybody:
        """The job of a kind; `stages` needs blobs and hosts that its stages divide."""
        stages = STAGES if kind == "stages" else 1
        if blobs % stages or nodes % stages or (kind in ("hsdp", "stages") and nodes // stages % PER_HOST):
            raise ValueError(
                f"{blobs} blobs on {nodes} nodes do not form {kind} of {stages} stages of whole hosts"
            )
        return Everybody(kind, blobs, nodes, stages)

    def stage_of(self, rank: int) -> int:
        """The stage of a rank."""
        return rank * self.stages // self.nodes

    @cached_property
    def classes(self) -> tuple[tuple[LeafSpec, ...], ...]:
        """The leaves of each stage."""
        many = self.blobs // self.stages
        meshes = map(self._mesh, range(self.stages))
        return tuple(
            tuple(leaf_of(index, mesh) for index in range(stage * many, (stage + 1) * many))
            for stage, mesh in enumerate(meshes)
        )

    @cached_property
    def scopes(self) -> tuple[Mapping[str, str], ...]:
        """The scopes of each stage's leaves."""
        return tuple({spec.name: "replicated" for spec in specs} for specs in self.classes)

    @cached_property
    def described(self) -> tuple[Described, ...]:
        """The descriptions that the ranks of each stage send."""
        return tuple(map(Described, self.classes, self.scopes))

    @cached_property
    def places(self) -> tuple[NodePlace, ...]:
        """All ranks, eight to a host."""
        return places_of(self.nodes)

    def state(self, rank: int) -> NodeState:
        """A rank at the boundary of a save."""
        stage = self.stage_of(rank)
        leaves = {spec.name: self._leaf(spec) for spec in self.classes[stage]}
        return MadeUp(self.places[rank], leaves, self.classes[stage], self.scopes[stage], {})

    def told(self, topic: str, rank: int, value: Json) -> Json:
        """What a rank posts where rank 0 posts `value`."""
        stage = self.stage_of(rank)
        if topic == "save: leaves":
            return [[[0, self.described[stage].digest]], value[1]]
        if topic == "save: classes":
            leads = rank == 0 or self.stage_of(rank - 1) != stage
            return [class_json(self.described[stage])] if leads else []
        return value

    def _mesh(self, stage: int) -> Mesh | None:
        if self.kind == "ddp":
            return None
        many = self.nodes // self.stages
        nodes = tuple(range(stage * many, (stage + 1) * many))
        if self.kind == "fsdp":
            return Mesh(nodes, (many,), (Sharded(0),))
        return Mesh(nodes, (many // PER_HOST, PER_HOST), (Replicated(), Sharded(0)))

    @staticmethod
    def _leaf(spec: LeafSpec) -> Leaf:
        return Leaf(spec.name, spec.blob, spec.role, spec.group, torch.empty(0))


class MadeUp(NodeState):
    """A rank whose tensors are made when they are written."""

    def tensor(self, assignment: Assignment) -> torch.Tensor:
        """The part of a leaf that is asked for."""
        spec = assignment.leaf
        if assignment.box is not None:
            return content_of(spec.name, spec.shape, assignment.box)
        return content_in(spec.name, assignment.first, assignment.last)


def content_in(name: str, first: int, last: int) -> torch.Tensor:
    """Elements [first, last) of a leaf in row-major order."""
    return ((torch.arange(first, last) + _number(name)) % PERIOD).to(torch.float32)


def content_of(name: str, shape: Sequence[int], box: Bounds | None = None) -> torch.Tensor:
    """A box of a leaf."""
    places = torch.tensor(_number(name))
    for dim, (start, stop) in enumerate(box or whole(shape)):
        stride = prod(shape[dim + 1 :])
        places = places[..., None] + torch.arange(start, stop) * stride
    return (places % PERIOD).to(torch.float32)


def _number(name: str) -> int:
    return int(name.split(".")[2]) * 7919


@dataclass(frozen=True)
class RankPeers:
    """The peers of one rank other than 0: everybody has posted at once."""

    rank: int
    size: int
    everybody: Everybody

    def exchange(
        self,
        topic: str,
        value: Json,
        *,
        deadline_secs: float | None = None,
        for_others: Callable[[Json], Json] | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> list[Json]:
        """What all ranks post; as JSON, as it would have come."""
        posts: dict[str, Json] = {}
        found = []
        for rank in range(self.size):
            said = value if rank == self.rank else self.everybody.told(topic, rank, value)
            found.append(posts.setdefault(json.dumps(said), said))
        return found

    def apart(self) -> RankPeers:
        """There is no other line."""
        return self
