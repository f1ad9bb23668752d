"""A configuration between text and meaning: nested values with their places, and all problems."""

from __future__ import annotations

import copy
import difflib
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torchrelay.errors import UsageError
from torchrelay.jobs.config.yaml_reader import (
    NO_MAPPING,
    TOLD_WITH_REMEDY,
    ParseResult,
    Problem,
    TextPosition,
    Where,
    read_findings,
)
from torchrelay.records import dataclass

if TYPE_CHECKING:
    from torchrelay.jobs.config.types import Reading


_WIDTH = 100
"""Columns of a source line that are shown; of longer ones the part around the place."""


@dataclass(frozen=True)
class SourceText:
    """A text that was read: a file by its name, or `command line`, whose lines are the overrides."""

    name: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class SourceSpan:
    """Where a value or a key stands."""

    source: SourceText
    place: TextPosition

    def __str__(self) -> str:
        return f"{self.source.name}:{self.place.line}:{self.place.column}"

    @property
    def text(self) -> str:
        """The line of the source; empty where the source has none such."""
        lines = self.source.lines
        return lines[self.place.line - 1] if self.place.line <= len(lines) else ""


@dataclass(frozen=True)
class ConfigProblem:
    """One thing that is wrong. `path` is the dotted path of the key; `nearest` what was probably meant."""

    origin: SourceSpan
    path: str
    message: str
    nearest: str | None = None

    def __str__(self) -> str:
        about = f"{self.path}: " if self.path else ""
        return f"{self.origin}: {about}{self.message}"

    def lines(self) -> list[str]:
        """The message, the source line, and a caret below the place."""
        text, before = _window(self.origin.text, self.origin.place.column - 1)
        if not text.strip():
            return [str(self)]
        number, wide = str(self.origin.place.line), unicodedata.east_asian_width
        blank = "".join("\t" if c == "\t" else " " * (1 + (wide(c) in "WF")) for c in text[:before])
        return [str(self), f"  {number} | {text}", f"  {' ' * len(number)} | {blank}^"]

    def json(self) -> dict[str, Any]:
        """As an object of `config check --json`."""
        place = self.origin.place
        return {
            "source": self.origin.source.name,
            "line": place.line,
            "column": place.column,
            "path": self.path,
            "message": self.message,
            "nearest": self.nearest,
        }


class ConfigError(UsageError):
    """A configuration that cannot be; `problems` has everything that was found, in the order of the text.

    `outcome` ends the report: what did not happen because of them.
    """

    def __init__(self, problems: Sequence[ConfigProblem], outcome: str = "nothing was started") -> None:
        self._outcome = outcome
        self.problems = tuple(sorted(problems, key=_order))
        super().__init__("\n".join(self.report()))

    def report(self) -> list[str]:
        """All problems as lines for people, and how many there are."""
        count = len(self.problems)
        lines = [line for problem in self.problems for line in problem.lines()]
        return [*lines, f"{count} problem{'s' if count > 1 else ''}; {self._outcome}"]


class ConfigKeyError(UsageError, KeyError):
    """A program asks for a key that is not there; the message has the place and the remedy."""

    def __str__(self) -> str:
        return str(self.args[0])


def _order(problem: ConfigProblem) -> tuple[bool, TextPosition, str]:
    return problem.origin.source.name == COMMAND_LINE, problem.origin.place, problem.message


COMMAND_LINE = "command line"
"""The source of overrides; its problems come last."""


