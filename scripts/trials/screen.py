"""Output of trials: colours, a progress bar and a table on a terminal, plain lines in a pipe or file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table


class Screen:
    """Prints to stdout; plain lines hold no control characters."""

    def __init__(self) -> None:
        self.pretty = sys.stdout.isatty()
        self._console = Console(highlight=False, soft_wrap=True)

    def line(self, text: str = "", style: str = "") -> None:
        """One line."""
        if self.pretty:
            self._console.print(text, style=style, markup=False)
        else:
            print(text, flush=True)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table; every row has a text for each column."""
        if self.pretty:
            table = Table()
            for column in columns:
                table.add_column(column, no_wrap=True)
            for row in rows:
                table.add_row(*row)
            self._console.print(table)
            return
        widths = [max(len(row[number]) for row in [columns, *rows]) for number in range(len(columns))]
        for row in [columns, *rows]:
            cells = (text.ljust(width) for text, width in zip(row, widths, strict=True))
            print("  ".join(cells).rstrip(), flush=True)

    @contextmanager
    def stage(self, title: str, total: int) -> Iterator[Callable[[int, str], None]]:
        """A part of the trial; call what is yielded with how much of `total` is done, and a line about it."""
        if not self.pretty:
            print(f"== {title}", flush=True)
            yield lambda _, text: print(f"   {text}", flush=True)
            return
        self.line(title, style="bold")
        columns = (
            BarColumn(bar_width=16),
            TimeElapsedColumn(),
            TextColumn("{task.fields[about]}", markup=False),
        )
        with Progress(*columns, console=self._console) as progress:
            bar = progress.add_task(title, total=total, about="")
            yield lambda done, text: progress.update(bar, completed=done, about=text)
