"""A value that is computed when first asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar, overload

Owner = TypeVar("Owner")
T = TypeVar("T")


class lazily(Generic[Owner, T]):  # noqa: N801  # a decorator, as `property` is
    """`functools.cached_property` without its lock, which before Python 3.12 costs more than small values.

    Threads that ask at the same time may compute it twice; so it must always come out the same.
    """

    def __init__(self, compute: Callable[[Owner], T]) -> None:
        self._compute = compute
        self._name = compute.__name__
        self.__doc__ = compute.__doc__

    @overload
    def __get__(self, instance: None, owner: type[Owner]) -> lazily[Owner, T]: ...

    @overload
    def __get__(self, instance: Owner, owner: type[Owner]) -> T: ...

    def __get__(self, instance: Owner | None, owner: type[Owner]) -> lazily[Owner, T] | T:
        if instance is None:
            return self
        found = instance.__dict__[self._name] = self._compute(instance)
        return found
