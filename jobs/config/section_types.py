"""Types of special values (paths, weights, class paths, GPUs) and of the user's own sections."""

from __future__ import annotations

import dataclasses
import enum
import os
import re
import types
import typing
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torchrelay.errors import UsageError
from torchrelay.jobs.config.tree import Tracked, hint, leaves, nearest
from torchrelay.jobs.config.types import A_TEXT, EXPRESSION, MISFIT, WRONG, At, Json, One, Reading, described
from torchrelay.jobs.config.yaml_reader import short
from torchrelay.jobs.runtime import split_run
from torchrelay.records import dataclass

_WORKSPACE = "workspace"
_VARIABLE = re.compile(r"(?:^|/)\$([A-Za-z_]\w*)(?:/|$)")
_BRACES = re.compile(r"\{([A-Za-z_]\w*)\}")
_SAVED = {"best": "best", "last": "last", "latest": "last"}


def _path(value: Any, at: At) -> Any:
    """Return the absolute path, or the URL."""
    if not isinstance(value, str) or not value.strip():
        return MISFIT
    if any(unicodedata.category(one) in ("Cc", "Cs") for one in value):
        return at.wrong(f"{short(value)} has control characters: choose another path")
    if (remedy := unreplaced(value)) is not None:
        return at.wrong(f"{short(value)}: {remedy}")
    return value if "://" in value else str(local_path(value, at.reading.workspace))


PATH = One("a path or URL", A_TEXT, textual=True, check=_path)
"""A path or URL; paths become absolute. Without file access."""
WEIGHTS = One(
    "a path or URL, of a run also with its epoch: `RUN@7`, `RUN@best` (an empty text: none)",
    {"type": "string"},
    textual=True,
    check=lambda value, at: None if value == "" else _path(value, at),
    written=lambda value: value or None,
)
"""Location of weights."""


def unreplaced(text: str) -> str | None:
    """Suggest a correction for a text with an unsupported variable such as `$HOME`, else None."""
    if (found := _VARIABLE.search(text)) is not None:
        return f"unsupported variable: write `${{env:{found[1]}}}`"
    words = [word for word in _BRACES.findall(text) if word != _WORKSPACE and nearest(word, [_WORKSPACE])]
    return f"`{{{words[0]}}}` is unknown: did you mean `{{{_WORKSPACE}}}`?" if words else None


def split_epoch(text: str, exists: Callable[[str], bool] = os.path.exists) -> tuple[str, int | str | None]:
    """Split `RUN@7` or `RUN@best`; None without an epoch, or if a path with the whole name exists."""
    run, epoch = split_run(text, exists)
    if epoch is not None and epoch.isdecimal():
        return run, int(epoch)
    return (run, _SAVED[epoch]) if epoch in _SAVED else (text, None)


def split_weights(text: str) -> tuple[str, int | str | None]:
    """Split `init_model_path`, also `RUN/7`, into path and epoch; an existing path is not split."""
    run, epoch = split_epoch(text)
    folder, _, last = text.rpartition("/")
    if epoch is None and folder and last.isdecimal() and "://" not in text and not os.path.exists(text):  # noqa: PTH110
        return folder, int(last)
    return run, epoch


def local_path(text: str, workspace: Path) -> Path:
    """Return the absolute path: expands `~`, relative to the workspace, without following links."""
    expanded = os.path.expanduser(text) if text.startswith("~") else text  # noqa: PTH111 - keeps unknown users
    return Path(os.path.normpath(workspace / expanded))


_NAME = r"[^\W\d]\w*"
_MODULE = re.compile(rf"(?P<module>{_NAME}(?:\.{_NAME})*):(?P<name>{_NAME})")
_FILE = re.compile(rf"(?P<file>.*\.py)(?::(?P<name>{_NAME}))?")
_ANCESTOR = "paddlerec."


@dataclass(frozen=True)
class ClassPath:
    """A class in a `file` or an importable `module`, one of which is set; `text` is what the user wrote."""

    text: str
    name: str
    file: Path | None = None
    module: str | None = None

    def __str__(self) -> str:
        return self.text


