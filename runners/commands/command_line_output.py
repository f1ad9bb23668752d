"""What the command line prints: plain lines into pipes, tables and colour on a terminal, or JSON.

A reader that goes away (`| head`) is no error: the rest is not shown, the exit code stays right.
"""

from __future__ import annotations

import json as json_module
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

_STYLES = {
    "proved": "green",
    "damaged": "bold red",
    "unknown": "yellow",
    "quarantined": "red",
    "abandoned": "dim",
    "retired": "dim",
}
_UNITS = ("kB", "MB", "GB", "TB", "PB")


class Output:
    """Prints to stdout in the form that suits it; `notice` goes to stderr."""

    def __init__(self, *, json: bool = False) -> None:
        self.json = json
        self._console = None if json or not _is_terminal() else _console()

    def value(self, value: Mapping[str, Any]) -> None:
        """Print one JSON object."""
        _tolerant(lambda: print(json_module.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)))

    def line(self, text: str, style: str | None = None) -> None:
        """Print one line; `style` is a word that tells the colour on a terminal."""
        console, shown = self._console, printable(text)
        if console is None:
            _tolerant(lambda: print(shown, flush=True))
        else:
            colour = _STYLES.get(style or "")
            _tolerant(lambda: console.print(shown, style=colour, markup=False, highlight=False))

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print rows of text below the names of their columns."""
        shown = [[printable(cell) for cell in row] for row in rows]
        if self._console is None:
            for line in _aligned([list(columns), *shown]):
                self.line(line)
        else:
            self._rich_table(self._console, columns, shown)

    def notice(self, text: str) -> None:
        """Print something that people should know, beside the result."""
        sys.stderr.write(f"torchrelay: {printable(text)}\n")

    def progress(self, text: str) -> None:
        """Show how far a long verb is, where a person watches: one line on stderr, written over."""
        if sys.stderr.isatty() and not self.json:
            sys.stderr.write(f"\r\x1b[K{printable(text)}")
            sys.stderr.flush()

    def close(self) -> None:
        """Let go of what is still buffered."""
        _tolerant(sys.stdout.flush)

    def _rich_table(self, console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(*columns, box=box.SIMPLE_HEAD)
        for row in rows:
            style = next(
                (_STYLES[word] for cell in row for word in cell.split(", ") if word in _STYLES), None
            )
            table.add_row(*(Text(cell) for cell in row), style=style)
        _tolerant(lambda: console.print(table))


def printable(text: str) -> str:
    """One line without control characters: names come from files and may hold anything."""
    return "".join(c if c.isprintable() else " " if c in "\n\t" else f"\\x{ord(c):02x}" for c in text)


def human_bytes(count: int | None) -> str:
    """`1.5 MB`: powers of 1000, three figures."""
    if count is None:
        return "?"
    if count < 1000:
        return f"{count} B"
    size, unit = count / 1000, 0
    while size >= 999.5 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.3g} {_UNITS[unit]}"


def human_number(value: float) -> str:
    """A metric in at most five figures."""
    return f"{value:.5g}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    padded = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return [line.rstrip() for line in padded]


def _is_terminal() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def _console() -> Console:
    from rich.console import Console

    return Console()  # asks NO_COLOR itself


def _tolerant(write: Callable[[], object]) -> None:
    try:
        write()
        sys.stdout.flush()
    except BrokenPipeError:
        # Whatever is still buffered goes nowhere, also in the interpreter's own last flush.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
