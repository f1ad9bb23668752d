"""What the table of a family holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchrelay.records import dataclass


@dataclass(frozen=True)
class Operator:
    """`run(call, *inputs)` gives the output, or a tuple of them; an input that is left out is None.

    Inputs at the positions `ints` mean sizes, axes or places: they are given as lists of numbers, those at
    `numbers` as lists of floats. With `raw`
    all inputs come as they are, integers that are known without a tensor included.
    """

    run: Callable[..., Any]
    ints: tuple[int, ...] = ()
    numbers: tuple[int, ...] = ()
    raw: bool = False
