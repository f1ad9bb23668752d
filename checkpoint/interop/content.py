"""What goes from one format to another: named tensors that are read in pieces, values, and ties."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from typing import Any

import torch

from torchrelay.checkpoint.format.dtypes import (
    BLOCK,
    ElementType,
    by_name,
    logical_name,
    memory_of,
    torch_dtype,
)
from torchrelay.records import dataclass

PIECE = 8 * BLOCK
"""Bytes that are in memory at a time; a multiple of every element's size."""


@dataclass(frozen=True)
class Outgoing:
    """A stored tensor on its way out. `fill` reads bytes [start, stop) of it as it is stored."""

    stored: ElementType
    shape: tuple[int, ...]
    fill: Callable[[int, int, memoryview], None]
    cast: torch.dtype | None = None

    @property
    def element(self) -> ElementType:
        """The type that it has outside."""
        return self.stored if self.cast is None else by_name(logical_name(self.cast))

    @property
    def nbytes(self) -> int:
        """Its bytes outside."""
        return self.element.nbytes(self.shape)

    def pieces(self) -> Iterator[memoryview]:
        """Its bytes outside, in order; each piece is valid until the next one is asked for."""
        total = math.prod(self.shape) * self.stored.itemsize
        scratch = torch.empty(min(PIECE, total), dtype=torch.uint8)
        for start in range(0, total, PIECE):
            piece = scratch[: min(PIECE, total - start)]
            self.fill(start, start + len(piece), memory_of(piece))
            if self.cast is None:
                yield memory_of(piece)
            else:
                yield memory_of(piece.view(torch_dtype(self.stored)).to(self.cast))


@dataclass(frozen=True)
class Content:
    """What is exported, by the names outside. `ties` are further names of tensors; `left_out` stays.

    `nodes` has, of what differs between nodes, whose value it is.
    """

    tensors: Mapping[str, Outgoing]
    values: Mapping[str, Any]
    ties: Mapping[str, str]
    left_out: tuple[str, ...] = ()
    nodes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Incoming:
    """What is imported: a tree of mappings, sequences, values and CPU tensors, most of them mapped files.

    `ties` are names at the top that mean the tensor of another one.
    """

    tree: Mapping[str, Any]
    ties: Mapping[str, str] = field(default_factory=dict)
