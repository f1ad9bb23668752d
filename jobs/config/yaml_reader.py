"""Read an unambiguous subset of YAML 1.2 with the location of every value, and write it.

- Scalars follow the core schema of YAML 1.2.2: `on`, `no`, `1:30` and `2026-01-02` are strings and `1e-3` is
  a number, unlike in PyYAML's default schema (YAML 1.1).
- Refused, with line and column: numbers that other readers read differently (`010`, `0x1F`, `1_000`), `.nan`,
  `.inf` and `1e999`, aliases and anchors (which can expand to billions of values), merge keys, tags,
  duplicate keys, and several documents.
- PyYAML provides only the events: its `compose` recurses in C, so that 200 kB of `[` crash the process, and
  drops unused anchors.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import field
from pathlib import Path
from typing import Any, NoReturn

import yaml

from torchrelay.errors import UsageError
from torchrelay.records import dataclass

LIMIT_DIGITS = 300

_WORDS: Mapping[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NO_NUMBER = re.compile(
    r"[-+]?(0[0-9_]+|0[xo][0-9a-fA-F_]+|[0-9][0-9_]*_[0-9_]*|\.(inf|Inf|INF)|\.(nan|NaN|NAN))"
)


@dataclass(frozen=True)
class NotOne:
    """An ambiguous scalar; `message` has the reason and a suggestion."""

    message: str


def plain(text: str) -> bool | int | float | str | NotOne | None:
    """Return the value of a plain scalar."""
    if text in _WORDS:
        return _WORDS[text]
    if _NO_NUMBER.fullmatch(text):
        return NotOne(f"{short(text)} is ambiguous in YAML: write a plain decimal number, or quote it")
    if not _FLOAT.fullmatch(text):
        return text
    if len(text) > LIMIT_DIGITS:
        return NotOne(f"a number of {len(text)} characters")
    if _INTEGER.fullmatch(text):
        return int(text)
    value = float(text)
    return value if math.isfinite(value) else NotOne(f"{short(text)} is out of range for a float")


def short(value: object) -> str:
    """Shorten a value for a message, on one line."""
    text = repr(value) if isinstance(value, str) else str(value).partition("\n")[0]
    return text if len(text) <= 60 else f"{text[:57]}..."


LIMIT_BYTES = 1 << 20
LIMIT_DEPTH = 32
LIMIT_VALUES = 10_000
NO_MAPPING = "a mapping (`key: value` lines) is expected at the top"
_BEGUN = {
    "could not find expected ':'": "no `key: value`: put a colon and a space after the key",
    "found unexpected end of stream": "the quote that begins here is not closed",
}
WITH_REMEDY = ("not valid UTF-8", "a second document", "more than ", *_BEGUN.values())
"""Parts of messages that already contain a suggestion."""

Where = tuple[str | int, ...]
"""Location in a document: keys and indices from the top."""


@dataclass(frozen=True, order=True)
class TextPosition:
    """A position in a text; line and column count from 1."""

    line: int
    column: int


@dataclass(frozen=True, order=True)
class Problem:
    """A problem at a location."""

    place: TextPosition
    message: str


class YamlError(UsageError):
    """Invalid or unsupported YAML; `problems` has all problems in order."""

    def __init__(self, name: str, problems: list[Problem]) -> None:
        self.problems = tuple(sorted(problems))
        lines = (f"{name}:{one.place.line}:{one.place.column}: {one.message}" for one in self.problems)
        super().__init__("\n".join(lines))


def read_yaml_file(path: str | os.PathLike[str]) -> ParseResult:
    """Read a regular file of at most 1 MiB; raises UsageError with the file and the reason."""
    return read_yaml(yaml_content(path), str(Path(path)))


def yaml_content(path: str | os.PathLike[str]) -> bytes:
    """Return the bytes of a regular file, up to one above the limit; UsageError has file and reason."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ValueError("not a regular file")
            return file.read(LIMIT_BYTES + 1)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"{path or repr('')}: cannot be read ({why}): expected a YAML file") from None


@dataclass(frozen=True)
class ParseResult:
    """Result of a reading: the value, the location of every value and key, and the problems.

    `broken` values are invalid; `ended` is the location of the problem that ended the reading, if any.
    """

    value: Any
    values: Mapping[Where, TextPosition]
    keys: Mapping[Where, TextPosition]
    problems: tuple[Problem, ...]
    broken: frozenset[Where]
    ended: TextPosition | None = None


