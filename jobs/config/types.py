"""Types of values, lists and sections, which validate and describe configuration values.

pydantic is not used because it adds 0.1 s to the 0.13 s of reading a configuration, skips checks across
sections while any value is invalid, and has no normal form of values, which the identity of a run needs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import field
from functools import cache, partial
from pathlib import Path
from typing import Any

from torchrelay.jobs.config.tree import ConfigProblem, ConfigTree, Tracked, hint, nearest
from torchrelay.jobs.config.yaml_reader import Where, short
from torchrelay.jobs.runtime import seconds_in
from torchrelay.records import dataclass

Json = dict[str, Any]
WRONG: Any = object()
"""Placeholder for an invalid value that has been reported."""
MISFIT: Any = object()
"""Result of a check for a value of another kind, which is then reported with the type's `word`."""
EXPRESSION = {"$ref": "#/$defs/expression"}
"""JSON Schema of a text that expands to a number: `${env:EPOCHS,3}`."""
A_TEXT: Json = {"type": "string", "minLength": 1}


@dataclass(frozen=True)
class Reading:
    """One validation of a tree: its problems, the workspace of its paths, and the free keys read.

    The directory `source`, such as an unpacked archive, replaces the workspace for files with classes.
    """

    tree: ConfigTree
    workspace: Path
    problems: list[ConfigProblem] = field(default_factory=list)
    reads: set[Where] = field(default_factory=set)
    misses: dict[Where, None] = field(default_factory=dict)
    source: Path | None = None

    def wrong(self, where: Where, message: str, near: str | None = None, *, key: bool = False) -> Any:
        """Report a value, or its key; returns WRONG."""
        origin = self.tree.key_origin(where) if key else self.tree.origin(where)
        self.problems.append(ConfigProblem(origin, self.tree.path(where), message, near))
        return WRONG


@dataclass(frozen=True)
class At:
    """A location in the tree that is being read."""

    reading: Reading
    where: Where = ()

    def inner(self, key: str | int) -> At:
        """Return the location of a key or index below."""
        return At(self.reading, (*self.where, key))

    def wrong(self, message: str, near: str | None = None) -> Any:
        """Report the value here; returns WRONG."""
        return self.reading.wrong(self.where, message, near)

    def taken(self, form: FieldType, value: Any) -> Any:
        """Convert the value here with a type; WRONG after a reported problem."""
        return WRONG if self.where in self.reading.tree.broken else form.take(value, self)


@dataclass(frozen=True)
class FieldType:
    """Type of a value: `word` describes it in messages, `schema` for editors.

    `textual`: the content of an environment variable stays a text.
    """

    word: str
    schema: Json
    textual: bool

    def take(self, value: Any, at: At) -> Any:
        """Validate a value other than null and convert it for programs; WRONG after a reported problem."""
        raise NotImplementedError

    def normal(self, value: Any) -> Any:
        """Return the normal form of a valid value."""
        return self.mapped(value, lambda form, one: form.normal(one))

    def mapped(self, value: Any, change: Callable[[FieldType, Any], Any]) -> Any:
        """Map the parts of a value with their types."""
        return value

    def below(self, name: str | int) -> FieldType | None:
        """Return the type below a key or index; None outside the schema."""
        return None


@dataclass(frozen=True)
class One(FieldType):
    """A single value; `check` returns the value for programs, MISFIT, or WRONG after reporting."""

    check: Callable[[Any, At], Any]
    written: Callable[[Any], Any] | None = None

    def take(self, value: Any, at: At) -> Any:
        """Validate with `check`."""
        found = self.check(value, at)
        return at.wrong(f"expected {self.word}, not {described(value)}") if found is MISFIT else found

    def normal(self, value: Any) -> Any:
        """Normalise with `written`."""
        return value if self.written is None else self.written(value)


TRUTH = One(
    "true or false",
    {"anyOf": [{"type": "boolean"}, EXPRESSION]},
    textual=False,
    check=lambda value, _: value if isinstance(value, bool) else MISFIT,
)


def whole(least: int = 0, most: int | None = None, unset: int | None = None) -> FieldType:
    """Return the type of integers (not 1.0); `unset` is an older way to write "not set"."""
    end = "" if most is None else f" to {most}"
    also = "" if unset is None else f" ({unset}: not set)"
    word = str(least) if least == most else f"a whole number from {least}{end}{also}"
    limits: Json = {"type": "integer", "minimum": least} | ({} if most is None else {"maximum": most})
    const = [] if unset is None else [{"const": unset}]

    def check(value: Any, _: At) -> Any:
        if type(value) is int and value == unset:
            return None
        fits = type(value) is int and least <= value <= (value if most is None else most)
        return value if fits else MISFIT

    schema = {"anyOf": [limits, *const, EXPRESSION]}
    return One(word, schema, False, check, written=lambda value: None if value == unset else value)


