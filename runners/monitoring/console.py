"""Output of the command line (lines, tables, JSON), declaration and parsing of subcommands and arguments.

    @verb("show the metadata of a run", RUN, flag("--all", "show everything"))
    def show(chosen: argparse.Namespace, output: Output) -> int: ...

A closed reader (`| head`) is not an error: the rest is dropped, and the exit code stays the same.

Names after options are accepted too: `tag RUN --delete NAME` means the same as `tag --delete RUN NAME`.
"""

from __future__ import annotations

import argparse
import io
import json as json_module
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from torchrelay.errors import StorageError, UsageError
from torchrelay.metadata.fs import finite
from torchrelay.records import dataclass
from torchrelay.runners.monitoring.text import draws
from torchrelay.runners.monitoring.text import human_bytes as human_bytes  # noqa: PLC0414 - other commands find it here

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


_SHORT = 12
"""Columns whose words are at most this long are not folded on a terminal, so that numbers stay readable."""
_ANY_WIDTH = 1 << 20
_STYLES = {
    "proved": "green",
    "damaged": "bold red",
    "running": "green",
    "failed": "bold red",
    "interrupted": "red",
    "unreadable": "yellow",
    "unknown": "yellow",
    "quarantined": "red",
    "abandoned": "dim",
    "retired": "dim",
}


class Output:
    """Print to stdout as text or JSON; `notice` goes to stderr."""

    def __init__(self, *, json: bool = False) -> None:
        self.json = json
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is None:  # closed
                setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - as long as the process
            elif isinstance(stream, io.TextIOWrapper):  # escape what its encoding lacks
                stream.reconfigure(errors="backslashreplace")
        self._console: Console | None = None
        if not json and draws(sys.stdout):
            from rich.console import Console

            self._console = Console()  # respects NO_COLOR

    def value(self, value: Mapping[str, Any]) -> None:
        """Print one JSON object."""
        _tolerant(lambda: print(_object(value)))

    def result(self, value: Mapping[str, Any], lines: str | Iterable[str]) -> None:
        """Print the object with `--json`, else the lines."""
        if self.json:
            self.value(value)
            return
        for line in (lines,) if isinstance(lines, str) else lines:
            self.line(line)

    def line(self, text: str, style: str | None = None, *, tabs: bool = False) -> None:
        """Print one line; `style` selects a colour on terminals, `tabs` keeps tab characters."""
        console = self._console
        shown = "\t".join(map(printable, text.split("\t"))) if tabs else printable(text)
        if console is None:
            _tolerant(lambda: print(shown, flush=True))
        else:
            colour = _STYLES.get(style or "")
            _tolerant(lambda: console.print(shown, style=colour, markup=False, highlight=False))

    def table(
        self, columns: Sequence[str], rows: Sequence[Sequence[str]], *, spare: Collection[str] = ()
    ) -> None:
        """Print rows of text below the column names.

        The `spare` columns are omitted if the terminal is too narrow; a pipe gets all columns.
        """
        shown = [[printable(cell) for cell in row] for row in rows]
        if self._console is None:
            _tolerant(lambda: print("\n".join(_aligned([list(columns), *shown]))))
        else:
            console = self._console
            table = _rich_table(columns, shown)
            room = console.options.update_width(_ANY_WIDTH)
            if spare and console.measure(table, options=room).maximum > console.width:
                left = [number for number, name in enumerate(columns) if name not in spare]
                kept = [[row[one] for one in left] for row in shown]
                table = _rich_table([columns[one] for one in left], kept)
            _tolerant(lambda: console.print(table))

    @property
    def rich(self) -> bool:
        """True if stdout is a terminal."""
        return self._console is not None

    def renderable(self, columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str]) -> Any:
        """Return a table with notes below it, for a view that is redrawn repeatedly."""
        from rich.console import Group
        from rich.text import Text

        shown = [[printable(cell) for cell in row] for row in rows]
        return Group(_rich_table(columns, shown), *(Text(printable(note)) for note in notes))

    def notice(self, text: str) -> None:
        """Print a message for the user on stderr."""
        sys.stderr.write(f"torchrelay: {printable(by_url(text))}\n")

    def notices(self, texts: Iterable[str]) -> None:
        """Print messages for the user on stderr."""
        for text in texts:
            self.notice(text)

    def progress(self, text: str) -> None:
        """Show the progress of a long subcommand on one line of stderr, if that is a terminal."""
        if draws(sys.stderr) and not self.json:
            sys.stderr.write(f"\r\x1b[K{printable(text)}")
            sys.stderr.flush()

    def works(self, note: str = "") -> AbstractContextManager[None]:
        """Show long operations of the block with bytes and the time left; nothing with `--json`."""
        if self.json:
            return nullcontext()
        from torchrelay.runners.monitoring.progress import works_shown

        return works_shown(self.notice, note=note)

    def close(self) -> None:
        """Flush what is still buffered."""
        _tolerant(sys.stdout.flush)


def _rich_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    for number, name in enumerate(columns):
        short = max(len(one[number]) for one in (columns, *rows)) <= _SHORT
        table.add_column(name, overflow="fold", no_wrap=short)
    for row in rows:
        style = next((_STYLES[word] for cell in row for word in cell.split(", ") if word in _STYLES), None)
        table.add_row(*(Text(cell) for cell in row), style=style)
    return table


def by_url(text: str) -> str:
    """Replace local mirror directories in a message by the URLs that they stand for."""
    mirrors = sys.modules.get("torchrelay.runners.remote_runs.local_copies")
    return text if mirrors is None else str(mirrors.with_urls(text))


