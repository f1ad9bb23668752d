"""The memory that saves are staged in: one block that is kept from save to save, its pages touched."""

from __future__ import annotations

import torch

from torchrelay.checkpoint.format.dtypes import memory_of
from torchrelay.checkpoint.format.utils import lazily
from torchrelay.records import dataclass

ALIGNMENT = 64
"""Pieces begin at multiples of a cache line."""


class Block:
    """Bytes in one piece; pinned where this process computes on a GPU, so that copies run beside it.

    A machine may have GPUs that the job does not use: pinning would begin to use one, with memory of it
    and random states that a save then takes along.
    """

    def __init__(self, nbytes: int) -> None:
        pinned = nbytes > 0 and torch.cuda.is_initialized()
        self.tensor = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned).zero_()
        self.view = memory_of(self.tensor)
        self.address = self.tensor.data_ptr()


@dataclass(frozen=True, eq=False)
class Room:
    """A place in a block. It keeps the block alive."""

    block: Block
    at: int
    nbytes: int

    @lazily
    def address(self) -> int:
        """Where it lies in memory."""
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
        """A block of at least so many bytes, which nobody else uses: earlier rooms must not be in use.

        Touching the pages takes longer than copying into them, so it is done once and early. Raises
        MemoryError, holding nothing, where there is not so much memory.
        """
        if nbytes > self.nbytes:
            self._block = Block(0)
            try:
                self._block = Block(nbytes)
            except RuntimeError as error:  # what torch raises for memory that it does not get
                raise MemoryError(f"{nbytes} bytes for staging: {error}") from error
        return self._block


def room(nbytes: int) -> int:
    """What a piece takes in the arena."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
