"""Dataclasses that are cheap to declare, because a launch declares several hundred.

Python compiles six methods per class and freezes objects field by field. These classes get generic methods,
and an `__init__` (without freezing) only after some objects have been created. Public classes that users
create should use Python's dataclasses, whose signature is available at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from dataclasses import dataclass as declared
from functools import cache
from itertools import count
from operator import attrgetter, ge, gt, le, lt
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any

Json = Any
"""Result of `json.loads`, not validated."""


def _dataclass(
    cls: Any = None, /, *, frozen: bool = False, eq: bool = True, order: bool = False, kw_only: bool = False
) -> Any:
    """Like Python's `dataclass`, except that `frozen` only adds a hash and informs the type checker."""
    if cls is None:
        return lambda cls: _dataclass(cls, frozen=frozen, eq=eq, order=order, kw_only=kw_only)
    cls.__doc__ = cls.__doc__ or cls.__name__  # otherwise Python derives one from the signature
    declared(init=False, repr=False, eq=False, kw_only=kw_only)(cls)
    _declared.add(cls)
    methods: dict[str, Any] = {"__init__": _first_init, "__repr__": _repr}
    if eq:
        methods |= {"__eq__": _equal, "__hash__": _hash if frozen else None}
    if order:
        methods |= _ORDER
    for name, method in methods.items():
        if vars(cls).get(name) is None:  # a class with its own `__eq__` has the hash None
            setattr(cls, name, method)
    return cls


if TYPE_CHECKING:
    from dataclasses import dataclass
else:
    dataclass = _dataclass

__all__ = ["dataclass", "make_initializers"]
_declared: set[Any] = set()
_FEW = 100
"""Objects created before `__init__` is compiled, which costs as much as a hundred of them."""


def make_initializers() -> None:
    """Compile every `__init__` now, for a process whose forks would otherwise each do it."""
    for cls in _declared:
        if vars(cls)["__init__"] is _first_init:
            cls.__init__ = _initializer(cls)


def _first_init(self: Any, *args: Any, **kwargs: Any) -> None:
    of: Any = type(self)
    cls, bind = _binder(of)
    if not bind(self, args, kwargs):
        cls.__init__ = _initializer(cls)
        cls.__init__(self, *args, **kwargs)


@cache
def _binder(of: Any) -> tuple[Any, Callable[[Any, Sequence[Any], dict[str, Any]], bool]]:
    """Return the class that declares the fields, and a function that sets them like Python's `__init__`.

    It returns False if `__init__` would raise, or after some objects have been created.
    """
    cls = next(one for one in of.__mro__ if one in _declared)
    declared = fields(cls)
    places = [one.name for one in declared if one.init and not one.kw_only]
    taken = {one.name for one in declared if one.init}
    defaults = {one.name: one.default for one in declared if one.default is not MISSING}
    factories = [(one.name, one.default_factory) for one in declared if one.default_factory is not MISSING]
    size = len({*taken, *defaults, *(name for name, _ in factories)})
    ends = hasattr(cls, "__post_init__")
    made = count()

    def bind(self: Any, args: Sequence[Any], given: dict[str, Any]) -> bool:
        if next(made) >= _FEW:
            return False
        values = self.__dict__
        values.update(defaults)
        values.update(zip(places, args, strict=False))
        if given:
            if not taken.issuperset(given) or not given.keys().isdisjoint(places[: len(args)]):
                return False
            values.update(given)
        for name, make in factories:
            if name not in values:
                values[name] = make()
        if len(values) != size or len(args) > len(places):
            return False
        if ends:
            self.__post_init__()
        return True

    return cls, bind


def _initializer(cls: Any) -> Callable[..., None]:
    """Return Python's `__init__` for these fields."""
    alike: Any = type(cls)(cls.__name__, (cls,), {"__doc__": "-", "__qualname__": cls.__qualname__})
    initializer: Callable[..., None] = declared(repr=False, eq=False)(alike).__init__
    return initializer


@recursive_repr()
def _repr(self: Any) -> str:
    shown = (f"{one.name}={getattr(self, one.name)!r}" for one in fields(self) if one.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _equal(self: Any, other: object) -> Any:
    if other.__class__ is not self.__class__:
        return NotImplemented
    cls: Any = self.__class__
    key = _key(cls)
    return bool(key(self) == key(other))


def _hash(self: Any) -> int:
    return hash(_hashed(self.__class__)(self))


def _comparison(operator: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def compare(self: Any, other: Any) -> Any:
        if other.__class__ is not self.__class__:
            return NotImplemented
        key = _key(self.__class__)
        return operator(key(self), key(other))

    return compare


_ORDER = {f"__{one.__name__}__": _comparison(one) for one in (lt, le, gt, ge)}


@cache
def _key(cls: Any) -> Callable[[Any], tuple[Any, ...]]:
    return _values([one.name for one in fields(cls) if one.compare])


@cache
def _hashed(cls: Any) -> Callable[[Any], tuple[Any, ...]]:
    return _values([one.name for one in fields(cls) if (one.compare if one.hash is None else one.hash)])


def _values(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    if len(names) > 1:
        return attrgetter(*names)
    return lambda self: tuple(getattr(self, name) for name in names)