def class_at(default: str) -> One:
    """Return the type of a class path; a file without `:Class` means class `default`. The file must exist."""
    word = f"`file.py` with a class `{default}`, `file.py:Class` or `module:Class`"
    return One(word, A_TEXT, textual=True, check=partial(_class, default, word))


def _class(default: str, word: str, value: Any, at: At) -> Any:
    """Parse a class path, without importing."""
    if not isinstance(value, str):
        return MISFIT
    if value.startswith(_ANCESTOR):
        return at.wrong(f"{short(value)} is part of the PaddleRec package: copy the file to the workspace")
    if (found := _FILE.fullmatch(value)) is not None:
        file, source = local_path(found["file"], at.reading.workspace), at.reading.source
        if source is not None and file.is_relative_to(at.reading.workspace):
            file = source / file.relative_to(at.reading.workspace)
        if not os.path.isfile(file):  # noqa: PTH113 - False for a name too long
            remedy = f": {why}" if (why := unreplaced(value)) is not None else ""
            return at.wrong(f"file {file} does not exist{remedy}")
        return ClassPath(value, found["name"] or default, file=file)
    if (found := _MODULE.fullmatch(value)) is not None:
        return ClassPath(value, found["name"], module=found["module"])
    module, dot, name = value.rpartition(".")
    written = f"{module}:{name}"
    remedy = f": write {written}" if dot and _MODULE.fullmatch(written) else ""
    return at.wrong(f"expected {word}, not {described(value)}{remedy}")


_NUMBERS = re.compile(r"\s*\d{1,4}\s*(,\s*\d{1,4}\s*)*")
_WHOLE: Json = {"type": "integer", "minimum": 0}
_WHOLES: Json = {"type": "array", "items": _WHOLE, "minItems": 1}


def _numbers(value: Any) -> list[int]:
    """Parse GPU numbers; empty if the value has an invalid form."""
    if isinstance(value, str):
        return [int(one) for one in value.split(",")] if _NUMBERS.fullmatch(value) else []
    listed = value if isinstance(value, list) else [value]
    return listed if all(type(one) is int and one >= 0 for one in listed) else []


def _gpus(value: Any, at: At) -> Any:
    found = _numbers(value)
    twice = len(set(found)) < len(found)
    return at.wrong("a GPU is listed twice") if twice else tuple(found) or MISFIT


GPUS = One(
    "numbers of GPUs: `0`, `[0, 1]` or `0,1`",
    {"anyOf": [_WHOLE, _WHOLES, A_TEXT]},
    textual=True,
    check=_gpus,
    written=_numbers,
)
"""GPU numbers, without duplicates."""

Kind = Literal["latest", "best", "all", "numbers"]
_RANGE = re.compile(r"(0|[1-9][0-9]{0,5})\.\.(0|[1-9][0-9]{0,5})?")
_WORDS: dict[str, Kind] = {"latest": "latest", "last": "latest", "best": "best", "all": "all"}


@dataclass(frozen=True)
class EpochChoice:
    """Selected epochs; kind `numbers` has the `listed` ones, or those from `first` to `last`, if any."""

    kind: Kind
    listed: tuple[int, ...] = ()
    first: int = 0
    last: int | None = None

    def chosen(self, available: Iterable[int], best: int | None = None) -> list[int]:
        """Return the selected ones of the existing epochs, in order; `best` is the best one, if known."""
        there = sorted(set(available))
        if self.kind in ("all", "latest"):
            return there if self.kind == "all" else there[-1:]
        if self.kind == "best":
            return [one for one in there if one == best]
        if self.listed:
            return [one for one in self.listed if one in set(there)]
        return [one for one in there if self.first <= one and (self.last is None or one <= self.last)]

    def absent(self, available: Iterable[int]) -> list[int]:
        """Return the epochs selected by number or within a finite range that do not exist."""
        there = set(available)
        if self.kind != "numbers":
            return []
        wanted = self.listed or (() if self.last is None else range(self.first, self.last + 1))
        return [one for one in wanted if one not in there]


