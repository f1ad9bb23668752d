"""Dataclasses that cost a start little: some hundred classes are declared before the first epoch.

Python writes and compiles six methods for each, and freezes objects field by field. Here a class gets
methods that need no compiling, and its `__init__`, without the freezing, when some objects have been made:
of most classes a run makes fewer.
Classes that users make keep Python's own: their signature is shown before there is an object.
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
"""What `json.loads` makes: nothing that is read from a disk is known to be more."""


def _dataclass(
    cls: Any = None, /, *, frozen: bool = False, eq: bool = True, order: bool = False, kw_only: bool = False
) -> Any:
    """As Python's, but that `frozen` gives a hash and binds the type checker alone."""
    if cls is None:
        return lambda cls: _dataclass(cls, frozen=frozen, eq=eq, order=order, kw_only=kw_only)
    cls.__doc__ = cls.__doc__ or cls.__name__  # or Python would derive one from the signature
    declared(init=False, repr=False, eq=False, kw_only=kw_only)(cls)
    _declared.add(cls)
    methods: dict[str, Any] = {"__init__": _first_init, "__repr__": _repr}
    if eq:
        methods |= {"__eq__": _equal, "__hash__": _hash if frozen else None}
    if order:
        methods |= _ORDER
    for name, method in methods.items():
        if vars(cls).get(name) is None:  # a class with an `__eq__` of its own has None as its hash
            setattr(cls, name, method)
    return cls


if TYPE_CHECKING:
    from dataclasses import dataclass
else:
    dataclass = _dataclass

__all__ = ["dataclass", "make_initializers"]
_declared: set[Any] = set()
_FEW = 100
"""Objects of a class that are made without an `__init__` of its own: compiling costs as much as a hundred."""


def make_initializers() -> None:
    """Make every `__init__` now: for a process whose forks would each make their own."""
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
    """The class that declares the fields, and what sets them as Python's own `__init__`.

    It gives False where that would raise, and when some objects have been made.
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
    """Python's own `__init__` for these fields."""
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