def read_yaml(data: bytes, name: str) -> ParseResult:
    """Read a document that is a mapping, called `name` in messages; raises YamlError with all problems."""
    found = read_findings(data)
    problems = list(found.problems)
    if not problems and not isinstance(found.value, dict):
        problems.append(Problem(TextPosition(1, 1), NO_MAPPING))
    if problems:
        raise YamlError(name, problems)
    return found


def read_findings(data: bytes) -> ParseResult:
    """Read as much as possible, with any value at the top, without raising."""
    reading = _Reading()
    if len(data) > LIMIT_BYTES:
        reading.end(TextPosition(1, 1), f"larger than {LIMIT_BYTES >> 20} MiB, the limit")
    else:
        try:
            reading.events = yaml.parse(data.decode("utf-8"), Loader=_LOADER)
            reading.read()
        except UnicodeDecodeError as error:
            reading.end(
                _place_of(data, error.start), f"byte {error.start} is not valid UTF-8: save the file as UTF-8"
            )
        except yaml.MarkedYAMLError as error:
            mark, message = error.problem_mark or error.context_mark, str(error.problem or error.context)
            if message in _BEGUN and error.context_mark is not None:  # the problem is where it began
                mark, message = error.context_mark, _BEGUN[message]
            reading.end(_of_mark(mark) if mark else TextPosition(1, 1), message)
        except yaml.YAMLError as error:  # a character that YAML does not allow
            at = getattr(error, "position", 0)
            reading.end(_place_of(data, at), f"character {at} is not allowed in YAML: {short(error)}")
    problems = tuple(sorted(reading.problems))
    broken = frozenset(reading.broken)
    return ParseResult(reading.top, reading.values, reading.keys, problems, broken, reading.ended)


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _EndError(Exception):
    """Raised to end the reading."""


_DROPPED = -1
"""Placeholder for a rejected key, whose value is dropped."""


@dataclass
class _Reading:
    """One pass over the events of a text, with a limit on depth."""

    events: Iterator[yaml.Event] = iter(())
    problems: list[Problem] = field(default_factory=list)
    values: dict[Where, TextPosition] = field(default_factory=dict)
    keys: dict[Where, TextPosition] = field(default_factory=dict)
    broken: set[Where] = field(default_factory=set)
    ended: TextPosition | None = None
    top: Any = None
    _count: int = 0

    def end(self, place: TextPosition, message: str) -> None:
        """Report the problem that ends the reading."""
        self._wrong(place, message)
        self.ended = place

    def read(self) -> None:
        """Build the document; problems are collected."""
        with suppress(_EndError):
            for event in self.events:
                if isinstance(event, yaml.NodeEvent):
                    self._value(event, (), None)
                elif isinstance(event, yaml.DocumentStartEvent) and () in self.values:
                    why = "a second document begins, but a file has one: remove the second `---`"
                    self._give_up(_of_mark(event.start_mark), why)

    def _wrong(self, place: TextPosition, message: str, where: Where | None = None) -> None:
        self.problems.append(Problem(place, message))
        if where is not None:
            self.broken.add(where)

    def _give_up(self, place: TextPosition, message: str) -> NoReturn:
        self.end(place, message)
        raise _EndError

    def _value(self, event: yaml.Event, where: Where, into: Any) -> None:
        """Read a value and everything below it, after adding it to the collection around it."""
        place = self._begun(event, where)
        value: Any = None
        if isinstance(event, yaml.ScalarEvent):
            value = plain(event.value) if event.implicit[0] else event.value
            if isinstance(value, NotOne):
                self._wrong(place, value.message, where)
                value = None
        elif isinstance(event, yaml.CollectionStartEvent):
            value = {} if isinstance(event, yaml.MappingStartEvent) else []
        self.values[where] = place
        if not where:
            self.top = value
        elif isinstance(into, list):
            into.append(value)
        elif where[-1] != _DROPPED:
            into[where[-1]] = value
        if isinstance(value, list):
            for number, inner in enumerate(self._until_its_end()):
                self._value(inner, (*where, number), value)
        elif isinstance(value, dict):
            for inner in self._until_its_end():
                key = self._key(inner, where, value)
                self._value(next(self.events), (*where, key), value)

    def _until_its_end(self) -> Iterator[yaml.Event]:
        while not isinstance(event := next(self.events), yaml.CollectionEndEvent):
            yield event

    def _begun(self, event: Any, where: Where) -> TextPosition:
        """Return the position of a node after checking the limits; reports unsupported features."""
        place = _of_mark(event.start_mark)
        if isinstance(event, yaml.AliasEvent):
            self._wrong(place, f"aliases (*{event.anchor}) are not supported: write the value out", where)
            return place
        self._count += 1
        if self._count > LIMIT_VALUES:
            self._give_up(place, f"more than {LIMIT_VALUES} values")
        if event.anchor is not None:
            self._wrong(place, f"anchors (&{event.anchor}) are not supported: write the value out")
        if (tag := getattr(event, "tag", None)) not in (None, "!"):
            self._wrong(place, f"tags ({tag}) are not allowed")
        if isinstance(event, yaml.CollectionStartEvent) and len(where) >= LIMIT_DEPTH:
            self._give_up(place, f"nested deeper than {LIMIT_DEPTH} levels")
        return place

    def _key(self, event: Any, around: Where, into: Mapping[str, Any]) -> str | int:
        """Return the key of the value that follows; _DROPPED after a reported problem."""
        place = self._begun(event, (*around, _DROPPED))
        if isinstance(event, yaml.CollectionStartEvent):
            self._give_up(place, "a key is a mapping or a list: expected a word")
        key = getattr(event, "value", None)
        if key is None:  # an alias
            return _DROPPED
        if key == "<<" and event.implicit[0]:
            self._wrong(place, "merge keys (<<) are not supported: write the keys out")
        elif key in into:
            line = self.keys[(*around, key)].line
            self._wrong(place, f"{short(key)} is given twice in one mapping, first in line {line}")
        else:
            self.keys[(*around, key)] = place
            return str(key)
        return _DROPPED