def _epochs(value: Any, at: At) -> Any:
    if type(value) is int and value >= 0:
        return EpochChoice("numbers", (value,))
    if isinstance(value, str) and value in _WORDS:
        return EpochChoice(_WORDS[value])
    if isinstance(value, str) and (found := _RANGE.fullmatch(value)):
        first, last = int(found[1]), int(found[2]) if found[2] else None
        if last is not None and last < first:
            return at.wrong(f"the range {value} is empty: write {last}..{first}")
        return EpochChoice("numbers", first=first, last=last)
    if isinstance(value, list) and value and all(type(one) is int and one >= 0 for one in value):
        return EpochChoice("numbers", tuple(sorted(set(value))))
    return MISFIT


_RANGES: Json = {"type": "string", "pattern": r"^(0|[1-9][0-9]*)\.\.(0|[1-9][0-9]*)?$"}
EPOCHS = One(
    "an epoch, a list of epochs, a range such as `1..5` or `3..`, `latest`, `best` or `all`",
    {"anyOf": [_WHOLE, _WHOLES, {"enum": list(_WORDS)}, _RANGES, EXPRESSION]},
    textual=False,
    check=_epochs,
)
"""Type of `epoch:`; becomes an EpochChoice."""

_PLAIN: dict[Any, tuple[type, ...]] = {bool: (bool,), int: (int,), float: (int, float), str: (str,)}


def bound(to: Any, value: Any, at: At) -> Any:
    """Convert `value` to class `to`, recording its keys as read; WRONG after a reported problem."""
    if callable(getattr(to, "model_validate", None)):  # of pydantic
        own = Tracked(value, at.where, at.reading).plain() if isinstance(value, Mapping) else value
        try:
            found = to.model_validate(own)
        except ValueError as error:
            if not callable(errors := getattr(error, "errors", None)):
                return at.wrong(str(error))
            for one in errors():
                at.reading.wrong((*at.where, *one["loc"]), str(one["msg"]))
            return WRONG
        at.reading.reads.difference_update(_ignored(found, value, at))
        return found
    if dataclasses.is_dataclass(to) and isinstance(to, type):
        return _dataclass(to, value, at)
    if to is dict:
        return Tracked(value, at.where, at.reading).plain()
    raise UsageError(f"{to!r:.80} cannot be a section: expected dict, a dataclass, or a pydantic model")


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
    unset = dataclasses.MISSING
    required = [one.name for one in fields.values() if one.default is unset is one.default_factory]
    if missing := [name for name in required if name not in made]:
        at.wrong(f"{' and '.join(f'`{name}`' for name in missing)} missing, for {to.__name__}")
    if len(at.reading.problems) > before:
        return WRONG
    try:
        return to(**made)
    except ValueError as error:  # raised by the user's __post_init__
        return at.wrong(str(error))


def _converted(hint_: Any, value: Any, at: At) -> Any:
    """Convert a value to its annotation; WRONG after a reported problem."""
    if dataclasses.is_dataclass(hint_) or hasattr(hint_, "model_validate"):
        return bound(hint_, value, at)
    origin, inner = typing.get_origin(hint_) or hint_, typing.get_args(hint_)
    found = MISFIT
    if hint_ is Any:
        found = value
    elif origin is typing.Annotated:
        found = _converted(inner[0], value, at)
    elif origin in (typing.Union, types.UnionType):
        for alternative in inner:
            trial = Reading(at.reading.tree, at.reading.workspace)
            result = _converted(alternative, value, At(trial, at.where))
            if not trial.problems:
                return result
    elif origin is typing.Literal:
        found = value if (type(value), value) in [(type(one), one) for one in inner] else MISFIT
    elif origin in (list, tuple, Sequence) and isinstance(value, list):
        found = _sequence(origin, inner, value, at)
    elif origin in (dict, Mapping) and isinstance(value, dict):
        kind = inner[1] if inner else Any
        found = {name: _converted(kind, one, at.inner(name)) for name, one in value.items()}
    elif origin in (list, tuple, Sequence, dict, Mapping):
        found = MISFIT
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


def _ignored(model: Any, value: Any, at: At) -> set[tuple[str | int, ...]]:
    """Yield the locations of keys that the model ignored."""
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
