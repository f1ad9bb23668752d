"""A bug to plant, and who must notice it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Bug:
    """A piece of code that stands once in a file, what it becomes, and the tests of which one must fail."""

    name: str
    path: str
    old: str
    new: str
    tests: Sequence[str]