def _window(text: str, at: int) -> tuple[str, int]:
    """A part of `text` of at most _WIDTH characters around `at`, and where `at` is in it."""
    at = min(at, len(text))
    begin = 0 if len(text) <= _WIDTH else max(0, min(at - _WIDTH // 2, len(text) - _WIDTH))
    return text[begin : begin + _WIDTH].rstrip(), at - begin


_DIGITS = re.compile(r"0|[1-9][0-9]{0,8}")


@dataclass(frozen=True)
class ConfigTree:
    """`value` is nested mappings and lists; `origins` of values, `keys` of keys; nobody changes any of them.

    What lies at a `broken` place was complained of and means nothing.
    """

    value: dict[str, Any]
    origins: Mapping[Where, SourceSpan]
    keys: Mapping[Where, SourceSpan]
    broken: frozenset[Where] = frozenset()

    def origin(self, where: Where) -> SourceSpan:
        """Where a value stands; of one that stands nowhere, where the nearest thing around it does."""
        while where not in self.origins:
            where = where[:-1]
        return self.origins[where]

    def key_origin(self, where: Where) -> SourceSpan:
        """Where the key of a value stands, else the value."""
        return self.keys.get(where) or self.origin(where)

    def path(self, where: Where) -> str:
        """The dotted path that people write: items of lists by their names."""
        return path_of(self.value, where)


@dataclass(frozen=True)
class Missing:
    """A dotted path leads no further than `where`; `rest` is what is left of it, `known` what would go on."""

    where: Where
    rest: tuple[str, ...]
    known: tuple[str, ...]
    leaf: bool
    """Whether what lies at `where` is no collection."""


def find(top: Any, path: str) -> Where | Missing:
    """Where a dotted path leads. Items of lists go by name, else by index; keys may have dots themselves."""
    where: Where = ()
    here, rest = top, tuple(path.split("."))
    while rest:
        step = _step(here, rest)
        if step is None:
            return Missing(where, rest, _known(here), not isinstance(here, (dict, list)))
        at, used = step
        here, where, rest = here[at], (*where, at), rest[used:]
    return where


def value_at(top: Any, where: Where) -> Any:
    """What lies there."""
    for one in where:
        top = top[one]
    return top


def with_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """Nested dicts and lists, in which every other value is changed."""
    if isinstance(value, dict):
        return {name: with_leaves(one, change) for name, one in value.items()}
    return [with_leaves(one, change) for one in value] if isinstance(value, list) else change(value)


def path_of(top: Any, where: Where) -> str:
    """`runner.train1.epochs`: items of a list by their names where they have some, else by their index."""
    words = []
    for one in where:
        try:
            top = top[one]
        except (LookupError, TypeError):
            top = None
        name = item_name(top) if isinstance(one, int) else None
        words.append(str(one) if name is None else name)
    return ".".join(words)


def item_name(item: Any) -> str | None:
    """The `name` of a list item, where it has one that is a text."""
    name = item.get("name") if isinstance(item, dict) else None
    return name if isinstance(name, str) else None


def _step(here: Any, rest: tuple[str, ...]) -> tuple[str | int, int] | None:
    """The key or index that goes on, and how many words of `rest` it is; the longest name wins."""
    for used in range(len(rest), 0, -1):
        word = ".".join(rest[:used])
        if isinstance(here, dict) and word in here:
            return word, used
        if isinstance(here, list):
            named = [at for at, item in enumerate(here) if item_name(item) == word]
            if named:
                return named[0], used
            if used == 1 and _DIGITS.fullmatch(word) and int(word) < len(here):
                return int(word), used
    return None


def _known(here: Any) -> tuple[str, ...]:
    if isinstance(here, dict):
        return tuple(here)
    if isinstance(here, list):
        return tuple(item_name(item) or str(at) for at, item in enumerate(here))
    return ()


_TRIES = 4
_NEAR = 10
"""Lines above a mistake among which a quote that was not closed is looked for."""


@dataclass(frozen=True)
class Recovered:
    """`tree` is None where nothing can be told of the rest.

    `whole`: nothing was left out, so what is missing in the tree is missing in the file.
    """

    tree: ConfigTree | None
    problems: list[ConfigProblem]
    whole: bool


def recovered(data: bytes, name: str) -> Recovered:
    """Read a file. Where the syntax breaks, its line is left out and the rest is read, if that mends it."""
    source = SourceText(name, tuple(data.decode("utf-8", "replace").split("\n")))
    found, left_out = _mended(data)
    readable = isinstance(found.value, dict) and found.ended is None
    problems = [*found.problems, *left_out]
    if not readable and not problems:
        problems = [Problem(TextPosition(1, 1), NO_MAPPING)]
    told = [ConfigProblem(SourceSpan(source, one.place), "", one.message) for one in problems]
    if not readable:
        return Recovered(None, told, False)
    origins = {where: SourceSpan(source, place) for where, place in found.values.items()}
    keys = {where: SourceSpan(source, place) for where, place in found.keys.items()}
    return Recovered(ConfigTree(found.value, origins, keys, found.broken), told, not left_out)


def _mended(data: bytes) -> tuple[ParseResult, list[Problem]]:
    """What was read once the lines that break the syntax were left out, and these; else the first attempt."""
    lines = data.split(b"\n")
    first = found = _with_remedy(read_findings(data), lines)
    left_out: list[Problem] = []
    for _ in range(_TRIES):
        if found.ended is None:
            return found, left_out
        at = found.ended.line - 1
        if at >= len(lines) or not lines[at].strip():
            break  # the end of the file, or a line that was left out already
        left_out += [one for one in found.problems if one.place == found.ended]
        lines[at] = b""
        found = _with_remedy(read_findings(b"\n".join(lines)), lines)
    return (found, left_out) if found.ended is None else (first, [])


def _with_remedy(found: ParseResult, lines: Sequence[bytes]) -> ParseResult:
    """The problem that ended the reading says what to do, too, where a line can be blamed."""
    at = len(lines) if found.ended is None else found.ended.line - 1
    if at >= len(lines) or not lines[at].strip():
        return found
    remedy, first = "look at the indentation and the quotes of this line", max(0, at - _NEAR)
    odd = [first + up for up, one in enumerate(lines[first : at + 1]) if one.count(b'"') % 2]
    if odd:
        remedy = f"line {odd[0] + 1} has a quote without its other one"
    elif b"{workspace}" in lines[at]:
        remedy = 'a text that begins with a brace needs quotes, such as "{workspace}/model.py"'
    elif b"\t" in lines[at]:
        remedy = "put spaces in place of the tab"
    told = (
        replace(one, message=f"{one.message}: {remedy}")
        if one.place == found.ended and not any(text in one.message for text in TOLD_WITH_REMEDY)
        else one
        for one in found.problems
    )
    return replace(found, problems=tuple(told))


_SHOWN = 12


def nearest(given: str, names: Iterable[str]) -> str | None:
    """The one of `names` that is most like `given`, None where none is like it; letters' case aside."""
    by_lower = {name.lower(): name for name in sorted(names, reverse=True)}
    found = difflib.get_close_matches(given.lower(), list(by_lower), n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def hint(given: str, names: Iterable[str]) -> str:
    """`did you mean ...?`, else the names there are; empty where there are none."""
    known = sorted(names)
    if (best := nearest(given, known)) is not None:
        return f"did you mean `{best}`?"
    if not known:
        return ""
    more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
    return f"there is {', '.join(f'`{name}`' for name in known[:_SHOWN])}{more}"


class Tracked(Mapping[str, Any]):
    """A mapping of the configuration that cannot be changed; `[]`, `get`, `items` and `**` count as reading.

    Mappings inside are of the same kind, lists are copies. Asking whether a key is there, how many there
    are, and walking over the keys alone read nothing. `[]` raises ConfigKeyError for a key that is not there.
    """

    def __init__(self, content: Mapping[str, Any], where: Where, reading: Reading) -> None:
        self._content, self._where, self._reading = content, where, reading

    def __getitem__(self, key: str) -> Any:
        where = (*self._where, key)
        if key not in self._content:
            self._reading.misses[where] = None
            raise ConfigKeyError(self._missing(where))
        self._reading.reads.add(where)
        return self._shown(self._content[key], where)

    def __iter__(self) -> Iterator[str]:
        return iter(self._content)

    def __len__(self) -> int:
        return len(self._content)

    def __contains__(self, key: object) -> bool:
        return key in self._content

    def __repr__(self) -> str:
        return repr(dict(self._content))

    def plain(self) -> dict[str, Any]:
        """A dict of its own, dicts and lists inside; all of it counts as read."""
        self._reading.reads.update(leaves(self._content, self._where))
        return copy.deepcopy(dict(self._content))

    def unread(self) -> list[Where]:
        """The places of the values in it that were not read so far."""
        return [
            one
            for one in leaves(self._content, self._where)
            if self._content and one not in self._reading.reads
        ]

    def _shown(self, value: Any, where: Where) -> Any:
        if isinstance(value, dict):
            return Tracked(value, where, self._reading)
        if isinstance(value, list):
            self._reading.reads.add(where)
            return [self._shown(one, (*where, at)) for at, one in enumerate(value)]
        self._reading.reads.add(where)
        return value

    def _missing(self, where: Where) -> str:
        tree = self._reading.tree
        near = hint(str(where[-1]), self._content) if self._content else "the section is empty"
        return f"{tree.origin(self._where)}: {tree.path(where)} is not in the configuration; {near}"


def leaves(value: Any, where: Where) -> Iterator[Where]:
    """The places of the values that are no mappings; empty ones, and lists without mappings, are values."""
    if isinstance(value, Mapping) and value:
        for name, one in value.items():
            yield from leaves(one, (*where, name))
    elif isinstance(value, list) and any(isinstance(one, (dict, list)) for one in value):
        for at, one in enumerate(value):
            yield from leaves(one, (*where, at))
    else:
        yield where
