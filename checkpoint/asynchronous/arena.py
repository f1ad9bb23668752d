"""The memory that saves are staged in: one block that is kept from save to save, its pages touched."""

from __future__ import annotations

import torch

ALIGNMENT = 64
"""Pieces begin at multiples of a cache line."""


class Arena:
    """Hands out pieces of one block of bytes; pinned where there is a GPU, so that copies run behind it."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    @property
    def nbytes(self) -> int:
        """The size of the block."""
        return self._memory.numel()

    def reserve(self, nbytes: int) -> None:
        """Have at least so many bytes and hand them all out anew; earlier pieces must not be in use.

        Touching the pages takes longer than copying into them, so it is done once and early. Raises
        MemoryError, holding nothing, where there is not so much memory.
        """
        self._used = 0
        if nbytes <= self.nbytes:
            return
        self._memory = torch.empty(0, dtype=torch.uint8)
        pinned = torch.cuda.is_available()
        try:
            self._memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned).zero_()
        except RuntimeError as error:  # what torch raises for memory that it does not get
            raise MemoryError(f"{nbytes} bytes for staging: {error}") from error

    def take(self, nbytes: int) -> torch.Tensor:
        """The next piece of so many bytes; what was reserved suffices for `room` of every piece."""
        piece = self._memory[self._used : self._used + nbytes]
        self._used += room(nbytes)
        return piece


def room(nbytes: int) -> int:
    """What a piece takes in the arena."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