def _of_mark(mark: Any) -> TextPosition:
    return TextPosition(mark.line + 1, mark.column + 1)


def _place_of(data: bytes, offset: int) -> TextPosition:
    """Return the line and column of a byte."""
    before = data[:offset]
    return TextPosition(before.count(b"\n") + 1, offset - (before.rfind(b"\n") + 1) + 1)


_BARE = re.compile(r"[A-Za-z_/][A-Za-z0-9_./+-]*")
_ELSEWHERE = re.compile(r"(?i)y|n|yes|no|on|off")
"""Words that are booleans in YAML 1.1."""
_LONG_KEY = 100
"""Longest plain key in characters; YAML reads at most 1024, longer keys are written with `?`."""
Note = Callable[[Where], str]


def yaml_lines(value: Mapping[str, Any], note: Note | None = None) -> Iterator[str]:
    """Write block YAML; `note` returns the comment of a value."""
    for line, where in _of_mapping(value, (), ""):
        comment = note(where) if note is not None and where is not None else ""
        yield f"{line}  # {comment}" if comment else line


_Lines = Iterator[tuple[str, Where | None]]


def _of_mapping(value: Mapping[str, Any], where: Where, indent: str) -> _Lines:
    for name, one in value.items():
        key = scalar(name)
        if len(key) > _LONG_KEY:
            yield f"{indent}? {key}", None
            yield from _after(f"{indent}:", one, (*where, name), indent)
        else:
            yield from _after(f"{indent}{key}:", one, (*where, name), indent)


def _of_list(value: list[Any], where: Where, indent: str) -> _Lines:
    for at, one in enumerate(value):
        if isinstance(one, dict) and one:
            begin = "- "
            for line, place in _of_mapping(one, (*where, at), indent + "  "):
                yield indent + begin + line[len(indent) + 2 :], place
                begin = "  "
        else:
            yield from _after(f"{indent}-", one, (*where, at), indent)


def _after(head: str, value: Any, where: Where, indent: str) -> _Lines:
    if isinstance(value, dict) and value:
        yield head, None
        yield from _of_mapping(value, where, indent + "  ")
    elif isinstance(value, list) and value:
        yield head, None
        yield from _of_list(value, where, indent + "  ")
    else:
        yield f"{head} {scalar(value)}", where


def scalar(value: Any) -> str:
    """Write a scalar on one line, so that YAML 1.1 and 1.2 read the same value."""
    if isinstance(value, (dict, list)):
        return "{}" if isinstance(value, dict) else "[]"
    if isinstance(value, str):
        bare = _BARE.fullmatch(value) and plain(value) == value and not _ELSEWHERE.fullmatch(value)
        quoted = value if bare else json.dumps(value, ensure_ascii=False)
        return "".join(one if one.isprintable() else _escaped(ord(one)) for one in quoted)
    if isinstance(value, float):  # with a point: in YAML 1.1 `1e-05` is a string
        mantissa, exponent, power = repr(value).partition("e")
        return f"{mantissa if '.' in mantissa else f'{mantissa}.0'}{exponent}{power}"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _escaped(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
