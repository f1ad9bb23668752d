"""What a file may ask for: sizes that it declares, depth of nesting, turns of loops.

A file of some hundred bytes can ask for a tensor of a petabyte or a loop without end; these limits turn that
into an error before anything is allocated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torchrelay.errors import UsageError

MAX_ELEMENTS = 2**30
"""Elements of a tensor that an operator makes from a shape alone."""
MAX_TURNS = 2**20
"""Turns of one Loop."""
MAX_ENTERED = 2**22
"""Turns and branches of one call of a model, of loops inside of loops together."""
MAX_DEPTH = 16
"""Graphs inside of graphs."""
MAX_NODES = 2**18
"""Operators of a model whose functions are unfolded."""
MAX_RANK = 64


def check_made(what: str, shape: Sequence[Any]) -> None:
    """Refuse to make a tensor of more than MAX_ELEMENTS elements; sizes that are traced are not looked at."""
    known = [size for size in shape if type(size) is int]
    if any(size < 0 for size in known):
        raise UsageError(f"{what} asks for a tensor of the shape {tuple(shape)}, with a negative size")
    if math.prod(known) > MAX_ELEMENTS:
        raise UsageError(
            f"{what} asks for a tensor of the shape {tuple(shape)}, more than the {MAX_ELEMENTS} elements "
            "that an operator may make: if the file is trustworthy, raise "
            "torchrelay.models.onnx.importer.limits.MAX_ELEMENTS"
        )


def check_turns(what: str, turns: int) -> None:
    """Refuse a loop of more than MAX_TURNS turns."""
    if turns > MAX_TURNS:
        raise UsageError(f"{what} turns more than {MAX_TURNS} times: the loop was ended")


def check_entered(what: str, count: int) -> None:
    """Refuse to go on when one call has run inner graphs more than MAX_ENTERED times."""
    if count > MAX_ENTERED:
        raise UsageError(f"{what}: one call ran inner graphs more than {MAX_ENTERED} times: it was ended")