def number(above: float | None = None, least: float | None = None) -> FieldType:
    """Return the type of floats above `above`, or at least `least`; integers are accepted."""
    limits: Json = {"type": "number"}
    word = "a number"
    if above is not None:
        word, limits["exclusiveMinimum"] = f"a number above {above:g}", above
    elif least is not None:
        word, limits["minimum"] = f"a number from {least:g}", least

    def check(value: Any, _: At) -> Any:
        fits = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        fits = fits and (above is None or value > above) and (least is None or value >= least)
        return float(value) if fits else MISFIT

    return One(word, {"anyOf": [limits, EXPRESSION]}, textual=False, check=check, written=float)


def text(what: str = "a text") -> FieldType:
    """Return the type of non-empty texts, described as `what`."""
    return One(what, A_TEXT, textual=True, check=partial(_text, what))


def _text(what: str, value: Any, at: At) -> Any:
    if isinstance(value, (bool, int, float)):
        return at.wrong(f"expected {what}, not {described(value)}: put it in quotes")
    return value if isinstance(value, str) and value else MISFIT


def _run_name(value: Any, at: At) -> Any:
    found = _text("a name", value, at)
    if isinstance(found, str) and any(part[:1] in ("", ".") for part in found.split("/")):
        return at.wrong(f"{found!r:.60} becomes a directory: no `..`, no `/` at either end, no leading dot")
    return found


RUN_NAME = One("a name", A_TEXT, textual=True, check=_run_name)
"""A name for a directory: relative and not hidden."""


def one_of(*words: str, refused: Mapping[str, str] | None = None) -> FieldType:
    """Return the type of words; `refused` maps words of other systems to a suggestion."""

    def check(value: Any, at: At) -> Any:
        if not isinstance(value, str):
            return MISFIT
        if refused is not None and value in refused:
            return at.wrong(f"`{value}` is not supported: {refused[value]}")
        if value in words:
            return value
        return at.wrong(f"unknown word {short(value)}; {hint(value, words)}", nearest(value, words))

    word = "one of " + ", ".join(f"`{word}`" for word in words)
    return One(word, {"anyOf": [{"enum": list(words)}, EXPRESSION]}, textual=True, check=check)


SECONDS = One(
    "seconds, or a text such as `1h30m` or `01:30:00`",
    {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, A_TEXT]},
    textual=True,
    check=lambda value, _: found if 0 < (found := seconds_in(value) or 0) < math.inf else MISFIT,
    written=seconds_in,
)


def _texts(value: Any, at: At) -> Any:
    if not isinstance(value, dict):
        return MISFIT
    for name, one in value.items():
        if not isinstance(one, str):
            at.inner(name).wrong(f"expected a text, not {described(one)}")
    return dict(value)


TEXTS = One(
    "a mapping of texts to texts",
    {"type": "object", "additionalProperties": {"type": "string"}},
    textual=False,
    check=_texts,
)


@dataclass(frozen=True)
class Many(FieldType):
    """Values of one type: a list, which becomes a tuple, or a dict; if `lone`, also one without a list."""

    item: FieldType
    kind: type
    lone: bool = False

    def take(self, value: Any, at: At) -> Any:
        """Convert all values; reports each invalid one."""
        if isinstance(value, dict) and self.kind is dict:
            return {name: at.inner(name).taken(self.item, one) for name, one in value.items()}
        if isinstance(value, list) and self.kind is list:
            return tuple(at.inner(number).taken(self.item, one) for number, one in enumerate(value))
        if self.lone:
            return (self.item.take(value, at),)
        dash = ": begin each item with `- `" if isinstance(value, dict) else ""
        return at.wrong(f"expected {self.word}, not {described(value)}{dash}")

    def mapped(self, value: Any, change: Callable[[FieldType, Any], Any]) -> Any:
        """Map the values; returns a dict or a list."""
        if self.kind is dict:
            return {name: change(self.item, one) for name, one in value.items()}
        return [change(self.item, one) for one in (value if isinstance(value, list) else [value])]

    def below(self, name: str | int) -> FieldType | None:
        """Return the type of the values."""
        return self.item if self.kind is dict or isinstance(name, int) else None


def list_of(item: FieldType) -> Many:
    """Return the type of lists of one type."""
    schema = {"type": "array", "items": item.schema}
    return Many(f"a list (each item {item.word})", schema, textual=False, item=item, kind=list)


def some(item: FieldType) -> Many:
    """Return the type of one value or a list of them."""
    schema = {"anyOf": [{"type": "array", "items": item.schema}, item.schema]}
    return Many(f"{item.word}, or a list of such", schema, item.textual, item, list, lone=True)


def named(item: FieldType) -> Many:
    """Return the type of mappings from names to values of one type."""
    schema = {"type": "object", "additionalProperties": item.schema}
    return Many(f"a mapping of names; each value is {item.word}", schema, False, item, dict)


