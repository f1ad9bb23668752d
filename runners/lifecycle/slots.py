"""Typed entries of a mapping: `context.job` is `context["job"]`, of a known type, set by a known step."""

from __future__ import annotations

from typing import Any, Generic, Protocol, TypeVar, overload

T = TypeVar("T")


class Holding(Protocol):
    """What slots are part of: a mapping that says who should have set what is missing."""

    def __getitem__(self, key: str, /) -> Any: ...

    def __setitem__(self, key: str, value: Any, /) -> None: ...


class Slot(Generic[T]):
    """An entry that the step called `setter` sets; None: it is there from the beginning."""

    def __init__(self, setter: str | None, doc: str) -> None:
        self.setter = setter
        self.__doc__ = doc
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, holder: None, owner: type) -> Slot[T]: ...

    @overload
    def __get__(self, holder: Holding, owner: type) -> T: ...

    def __get__(self, holder: Holding | None, owner: type) -> Any:
        return self if holder is None else holder[self.name]

    def __set__(self, holder: Holding, value: T) -> None:
        holder[self.name] = value
