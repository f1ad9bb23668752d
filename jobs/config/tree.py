"""Parsed configurations before validation: nested values with their locations, and all problems."""

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
    WITH_REMEDY,
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
"""Shown width of a source line; longer lines are cut around the location."""


@dataclass(frozen=True)
class SourceText:
    """A source text: a file by name, or `command line` with an override per line."""

    name: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class SourceSpan:
    """Location of a value or a key."""

    source: SourceText
    place: TextPosition

    def __str__(self) -> str:
        return f"{self.source.name}:{self.place.line}:{self.place.column}"

    @property
    def text(self) -> str:
        """The source line; empty if it does not exist."""
        lines = self.source.lines
        return lines[self.place.line - 1] if self.place.line <= len(lines) else ""


@dataclass(frozen=True)
class ConfigProblem:
    """One problem; `path` is the dotted path of the key, `nearest` the suggested name."""

    origin: SourceSpan
    path: str
    message: str
    nearest: str | None = None

    def __str__(self) -> str:
        about = f"{self.path}: " if self.path else ""
        return f"{self.origin}: {about}{self.message}"

    def lines(self) -> list[str]:
        """Format the message, the source line, and a caret below the location."""
        whole = self.origin.text
        at = min(self.origin.place.column - 1, len(whole))
        begin = max(0, min(at - _WIDTH // 2, len(whole) - _WIDTH))
        text, before = whole[begin : begin + _WIDTH].rstrip(), at - begin
        if not text.strip():
            return [str(self)]
        number, wide = str(self.origin.place.line), unicodedata.east_asian_width
        blank = "".join("\t" if c == "\t" else " " * (1 + (wide(c) in "WF")) for c in text[:before])
        return [str(self), f"  {number} | {text}", f"  {' ' * len(number)} | {blank}^"]

    def json(self) -> dict[str, Any]:
        """Return the object of `config check --json`."""
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
    """An invalid configuration; `problems` are in the order of the text, `outcome` ends the report."""

    def __init__(self, problems: Sequence[ConfigProblem], outcome: str = "nothing was started") -> None:
        self._outcome = outcome
        by_place = sorted(problems, key=lambda one: (one.origin.place, one.message))
        self.problems = tuple(sorted(by_place, key=lambda one: one.origin.source.name == COMMAND_LINE))
        super().__init__("\n".join(self.report()))

    def report(self) -> list[str]:
        """Return all problems as text lines, with their number at the end."""
        count = len(self.problems)
        lines = [line for problem in self.problems for line in problem.lines()]
        return [*lines, f"{count} problem{'s' if count > 1 else ''}; {self._outcome}"]


class ConfigKeyError(UsageError, KeyError):
    """A program asked for a missing key; the message has the location and a suggestion."""

    def __str__(self) -> str:
        return str(self.args[0])


COMMAND_LINE = "command line"
"""Source of overrides; their problems are listed last."""


_DIGITS = re.compile(r"0|[1-9][0-9]{0,8}")


@dataclass(frozen=True)
class ConfigTree:
    """Nested mappings and lists (`value`), with the locations of values (`origins`) and `keys`.

    Values at `broken` locations have been reported and are invalid.
    """

    value: dict[str, Any]
    origins: Mapping[Where, SourceSpan]
    keys: Mapping[Where, SourceSpan]
    broken: frozenset[Where] = frozenset()

    def origin(self, where: Where) -> SourceSpan:
        """Return the location of a value, or of the innermost existing parent."""
        while where not in self.origins:
            where = where[:-1]
        return self.origins[where]

    def key_origin(self, where: Where) -> SourceSpan:
        """Return the location of the key of a value, else of the value."""
        return self.keys.get(where) or self.origin(where)

    def path(self, where: Where) -> str:
        """Return the dotted path, with items of lists by name."""
        return path_of(self.value, where)


@dataclass(frozen=True)
class Missing:
    """A path that ends early at `where`; `rest` is the remaining path, `known` the existing keys there."""

    where: Where
    rest: tuple[str, ...]
    known: tuple[str, ...]
    leaf: bool
    """True if the value at `where` is not a collection."""


def find(top: Any, path: str) -> Where | Missing:
    """Resolve a dotted path; list items by name or index, keys may contain dots."""
    where: Where = ()
    here, rest = top, tuple(path.split("."))
    while rest:
        step = _step(here, rest)
        if step is None:
            known: tuple[str, ...] = tuple(here) if isinstance(here, dict) else ()
            if isinstance(here, list):
                known = tuple(item_name(item) or str(at) for at, item in enumerate(here))
            return Missing(where, rest, known, not isinstance(here, (dict, list)))
        key, used = step
        here, where, rest = here[key], (*where, key), rest[used:]
    return where


def value_at(top: Any, where: Where) -> Any:
    """Return the value at a location."""
    for one in where:
        top = top[one]
    return top


def with_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """Map all leaves of nested dicts and lists."""
    if isinstance(value, dict):
        return {name: with_leaves(one, change) for name, one in value.items()}
    return [with_leaves(one, change) for one in value] if isinstance(value, list) else change(value)


def path_of(top: Any, where: Where) -> str:
    """Return a dotted path such as `runner.train1.epochs`, with list items by name or index."""
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
    """Return the `name` of a list item if it is a text."""
    name = item.get("name") if isinstance(item, dict) else None
    return name if isinstance(name, str) else None


def _step(here: Any, rest: tuple[str, ...]) -> tuple[str | int, int] | None:
    """Return the next key or index and how many words of `rest` it takes; the longest name wins."""
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


_ATTEMPTS = 4
_NEAR = 10
"""Lines above a syntax error that are searched for an unclosed quote."""


@dataclass(frozen=True)
class Recovered:
    """Result of a reading with error recovery; if not `whole`, lines were skipped."""

    tree: ConfigTree | None
    problems: list[ConfigProblem]
    whole: bool


def recovered(data: bytes, name: str) -> Recovered:
    """Read a file; on a syntax error skip its line and read the rest, if that helps."""
    source = SourceText(name, tuple(data.decode("utf-8", "replace").split("\n")))
    found, left_out = _without_bad_lines(data)
    readable = isinstance(found.value, dict) and found.ended is None
    problems = [*found.problems, *left_out]
    if not readable and not problems:
        problems = [Problem(TextPosition(1, 1), NO_MAPPING)]
    found_problems = [ConfigProblem(SourceSpan(source, one.place), "", one.message) for one in problems]
    if not readable:
        return Recovered(None, found_problems, False)
    origins = {where: SourceSpan(source, place) for where, place in found.values.items()}
    keys = {where: SourceSpan(source, place) for where, place in found.keys.items()}
    return Recovered(ConfigTree(found.value, origins, keys, found.broken), found_problems, not left_out)


def _without_bad_lines(data: bytes) -> tuple[ParseResult, list[Problem]]:
    """Read again without the lines that break the syntax; returns the result with the skipped lines."""
    lines = data.split(b"\n")
    first = found = _with_remedy(read_findings(data), lines)
    left_out: list[Problem] = []
    for _ in range(_ATTEMPTS):
        if found.ended is None:
            return found, left_out
        at = found.ended.line - 1
        if at >= len(lines) or not lines[at].strip():
            break  # the end of the file, or a line already skipped
        left_out += [one for one in found.problems if one.place == found.ended]
        lines[at] = b""
        found = _with_remedy(read_findings(b"\n".join(lines)), lines)
    return (found, left_out) if found.ended is None else (first, [])


def _with_remedy(found: ParseResult, lines: Sequence[bytes]) -> ParseResult:
    """Add a suggestion to the problem that ended the reading, if its line is known."""
    at = len(lines) if found.ended is None else found.ended.line - 1
    if at >= len(lines) or not lines[at].strip():
        return found
    remedy, first = "check the indentation and the quotes of this line", max(0, at - _NEAR)
    odd = [first + up for up, one in enumerate(lines[first : at + 1]) if one.count(b'"') % 2]
    if odd:
        remedy = f"line {odd[0] + 1} has a quote without its other one"
    elif b"{workspace}" in lines[at]:
        remedy = 'a text that begins with a brace needs quotes, such as "{workspace}/model.py"'
    elif b"\t" in lines[at]:
        remedy = "put spaces in place of the tab"
    problems = (
        replace(one, message=f"{one.message}: {remedy}")
        if one.place == found.ended and not any(text in one.message for text in WITH_REMEDY)
        else one
        for one in found.problems
    )
    return replace(found, problems=tuple(problems))


_SHOWN = 12


def nearest(given: str, names: Iterable[str]) -> str | None:
    """Return the name most similar to `given`, ignoring case; None if none is similar."""
    by_lower = {name.lower(): name for name in sorted(names, reverse=True)}
    found = difflib.get_close_matches(given.lower(), list(by_lower), n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def hint(given: str, names: Iterable[str]) -> str:
    """Return `did you mean ...?`, else a list of the known names; empty if there are none."""
    known = sorted(names)
    if (best := nearest(given, known)) is not None:
        return f"did you mean `{best}`?"
    if not known:
        return ""
    more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
    return f"known are {', '.join(f'`{name}`' for name in known[:_SHOWN])}{more}"


class Tracked(Mapping[str, Any]):
    """A read-only mapping of the configuration; `[]`, `get`, `items` and `**` count as reading.

    Inner mappings have the same type, lists are copies. `[]` raises ConfigKeyError for a missing key.
    """

    def __init__(self, content: Mapping[str, Any], where: Where, reading: Reading) -> None:
        self._content, self._where, self._reading = content, where, reading

    def __getitem__(self, key: str) -> Any:
        where = (*self._where, key)
        if key not in self._content:
            self._reading.misses[where] = None
            tree = self._reading.tree
            near = hint(key, self._content) if self._content else "the section is empty"
            why = f"{tree.path(where)} is not in the configuration; {near}"
            raise ConfigKeyError(f"{tree.origin(self._where)}: {why}")
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
        """Return a copy as nested dicts and lists; all of it counts as read."""
        self._reading.reads.update(leaves(self._content, self._where))
        return copy.deepcopy(dict(self._content))

    def unread(self) -> list[Where]:
        """Yield the locations of values that have not been read."""
        places = leaves(self._content, self._where) if self._content else ()
        return [one for one in places if one not in self._reading.reads]

    def _shown(self, value: Any, where: Where) -> Any:
        if isinstance(value, dict):
            return Tracked(value, where, self._reading)
        self._reading.reads.add(where)
        if isinstance(value, list):
            return [self._shown(one, (*where, at)) for at, one in enumerate(value)]
        return value


def leaves(value: Any, where: Where) -> Iterator[Where]:
    """Yield the locations of values other than mappings; empty mappings and plain lists are values."""
    if isinstance(value, Mapping) and value:
        for name, one in value.items():
            yield from leaves(one, (*where, name))
    elif isinstance(value, list) and any(isinstance(one, (dict, list)) for one in value):
        for at, one in enumerate(value):
            yield from leaves(one, (*where, at))
    else:
        yield where
