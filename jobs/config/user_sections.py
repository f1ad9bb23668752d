"""A section of the user's own as an object."""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrelay.errors import UsageError
from torchrelay.jobs.config.section_types import local_path
from torchrelay.jobs.config.tree import Tracked, hint, leaves, nearest
from torchrelay.jobs.config.types import MISFIT, WRONG, At, Reading, described

_PLAIN: dict[Any, tuple[type, ...]] = {bool: (bool,), int: (int,), float: (int, float), str: (str,)}


def bound(to: Any, value: Any, at: At) -> Any:
    """`value` as a `to`, its keys noted as read; complaints go to the reading, the result is WRONG then.

    Raises UsageError for a class that cannot be filled from a configuration.
    """
    if callable(getattr(to, "model_validate", None)):
        return _validated(to, value, at)
    if dataclasses.is_dataclass(to) and isinstance(to, type):
        return _dataclass(to, value, at)
    if to is dict:
        return Tracked(value, at.where, at.reading).plain()
    raise UsageError(f"{to!r:.80} cannot be a section: give dict, a dataclass, or a pydantic model")


def _dataclass(to: Any, value: Any, at: At) -> Any:
    if not isinstance(value, Mapping):
        return at.wrong(f"expected a mapping, for {to.__name__}, not {described(value)}")
    fields = {one.name: one for one in dataclasses.fields(to) if one.init}
    hints = typing.get_type_hints(to)
    before = len(at.reading.problems)
    made: dict[str, Any] = {}
    for name, one in value.items():
        inner = at.inner(name)
        at.reading.reads.update(leaves(one, inner.where))
        if name in fields:
            made[name] = _converted(hints[name], one, inner)
        else:
            message = f"{to.__name__} has no field `{name}`; {hint(name, fields)}"
            at.reading.wrong(inner.where, message, nearest(name, fields), key=True)
    missing = [one.name for one in fields.values() if one.name not in made and _is_required(one)]
    if missing:
        at.wrong(f"{' and '.join(f'`{name}`' for name in missing)} missing, for {to.__name__}")
    if len(at.reading.problems) > before:
        return WRONG
    try:
        return to(**made)
    except ValueError as error:  # what __post_init__ of the user refuses
        return at.wrong(str(error))


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _converted(hint_: Any, value: Any, at: At) -> Any:
    """A value as an annotation wants it; WRONG after a complaint."""
    if dataclasses.is_dataclass(hint_) or hasattr(hint_, "model_validate"):
        return bound(hint_, value, at)
    origin, inner = typing.get_origin(hint_) or hint_, typing.get_args(hint_)
    found = MISFIT
    if hint_ is Any:
        found = value
    elif origin is typing.Annotated:
        found = _converted(inner[0], value, at)
    elif origin in (typing.Union, types.UnionType):
        found = _first_that_fits(inner, value, at)
    elif origin is typing.Literal:
        found = value if (type(value), value) in [(type(one), one) for one in inner] else MISFIT
    elif origin in (list, tuple, Sequence):
        found = _sequence(origin, inner, value, at) if isinstance(value, list) else MISFIT
    elif origin in (dict, Mapping):
        if isinstance(value, dict):
            kind = inner[1] if inner else Any
            found = {name: _converted(kind, one, at.inner(name)) for name, one in value.items()}
    else:
        found = _single(hint_, value, at)
    return at.wrong(f"expected {_name(hint_)}, not {described(value)}") if found is MISFIT else found


def _single(hint_: Any, value: Any, at: At) -> Any:
    if hint_ in _PLAIN:
        fits = isinstance(value, _PLAIN[hint_]) and (hint_ is bool or not isinstance(value, bool))
        return hint_(value) if fits else MISFIT
    if hint_ is type(None):
        return None if value is None else MISFIT
    if hint_ is Path:
        return local_path(value, at.reading.workspace) if isinstance(value, str) else MISFIT
    if isinstance(hint_, type) and issubclass(hint_, enum.Enum):
        known = {one.value: one for one in hint_}
        return known.get(value, MISFIT) if isinstance(value, (str, int)) else MISFIT
    raise UsageError(
        f"{at.reading.tree.path(at.where)}: a field of type {_name(hint_)} cannot be read from YAML; "
        "use bool, int, float, str, Path, Literal, an Enum, lists, dicts, dataclasses, or Any"
    )


def _first_that_fits(alternatives: Sequence[Any], value: Any, at: At) -> Any:
    for one in alternatives:
        trial = Reading(at.reading.tree, at.reading.workspace)
        found = _converted(one, value, At(trial, at.where))
        if not trial.problems:
            return found
    return MISFIT


def _sequence(origin: Any, inner: Sequence[Any], value: Sequence[Any], at: At) -> Any:
    several = origin is not tuple or (len(inner) == 2 and inner[1] is Ellipsis) or not inner
    kinds = [inner[0] if inner else Any] * len(value) if several else list(inner)
    if len(kinds) != len(value):
        return at.wrong(f"expected {len(kinds)} items, not {len(value)}")
    found = (_converted(*pair, at.inner(index)) for index, pair in enumerate(zip(kinds, value, strict=True)))
    return tuple(found) if origin is tuple else list(found)


def _name(hint_: Any) -> str:
    plain = isinstance(hint_, type) and not typing.get_args(hint_)
    return hint_.__name__ if plain else str(hint_).replace("typing.", "")


def _validated(to: Any, value: Any, at: At) -> Any:
    """By the model's own check, whose errors say where they are by `loc` and what they are by `msg`."""
    own = Tracked(value, at.where, at.reading).plain() if isinstance(value, Mapping) else value
    try:
        found = to.model_validate(own)
    except ValueError as error:
        told = getattr(error, "errors", None)
        if not callable(told):
            return at.wrong(str(error))
        for one in told():
            at.reading.wrong((*at.where, *one["loc"]), str(one["msg"]))
        return WRONG
    at.reading.reads.difference_update(_ignored(found, value, at))
    return found


def _ignored(model: Any, value: Any, at: At) -> set[tuple[str | int, ...]]:
    """The places of the keys that a model let pass without having them."""
    if not isinstance(value, Mapping) or not hasattr(type(model), "model_fields"):
        return set()
    known = {}
    for name, field in type(model).model_fields.items():
        known.update(dict.fromkeys((name, field.alias, getattr(field, "validation_alias", None)), name))
    extra = getattr(model, "model_extra", None) or {}
    found: set[tuple[str | int, ...]] = set()
    for key, one in value.items():
        where = at.inner(key)
        if key in known:
            found |= _ignored(getattr(model, known[key], None), one, where)
        elif key not in extra:
            found.update(leaves(one, where.where))
    return found