@dataclass(frozen=True)
class KeySpec:
    """One key. `default` is in file notation; None means that the key is optional without a default.

    `identity`: another value makes another run. `infer_only`: not valid for a runner that trains.
    `attribute` is the dataclass field (which cannot be called `class`).
    """

    form: FieldType
    doc: str
    default: Any = None
    required: bool = False
    identity: bool = True
    infer_only: bool = False
    name: str = ""
    attribute: str = ""


def key(form: FieldType, doc: str, default: Any = None, **flags: Any) -> Any:
    """Define a field of a section; `flags` are fields of KeySpec."""
    return dataclasses.field(metadata={"key": KeySpec(form, doc, default, **flags)})


side_key = partial(key, identity=False)
"""Define a key that is not part of the identity: limits, intervals, locations, output."""


def free(doc: str) -> Any:
    """Define the field for all other keys, as a mapping that records reads."""
    return dataclasses.field(metadata={"free": doc})


@dataclass(frozen=True)
class Section(FieldType):
    """A mapping with the keys of a dataclass; `short` is the key meant by a single text, if any.

    `free` is the field for other keys (None: refused); `refused` maps keys of other systems to a suggestion.
    """

    of: type
    short: str | None
    keys: Mapping[str, KeySpec]
    free: str | None
    free_doc: str
    refused: Mapping[str, str]

    def below(self, name: str | int) -> FieldType | None:
        """Return the type of a key."""
        spec = self.keys.get(str(name))
        return None if spec is None else spec.form

    def take(self, value: Any, at: At) -> Any:
        """Build the dataclass, reporting problems of all keys; WRONG if it cannot be built."""
        if isinstance(value, str) and self.short is not None:
            return self._made({self.short: self.keys[self.short].form.take(value, at)}, {}, at)
        if not isinstance(value, dict):
            return at.wrong(f"expected {self.word}, not {described(value)}")
        broken = at.reading.tree.broken
        made: dict[str, Any] = {}
        for name, one in value.items():
            inner = at.inner(name)
            if name in self.refused and name not in self.keys:
                if one not in (None, "", []):
                    at.reading.wrong(inner.where, f"not supported: {self.refused[name]}", key=True)
            elif name not in self.keys:
                if self.free is None:
                    message, near = f"unknown key; {hint(name, self.keys)}", nearest(name, self.keys)
                    at.reading.wrong(inner.where, message, near, key=True)
            elif one is not None or inner.where in broken:
                made[name] = inner.taken(self.keys[name].form, one)
        missing = [f"`{one.name}`" for one in self.keys.values() if one.required and one.name not in made]
        if missing and at.where not in broken:
            at.wrong(f"{' and '.join(missing)} missing")
        return self._made(made, value, at)

    def normal(self, value: Any) -> Any:
        """Return a mapping with the keys in schema order, then others, without empty ones."""
        if isinstance(value, str):
            value = {self.short: value}
        names = [name for name in self.keys if value.get(name) is not None]
        given = {name: self.keys[name].form.normal(value[name]) for name in names}
        known = {name: one for name, one in given.items() if one is not None}
        own = {**self.keys, **self.refused}
        return known | {name: one for name, one in value.items() if name not in own}

    def _made(self, made: Mapping[str, Any], given: Mapping[str, Any], at: At) -> Any:
        """Build the object, with defaults for missing keys."""
        fields: dict[str, Any] = {}
        for one in self.keys.values():
            value = made.get(one.name)
            if value is None and one.default is not None:
                value = one.form.take(one.default, at.inner(one.name))
            fields[one.attribute] = value
        if self.free is not None:
            extra = {name: one for name, one in given.items() if name not in self.keys}
            fields[self.free] = Tracked(extra, at.where, at.reading)
        return self.of(**fields)


@cache
def section(of: type, short: str | None = None) -> Section:
    """Return the type of mappings with the keys of a dataclass, or of a text, which is the key `short`."""
    keys: dict[str, KeySpec] = {}
    free, free_doc = None, ""
    for one in dataclasses.fields(of):
        if (spec := one.metadata.get("key")) is None:
            free, free_doc = one.name, one.metadata["free"]
        else:
            name = spec.name or one.name
            keys[name] = dataclasses.replace(spec, name=name, attribute=one.name)
    word = "a mapping"
    schema: Json = {"$ref": f"#/$defs/{of.__name__.removesuffix('Section')}"}
    if short is not None:
        word, schema = f"a mapping, or its `{short}` alone", {"anyOf": [schema, A_TEXT]}
    refused = getattr(of, "REFUSED", {})
    return Section(word, schema, short is not None, of, short, keys, free, free_doc, refused)


def described(value: Any) -> str:
    """Describe a value in YAML terms."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return f"the truth value {str(value).lower()}"
    if isinstance(value, (int, float)):
        return f"the number {short(value)}"
    if isinstance(value, str):
        return f"the text {short(value)}" if value else "an empty text"
    if isinstance(value, dict) and list(value) == ["workspace"] and value["workspace"] is None:
        return 'a mapping: put "{workspace}" in quotes'
    return "a mapping" if isinstance(value, dict) else "a list"