def printable(text: str) -> str:
    """Return one line without control characters: names come from files and may hold anything."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " if c in "\n\t" else f"\\x{ord(c):02x}" for c in text)


def human_number(value: float) -> str:
    """Format a metric with at most five digits."""
    return f"{value:.5g}"


def _object(value: Mapping[str, Any]) -> str:
    """Format a JSON object with one line per key, and per entry of a list of objects.

    Deeper levels are encoded at once, because indented encoding takes ten times as long.
    """
    return "{\n" + ",\n".join(f" {_json(key)}: {_listed(item)}" for key, item in value.items()) + "\n}"


def _listed(value: Any) -> str:
    if not isinstance(value, list) or not any(isinstance(one, (dict, list)) for one in value):
        return _json(value)
    return "[\n" + ",\n".join(f"  {_json(one)}" for one in value) + "\n ]"


def _json(value: Any) -> str:
    """Encode in one line; escape control characters, lone surrogates, and what the encoding lacks."""
    try:
        text = json_module.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        value = _finite(value)
        text = json_module.dumps(value, ensure_ascii=False, allow_nan=False)
    as_it_is = text.isascii() or (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    return text if as_it_is and text.isprintable() else json_module.dumps(value, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return finite(value) if isinstance(value, float) else value


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    padded = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return [line.rstrip() for line in padded]


def print_line(text: str, *, to: TextIO | None = None, required: bool = True) -> None:
    """Print a line; a closed reader is ignored, and unless the line is `required`, other errors too."""
    stream = to or sys.stdout
    if stream is None:
        return
    with nullcontext() if required else suppress(StorageError):
        _tolerant(lambda: print(text, file=stream), stream)


def _tolerant(write: Callable[[], object], to: TextIO | None = None) -> None:
    """Write and flush; a closed reader is ignored, other errors raise StorageError."""
    stream = to or sys.stdout
    try:
        write()
        stream.flush()
    except BrokenPipeError:
        _discard(stream)
    except OSError as error:
        _discard(stream)
        raise StorageError(f"cannot write to the standard output: {error.strerror}") from error


def _discard(stream: TextIO) -> None:
    """Send buffered output to /dev/null, including the interpreter's last flush."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def time_text(value: float) -> str:
    """Format seconds since 1970 as a date in UTC; an invalid date stays a number."""
    try:
        return datetime.fromtimestamp(value, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):  # written by a wrong clock
        return str(value)


Run = Callable[[argparse.Namespace, Output], int]
Argument = Callable[[Any], object]
"""Adds an argument to a parser, or to a group of one."""


@dataclass(frozen=True)
class Verb:
    """A subcommand: its help line, its arguments, and the function that runs it."""

    help: str
    arguments: tuple[Argument, ...]
    run: Run


def verb(text: str, *arguments: Argument) -> Callable[[Run], Verb]:
    """Declare a function as a subcommand with this help line."""
    return lambda run: Verb(text, arguments, run)


def arg(names: str, text: str, metavar: str | None = None, **options: Any) -> Argument:
    """Return an argument: its names (`-o --output`), help text, metavar, and options of `add_argument`."""
    return lambda parser: parser.add_argument(*names.split(), help=text, metavar=metavar, **options)


def flag(name: str, text: str) -> Argument:
    """Return an option without a value."""
    return lambda parser: parser.add_argument(name, action="store_true", help=text)


def either(*arguments: Argument) -> Argument:
    """Return a group of options that exclude each other."""

    def add(parser: Any) -> None:
        group = parser.add_mutually_exclusive_group()
        for one in arguments:
            one(group)

    return add


class Parser(argparse.ArgumentParser):
    """Raise UsageError instead of printing the usage and exiting."""

    _taking = False

    def error(self, message: str) -> NoReturn:
        """Raise a one-line error that points to --help."""
        raise UsageError(f"{message} ({self.prog} --help)")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, but also find an optional name after an option."""
        if self._taking or all(action.nargs != "?" for action in self._get_positional_actions()):
            return super().parse_known_args(args, namespace)
        self._taking = True  # the next call re-enters this method
        try:
            return super().parse_known_intermixed_args(args, namespace)
        finally:
            self._taking = False

    def refuse(self, left: Sequence[str]) -> NoReturn:
        """Raise UsageError for words that this subcommand does not accept, with what it accepts."""
        word = left[0].partition("=")[0]
        if word.startswith("-"):
            options = [name for action in self._actions for name in action.option_strings]
            self.error(f"{self._verb} has no option {word}{_meant(word, options)}")
        if word != left[0] and any(action.dest == "overrides" for action in self._actions):
            self.error(f"unexpected argument {left[0]!r}: write -o {left[0]}")
        takes = " ".join(str(action.metavar or action.dest) for action in self._get_positional_actions())
        self.error(f"unexpected argument {left[0]!r}: {self._verb} takes {takes or 'only options'}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Check a subcommand or choice; an unknown one is reported with the nearest."""
        if not isinstance(action, argparse._SubParsersAction):
            super()._check_value(action, value)
        elif value not in action.choices:
            typed = " ".join([*self.prog.split()[1:], str(value)])
            self.error(f"unknown subcommand {typed!r}{_meant(str(value), list(_verbs(self)))}")

    @property
    def _verb(self) -> str:
        return " ".join(self.prog.split()[1:]) or self.prog


def _verbs(parser: argparse.ArgumentParser, before: str = "") -> Iterator[str]:
    """Yield the subcommands of a parser and of those below it."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, one in action.choices.items():
                yield f"{before}{name}"
                yield from _verbs(one, f"{before}{name} ")


def _meant(word: str, known: Sequence[str]) -> str:
    from difflib import get_close_matches

    found = [one for one in known if one.split()[-1] == word] or get_close_matches(
        word, known, n=2, cutoff=0.7
    )
    return f"; did you mean {' or '.join(found)}?" if found else ""
