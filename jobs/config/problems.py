"""What is wrong with a configuration: all of it in one report, each with its place and its line."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from torchrelay.errors import UsageError
from torchrelay.jobs.yaml_text import Place
from torchrelay.records import dataclass

_WIDTH = 100
"""Columns of a source line that are shown; of longer ones the part around the place."""


@dataclass(frozen=True)
class Source:
    """A text that was read: a file by its name, or `command line`, whose lines are the overrides."""

    name: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Origin:
    """Where a value or a key stands."""

    source: Source
    place: Place

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

    origin: Origin
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
        number = str(self.origin.place.line)
        return [str(self), f"  {number} | {text}", f"  {' ' * len(number)} | {_blank(text[:before])}^"]

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


def dotted(names: Sequence[str | int], names_of: Mapping[tuple[str | int, ...], str] | None = None) -> str:
    """`runner.train1.epochs`: items of a list by their names where they have some, else by their index."""
    known = names_of or {}
    return ".".join(known.get(tuple(names[: at + 1]), str(one)) for at, one in enumerate(names))


def _order(problem: ConfigProblem) -> tuple[bool, Place, str]:
    return problem.origin.source.name == COMMAND_LINE, problem.origin.place, problem.message


COMMAND_LINE = "command line"
"""The source of overrides; its problems come last."""


def _window(text: str, at: int) -> tuple[str, int]:
    """A part of `text` of at most _WIDTH characters around `at`, and where `at` is in it."""
    at = min(at, len(text))
    begin = 0 if len(text) <= _WIDTH else max(0, min(at - _WIDTH // 2, len(text) - _WIDTH))
    return text[begin : begin + _WIDTH].rstrip(), at - begin


def _blank(text: str) -> str:
    """As wide as `text` on a terminal."""
    wide = ("\t" if c == "\t" else " " * (1 + (unicodedata.east_asian_width(c) in "WF")) for c in text)
    return "".join(wide)
