"""Types of values and keys: what a value may be, how it is checked and described."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import cache
from pathlib import Path
from typing import Any

from torchrelay.jobs.config.tree import ConfigProblem, Tree, hint, nearest
from torchrelay.jobs.config.yaml_reader import Where, short
from torchrelay.jobs.runtime import seconds_in
from torchrelay.records import dataclass

Json = dict[str, Any]
WRONG: Any = object()
"""In place of a value that was complained of."""
EXPRESSION = {"$ref": "#/$defs/expression"}
"""Where a number is expected a text may stand that becomes one: `${env:EPOCHS,3}`."""


@dataclass(frozen=True)
class Reading:
    """One reading of a tree: what it found wrong, the workspace of its paths, which free keys were read.

    `source` is where classes lie that the workspace has, if not there: an archive that was unpacked.
    """

    tree: Tree
    workspace: Path
    problems: list[ConfigProblem] = field(default_factory=list)
    reads: set[Where] = field(default_factory=set)
    misses: dict[Where, None] = field(default_factory=dict)
    source: Path | None = None

    def wrong(self, where: Where, message: str, near: str | None = None, *, key: bool = False) -> Any:
        """Complain of a value, or of its key; returns WRONG."""
        origin = self.tree.key_origin(where) if key else self.tree.origin(where)
        self.problems.append(ConfigProblem(origin, self.tree.path(where), message, near))
        return WRONG


@dataclass(frozen=True)
class At:
    """A place of the tree that is being read."""

    reading: Reading
    where: Where = ()

    def inner(self, key: str | int) -> At:
        """The place below."""
        return At(self.reading, (*self.where, key))

    def wrong(self, message: str, near: str | None = None) -> Any:
        """Complain of the value here; returns WRONG."""
        return self.reading.wrong(self.where, message, near)

    def expected(self, form: Form, value: Any) -> Any:
        """Complain that the value here is not of a form; returns WRONG."""
        return self.wrong(f"expected {form.word}, not {described(value)}")


class Form:
    """What a value may be. `textual`: the content of an environment variable stays a text here."""

    textual = False

    @property
    def word(self) -> str:
        """What it is, for messages and the table of keys."""
        raise NotImplementedError

    def take(self, value: Any, at: At) -> Any:
        """Check a value that is not null and build what programs get; WRONG after a complaint."""
        raise NotImplementedError

    def normal(self, value: Any) -> Any:
        """One way of writing what may be written in several; the value is a right one."""
        return value

    def json_schema(self) -> Json:
        """As JSON Schema."""
        raise NotImplementedError


@dataclass(frozen=True)
class Truth(Form):
    """true or false."""

    word = "true or false"

    def take(self, value: Any, at: At) -> Any:
        """A truth value; numbers and words are none."""
        return value if isinstance(value, bool) else at.expected(self, value)

    def json_schema(self) -> Json:
        """As JSON Schema."""
        return {"anyOf": [{"type": "boolean"}, EXPRESSION]}


@dataclass(frozen=True)
class Whole(Form):
    """A whole number from `least` to `most`. `unset` is a number that older files write for "not set"."""

    least: int = 0
    unset: int | None = None
    most: int | None = None

    @property
    def word(self) -> str:
        """With its limits."""
        if self.least == self.most:
            return str(self.least)
        end = "" if self.most is None else f" to {self.most}"
        unset = "" if self.unset is None else f" ({self.unset}: not set)"
        return f"a whole number from {self.least}{end}{unset}"

    def take(self, value: Any, at: At) -> Any:
        """An int; 1.0 is none. The number for "not set" becomes None."""
        if type(value) is int and value == self.unset:
            return None
        fits = type(value) is int and value >= self.least and (self.most is None or value <= self.most)
        return value if fits else at.expected(self, value)

    def normal(self, value: Any) -> Any:
        """Not set is null."""
        return None if value == self.unset else value

    def json_schema(self) -> Json:
        """As JSON Schema."""
        allowed: Json = {"type": "integer", "minimum": self.least}
        if self.most is not None:
            allowed["maximum"] = self.most
        unset = [] if self.unset is None else [{"const": self.unset}]
        return {"anyOf": [allowed, *unset, EXPRESSION]}


@dataclass(frozen=True)
class Number(Form):
    """A number above `above`, or from `least`."""

    above: float | None = None
    least: float | None = None

    @property
    def word(self) -> str:
        """With its limit."""
        if self.above is not None:
            return f"a number above {self.above:g}"
        return "a number" if self.least is None else f"a number from {self.least:g}"

    def take(self, value: Any, at: At) -> Any:
        """A float; whole numbers are numbers, too."""
        fits = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not fits or (self.above is not None and value <= self.above):
            return at.expected(self, value)
        return at.expected(self, value) if self.least is not None and value < self.least else float(value)

    def normal(self, value: Any) -> Any:
        """1 is 1.0."""
        return float(value)

    def json_schema(self) -> Json:
        """As JSON Schema."""
        allowed: Json = {"type": "number"}
        if self.above is not None:
            allowed["exclusiveMinimum"] = self.above
        if self.least is not None:
            allowed["minimum"] = self.least
        return {"anyOf": [allowed, EXPRESSION]}


@dataclass(frozen=True)
class Text(Form):
    """A text that is not empty; `what` says what it is for."""

    what: str = "a text"
    textual = True

    @property
    def word(self) -> str:
        """What it is for."""
        return self.what

    def take(self, value: Any, at: At) -> Any:
        """A str; a number or a truth value is told to be put in quotes."""
        if isinstance(value, str) and value:
            return value
        if isinstance(value, (bool, int, float)):
            return at.wrong(f"expected {self.word}, not {described(value)}: put it in quotes")
        return at.expected(self, value)

    def json_schema(self) -> Json:
        """As JSON Schema."""
        return {"type": "string", "minLength": 1}


@dataclass(frozen=True)
class RunName(Text):
    """A name that becomes a directory: below the one it is put into, and not hidden."""

    def take(self, value: Any, at: At) -> Any:
        """A str without parts such as `..`."""
        found = super().take(value, at)
        if isinstance(found, str) and any(part[:1] in ("", ".") for part in found.split("/")):
            return at.wrong(f"{found!r:.60} becomes a directory: no `..`, no `/` at an end, no dot in front")
        return found


@dataclass(frozen=True)
class OneOf(Form):
    """One of some words; `refused` are words of others, each with what to write instead."""

    words: Sequence[str]
    refused: Mapping[str, str] = field(default_factory=dict)
    textual = True

    @property
    def word(self) -> str:
        """The words."""
        return "one of " + ", ".join(f"`{word}`" for word in self.words)

    def take(self, value: Any, at: At) -> Any:
        """A word of the list."""
        if isinstance(value, str) and value in self.words:
            return value
        if isinstance(value, str) and value in self.refused:
            return at.wrong(f"`{value}` is not supported: {self.refused[value]}")
        if not isinstance(value, str):
            return at.expected(self, value)
        return at.wrong(f"unknown word {short(value)}; {hint(value, self.words)}", nearest(value, self.words))

    def json_schema(self) -> Json:
        """As JSON Schema."""
        return {"anyOf": [{"enum": list(self.words)}, EXPRESSION]}


@dataclass(frozen=True)
class Seconds(Form):
    """A length of time above zero."""

    word = "seconds, or a text such as `1h30m` or `01:30:00`"
    textual = True

    def take(self, value: Any, at: At) -> Any:
        """Seconds as a float."""
        found = seconds_in(value)
        fits = found is not None and math.isfinite(found) and found > 0
        return found if fits else at.expected(self, value)

    def normal(self, value: Any) -> Any:
        """In seconds."""
        return seconds_in(value)

    def json_schema(self) -> Json:
        """As JSON Schema."""
        return {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "string", "minLength": 1}]}


@dataclass(frozen=True)
class ListOf(Form):
    """A list of one form; where `lone`, a single one may stand without the list. Becomes a tuple."""

    item: Form
    lone: bool = False

    @property
    def textual(self) -> bool:  # type: ignore[override]
        """Of a lone one."""
        return self.lone and self.item.textual

    @property
    def word(self) -> str:
        """With its items."""
        return f"{self.item.word}, or a list of such" if self.lone else f"a list (each item {self.item.word})"

    def take(self, value: Any, at: At) -> Any:
        """All items; each wrong one is complained of."""
        if not isinstance(value, list):
            if self.lone:
                return (self.item.take(value, at),)
            dash = ": begin each item with `- `" if isinstance(value, dict) else ""
            return at.wrong(f"expected {self.word}, not {described(value)}{dash}")
        return tuple(self._item(one, at.inner(index)) for index, one in enumerate(value))

    def _item(self, value: Any, at: At) -> Any:
        if at.where in at.reading.tree.broken:
            return WRONG
        return self.item.take(value, at)

    def normal(self, value: Any) -> Any:
        """As a list."""
        return [self.item.normal(one) for one in (value if isinstance(value, list) else [value])]

    def json_schema(self) -> Json:
        """As JSON Schema."""
        items: Json = {"type": "array", "items": self.item.json_schema()}
        return {"anyOf": [items, self.item.json_schema()]} if self.lone else items


@dataclass(frozen=True)
class TextMap(Form):
    """A mapping from texts to texts."""

    word = "a mapping of texts to texts"

    def take(self, value: Any, at: At) -> Any:
        """A dict of its own."""
        if not isinstance(value, dict):
            return at.expected(self, value)
        for name, text in value.items():
            if not isinstance(text, str):
                at.inner(name).wrong(f"expected a text, not {described(text)}")
        return dict(value)

    def json_schema(self) -> Json:
        """As JSON Schema."""
        return {"type": "object", "additionalProperties": {"type": "string"}}


def described(value: Any) -> str:
    """What a value is, in words of YAML."""
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


_METADATA = "torchrelay"
_FREE = "free"


@dataclass(frozen=True)
class KeySpec:
    """One key. `default` is written as in a file; None: the key may be missing and means nothing then.

    `identity`: another value makes it another run. `infer_only`: has no meaning for a runner that trains.
    """

    name: str
    attribute: str
    form: Form
    doc: str
    default: Any
    required: bool
    identity: bool
    infer_only: bool


def key(
    form: Form,
    doc: str,
    *,
    default: Any = None,
    required: bool = False,
    identity: bool = True,
    infer_only: bool = False,
    name: str | None = None,
) -> Any:
    """A field of a section. `name` is the key in files where a field cannot have it (`class`)."""
    spec = KeySpec(name or "", "", form, doc, default, required, identity, infer_only)
    return dataclasses.field(metadata={_METADATA: spec})


def free(doc: str) -> Any:
    """The field that takes every key which the section does not know, as a mapping that notes reads."""
    return dataclasses.field(metadata={_METADATA: _FREE, "doc": doc})


@dataclass(frozen=True)
class SectionSpec:
    """The keys of a section, and what becomes of others: `free` is the field that takes them, None refuses.

    `refused` are keys of others, each with what to write instead.
    """

    keys: Mapping[str, KeySpec]
    free: str | None
    free_doc: str
    refused: Mapping[str, str]


@cache
def section_spec(section: type) -> SectionSpec:
    """The keys of a dataclass whose fields were made by `key` and `free`."""
    keys: dict[str, KeySpec] = {}
    takes, doc = None, ""
    for one in dataclasses.fields(section):
        said = one.metadata[_METADATA]
        if said == _FREE:
            takes, doc = one.name, one.metadata["doc"]
        else:
            spec = dataclasses.replace(said, name=said.name or one.name, attribute=one.name)
            keys[spec.name] = spec
    return SectionSpec(keys, takes, doc, getattr(section, "REFUSED", {}))
