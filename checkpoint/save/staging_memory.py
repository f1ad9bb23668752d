"""Allocate staging memory once, with its pages touched, and estimate its size."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from torchrelay.checkpoint.format.dtypes import memory_of
from torchrelay.checkpoint.format.names import format_key
from torchrelay.checkpoint.save.assignments import Assignment, SavePlan
from torchrelay.checkpoint.state.flatten import leaves_of
from torchrelay.checkpoint.state.leaf import Role, spec_of
from torchrelay.checkpoint.state.names import local_part
from torchrelay.errors import RelayError
from torchrelay.jobs.session import Session
from torchrelay.records import dataclass

ALIGNMENT = 64
"""Pieces begin at multiples of a cache line."""


class Block:
    """One allocation; pinned if this process computes on a GPU, so that copies run in parallel.

    It is not pinned otherwise: that would initialise an unused GPU, with memory and random states to save.
    """

    def __init__(self, nbytes: int) -> None:
        pinned = nbytes > 0 and torch.cuda.is_initialized()
        self.tensor = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned).zero_()
        self.view = memory_of(self.tensor)
        self.address = self.tensor.data_ptr()


@dataclass(frozen=True, eq=False)
class StagingSlot:
    """A place in a block. It keeps the block alive."""

    block: Block
    at: int
    nbytes: int

    @cached_property
    def address(self) -> int:
        """Its address."""
        return self.block.address + self.at

    @property
    def view(self) -> memoryview:
        """Its bytes."""
        return self.block.view[self.at : self.at + self.nbytes]

    @property
    def tensor(self) -> torch.Tensor:
        """Its bytes as a tensor."""
        return self.block.tensor[self.at : self.at + self.nbytes]


class Arena:
    """Keeps the block of earlier saves as long as it is large enough."""

    def __init__(self) -> None:
        self._block = Block(0)

    @property
    def nbytes(self) -> int:
        """The size of the block."""
        return len(self._block.view)

    def reserve(self, nbytes: int) -> Block:
        """A block of at least so many bytes; slots of earlier saves must not be in use.

        Touching the pages takes longer than copying into them, so it is done once and early. Raises
        MemoryError, holding nothing, if there is not enough memory.
        """
        if nbytes > self.nbytes:
            self._block = Block(0)
            try:
                self._block = Block(nbytes)
            except RuntimeError as error:  # torch raises it when it gets no memory
                raise MemoryError(f"{nbytes} bytes for staging: {error}") from error
        return self._block


def room(nbytes: int) -> int:
    """Bytes that a piece takes in the arena."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


STATES_PER_PARAMETER = 2
"""Tensors of its size that an optimizer will keep per parameter, before its first step creates them."""
SLACK_BYTES = 1 << 20


def likely_bytes(session: Session) -> int:
    """Estimate the bytes that this process will stage; replicas write a share each."""
    total = 0
    for place in session.local_nodes:
        entries = session.workspace(place.name).entries()
        objects = {name: entry.value for name, entry in entries.items() if entry.blob is not None}
        with suppress(RelayError):  # the save itself raises for what cannot be stored
            total += _bytes_of(objects, len(session.nodes))
    return total + total // 16 + SLACK_BYTES


def _bytes_of(objects: dict[str, object], replicas: int) -> int:
    """Bytes of objects that are split between so many replicas."""
    shared = alone = 0
    for leaf in leaves_of(objects):
        spec = spec_of(leaf)
        if spec.kind == "tensor" and leaf.alias_of is None:
            split = leaf.role in (Role.PARAMETER, Role.OPTIMIZER)
            shared, alone = (shared + spec.nbytes, alone) if split else (shared, alone + spec.nbytes)
    for one in objects.values():
        if isinstance(one, Optimizer) and not local_part(one).state:
            sizes = [p.nbytes for group in one.param_groups for p in group["params"]]
            shared += STATES_PER_PARAMETER * sum(sizes)
    return shared // replicas + alone


def free_share(session: Session) -> int:
    """The share of the memory that is free on the host, for each process there."""
    own = session.local_nodes[0]
    processes = {place.process for place in session.nodes if place.host_index == own.host_index}
    return _free_bytes() // max(1, len(processes))


def _free_bytes() -> int:
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


@dataclass(frozen=True, eq=False)
class StagedPiece:
    """A piece of a tensor, the key under which a shard holds it, and its slot."""

    assignment: Assignment
    key: str
    at: int
    nbytes: int
    entire: bool
    """Whether it is a whole tensor of a single node."""


@dataclass(frozen=True)
class Rooms:
    """Slots in staging memory, one per piece, and their bytes by the pieces' keys."""

    rooms: tuple[StagingSlot, ...]
    views: Mapping[str, memoryview]


@dataclass(frozen=True, eq=False)
class Pieces:
    """The pieces of each hosted node of a plan; `nbytes` is their total size."""

    plan: SavePlan
    nodes: tuple[int, ...]
    by_node: tuple[tuple[StagedPiece, ...], ...]
    nbytes: int
    _rooms: list[Any] = field(default_factory=list)

    def rooms_in(self, block: Block) -> tuple[Rooms, ...]:
        """Slots of the pieces of each node in a block; the same objects for the same block."""
        if not self._rooms or self._rooms[0] is not block:
            self._rooms[:] = [block, tuple(_rooms(part, block) for part in self.by_node)]
        rooms: tuple[Rooms, ...] = self._rooms[1]
        return rooms

    def belong_to(self, plan: SavePlan, nodes: Sequence[int]) -> bool:
        """Whether these are the pieces of this plan and these nodes."""
        return self.plan is plan and self.nodes == tuple(nodes)


def _rooms(pieces: Sequence[StagedPiece], block: Block) -> Rooms:
    """Slots of the pieces in a block."""
    rooms = tuple(StagingSlot(block, one.at, one.nbytes) for one in pieces)
    return Rooms(rooms, {one.key: room.view for one, room in zip(pieces, rooms, strict=True)})


def pieces_of(plan: SavePlan, nodes: Sequence[int]) -> Pieces:
    """Lay out the tensors that these nodes write in staging memory, one after the other."""
    at = 0
    by_node = []
    for node in nodes:
        found = []
        for one in plan.assignments(node):
            if one.leaf.kind == "tensor":
                nbytes = one.nbytes
                entire = one.box is None and one.whole
                found.append(StagedPiece(one, format_key(one.key), at, nbytes, entire))
                at += room(nbytes)
        by_node.append(tuple(found))
    return Pieces(plan, tuple(nodes), tuple(by_node), at)
