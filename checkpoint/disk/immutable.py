"""Dataclasses of which very many are made: frozen for the type checker, not for the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

T = TypeVar("T")

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: bool) -> Callable[[T], T]:
        """Nothing while programs run; Python 3.10 has none."""
        return lambda function: function


@dataclass_transform(frozen_default=True)
def immutable(*, eq: bool = True) -> Callable[[type[T]], type[T]]:
    """As `dataclass(frozen=True, eq=eq)`, but made in a quarter of the time.

    What Python does to freeze an object costs more, field by field, than making it: with 50,000 tensors
    that is felt in every save. Nothing but the type checker keeps anybody from changing one.
    """
    return dataclass(eq=eq, unsafe_hash=eq)
