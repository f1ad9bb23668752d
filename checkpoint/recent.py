"""The last few answers to a question that saves ask again and again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Recent(Generic[T]):
    """Keeps the last `size` answers, newest first; each must itself tell what it was the answer to.

    Several threads may ask: an answer may then be made twice, and one of both is kept.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._kept: tuple[T, ...] = ()

    def get(self, fits: Callable[[T], bool], make: Callable[[], T]) -> T:
        """A kept answer that fits, else a new one. What `make` raises is not kept."""
        for one in self._kept:
            if fits(one):
                return one
        made = make()
        self._kept = (made, *self._kept[: self._size - 1])
        return made
