"""What every sink of metrics is, and two of them: a CSV file and JSON lines.

The run's own `metrics.<generation>.jsonl` keep everything, abandoned epochs too; this file is for
programs that want the present truth and no rules.

The law of all sinks: after any sequence of `log` and `rewind` one shows what a dictionary by epoch would
hold, where `log` sets the entry of its epoch and `rewind` drops the entries of all later ones.
"""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass as python_dataclass
from dataclasses import field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torchrelay.errors import StorageError
from torchrelay.metadata.fs import append_bytes, finite, open_regular, read_note, replace_file
from torchrelay.records import dataclass


@python_dataclass(frozen=True)
class TrackedRun:
    """The run that a sink is opened for: its directory, its directory's name, its job, its id for ever."""

    path: Path
    name: str
    job: str
    uuid: str

    @property
    def trackers(self) -> Path:
        """Where the built-in sinks keep their files."""
        return self.path / "trackers"


@runtime_checkable
class MetricSink(Protocol):
    """Takes the reduced metrics of a run, an epoch at a time; called on rank 0, from one thread of its own.

    A sink that also has a method `log_steps(rows)` gets points within an epoch, `(epoch, step, metrics)` by
    ascending steps of the whole run; a `rewind` takes back those of later steps.

    What a sink raises is a warning and never ends the run; after three failures in a row it is left
    alone for the rest of the attempt, and so it is at once when a call takes longer than two minutes.
    """

    def open(self, run: TrackedRun, attempt: int) -> None:
        """Begin to take metrics of a run that was started `attempt` times before (0: the first start)."""

    def log(self, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
        """Take what an epoch brought; `step` counts the steps of all epochs, 0 where a job counts none."""

    def rewind(self, epoch: int, step: int) -> None:
        """The run goes on after `epoch`, at `step` steps in all: drop what was logged of later epochs."""

    def close(self) -> None:
        """The attempt is over, however it ended; called at most once, not after a crash."""


OF_STEPS = "_step"
"""Behind the name of a metric whose points within epochs are a curve of their own."""


def axis(epoch: int, step: int) -> int:
    """The point on a tracker's one axis: the step, or the epoch of a job that counts no steps."""
    return step if step > 0 else epoch


def read_whole_lines(path: Path) -> list[str]:
    """The lines without their ends; one that a crash tore off is left out, no file is no line.

    Raises StorageError where the file cannot be read or is no text.
    """
    try:
        with open_regular(path) as file:
            data = file.read()
        return data[: data.rfind(b"\n") + 1].decode().split("\n")[:-1]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise StorageError(f"cannot read {path}: {error}; move it away, it is written anew") from error


def foreign(path: Path, begins: str) -> bool:
    """Whether the file holds something that does not begin so: somebody else's, which is never written over.

    Raises StorageError where it cannot be read.
    """
    try:
        with open_regular(path) as file:
            found = file.read(len(begins))
        return found != begins.encode()[: len(found)]
    except FileNotFoundError:
        return False
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}; give another file") from error


def append_text(path: Path, text: str) -> None:
    """Append by one write; raises StorageError."""
    try:
        append_bytes(path, text.encode())
    except OSError as error:
        raise StorageError(f"cannot append to {path}: {error.strerror}") from error


def replace_lines(path: Path, lines: Iterable[str]) -> None:
    """Replace the file: old or new after a crash, never torn; raises StorageError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}") from error
    replace_file(path, "".join(f"{line}\n" for line in lines).encode(), sync="content")


class StepLines:
    """A line per point, in the order of steps; the file is made by the first one.

    `begins` is what such a file begins with, `step_of` reads the step of a line (None: a line to keep).
    """

    def __init__(self, own: Path, begins: str, step_of: Callable[[str], int | None]) -> None:
        self.path = own.with_name(f"{own.stem}.steps{own.suffix}")
        self._begins, self._step_of = begins, step_of

    def append(self, lines: Iterable[str], header: str = "") -> None:
        """Add points behind those that are there; raises StorageError."""
        new = not self.path.exists()
        self._check()
        told = [header, *lines] if header and new else lines
        append_text(self.path, "".join(f"{line}\n" for line in told))

    def rewind(self, step: int) -> None:
        """Drop the points of later steps, and what a crash tore off; raises StorageError."""
        if self.path.exists():
            self._check()
            replace_lines(self.path, [line for line in self.lines() if (self._step_of(line) or 0) <= step])

    def lines(self) -> list[str]:
        """Whole lines that the file holds."""
        return read_whole_lines(self.path)

    def _check(self) -> None:
        if foreign(self.path, self._begins):
            raise StorageError(f"{self.path} holds no points by step: move it away")


class _TextSink:
    """A file below `trackers/` in the run directory, or the one that it was given; points are in another."""

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = None if path is None else Path(path).absolute()
        self._last: int | None = None
        self._steps: StepLines | None = None

    def close(self) -> None:
        """Every line stands on the disk by itself."""

    @property
    def _file(self) -> Path:
        if self.path is None:
            raise ValueError("the sink was not opened")
        return self.path


CSV_FILE = "metrics.csv"
_OWN = ("epoch", "step")
_OF_STEPS = ("step", "epoch", "metric", "value")


@dataclass
class _Table:
    """What the file holds: the metrics' names in the order of their columns, and a row per epoch."""

    names: list[str] = field(default_factory=list)
    rows: dict[int, tuple[int, dict[str, str]]] = field(default_factory=dict)


class CsvSink(_TextSink):
    """Writes `trackers/metrics.csv` in the run directory, or the file that it was given.

    The first two columns are epoch and step; a metric that an epoch lacks is an empty cell, and a metric
    that comes later is a new column at the right. Numbers are written so that they are read back exactly.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        super().__init__(path)
        self._names: list[str] = []

    def open(self, run: TrackedRun, attempt: int) -> None:
        """Find the file, and leave out what a crash tore off."""
        self.path = self.path or run.trackers / CSV_FILE

        def step_of(line: str) -> int | None:
            step = line.partition(",")[0]
            return int(step) if step.isdecimal() else None

        self._steps = StepLines(self.path, ",".join(_OF_STEPS), step_of)
        if foreign(self.path, ",".join(_OWN)):
            raise StorageError(
                f"{self.path} is no table of metrics by epoch and step: give a file of its own"
            )
        self._write(self._read())

    def log(self, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
        """Append a row; a new metric, or an epoch that is there already, writes the file anew."""
        cells = {name: repr(float(value)) for name, value in metrics.items()}
        if set(cells) <= set(self._names) and (self._last is None or epoch > self._last):
            append_text(self._file, _text(_cells(epoch, step, cells, self._names)))
            self._last = epoch
            return
        table = self._read()
        table.names += [name for name in cells if name not in table.names]
        table.rows[epoch] = (step, cells)
        self._write(table)

    def log_steps(self, rows: Sequence[tuple[int, int, Mapping[str, float]]]) -> None:
        """Append points within an epoch to `metrics.steps.csv`, a row per step and metric."""
        if self._steps is not None:
            cells = [(at, one, name, value) for one, at, values in rows for name, value in values.items()]
            lines = [
                _text([str(at), str(one), name, repr(float(value))])[:-1] for at, one, name, value in cells
            ]
            self._steps.append(lines, ",".join(_OF_STEPS))

    def rewind(self, epoch: int, step: int) -> None:
        """Drop the rows of later epochs, and the points of later steps; columns stay."""
        if self._steps is not None:
            self._steps.rewind(step)
        if self._last is not None and self._last > epoch:
            table = self._read()
            table.rows = {one: row for one, row in table.rows.items() if one <= epoch}
            self._write(table)

    def rows(self) -> dict[int, dict[str, float]]:
        """The metrics that the file holds, by epoch."""
        rows = self._read().rows.items()
        return {epoch: {name: float(cell) for name, cell in cells.items()} for epoch, (_, cells) in rows}

    def _read(self) -> _Table:
        lines = csv.reader(f"{line}\n" for line in read_whole_lines(self._file))
        header = next(lines, None)
        if header is None or tuple(header[:2]) != _OWN:
            return _Table()
        table = _Table(header[2:])
        for line in lines:
            if len(line) >= 2 and line[0].isdecimal() and line[1].isdecimal():
                cells = zip(table.names, line[2:], strict=False)
                table.rows[int(line[0])] = (int(line[1]), {name: cell for name, cell in cells if cell})
        return table

    def _write(self, table: _Table) -> None:
        rows = [_cells(epoch, *table.rows[epoch], table.names) for epoch in sorted(table.rows)]
        replace_lines(self._file, (_text(row)[:-1] for row in [[*_OWN, *table.names], *rows]))
        self._names, self._last = table.names, max(table.rows, default=None)


def _cells(epoch: int, step: int, cells: Mapping[str, str], names: Iterable[str]) -> list[str]:
    return [str(epoch), str(step), *(cells.get(name, "") for name in names)]


def _text(row: Iterable[str]) -> str:
    out = io.StringIO()
    csv.writer(out).writerow(row)  # with its own end of lines, so that cells with half of it are quoted
    return out.getvalue().removesuffix("\r\n") + "\n"


JSONL_FILE = "metrics.jsonl"
_BEGINS = '{"attempt": '
"""So does a line of ours, and what a crash left of the first one."""


class JsonlSink(_TextSink):
    """Writes `trackers/metrics.jsonl` in the run directory, or the file that it was given.

    A line has epoch, step, attempt, time (Unix seconds) and metrics; what JSON has no number for is text.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        super().__init__(path)
        self._attempt = 0

    def open(self, run: TrackedRun, attempt: int) -> None:
        """Find the file, and leave out what a crash tore off."""
        self.path = self.path or run.trackers / JSONL_FILE
        self._attempt = attempt
        self._steps = StepLines(self.path, _BEGINS, _jsonl_step)
        rows = self.rows()
        if not rows and foreign(self.path, _BEGINS):
            raise StorageError(f"{self.path} holds no line of metrics by epoch: give a file of its own")
        replace_lines(self.path, map(_line, rows))
        self._last = max((row["epoch"] for row in rows), default=None)

    def log(self, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
        """Append a line; where the epoch is there already its line is replaced."""
        row = self._row(epoch, step, metrics)
        if self._last is None or epoch > self._last:
            append_text(self._file, f"{_line(row)}\n")
            self._last = epoch
            return
        rows = [*(old for old in self.rows() if old["epoch"] != epoch), row]
        replace_lines(self._file, map(_line, sorted(rows, key=lambda one: one["epoch"])))

    def log_steps(self, rows: Sequence[tuple[int, int, Mapping[str, float]]]) -> None:
        """Append points within an epoch to `metrics.steps.jsonl`, whose lines have the same form."""
        if self._steps is not None:
            self._steps.append(_line(self._row(*row)) for row in rows)

    def rewind(self, epoch: int, step: int) -> None:
        """Drop the lines of later epochs, and the points of later steps."""
        if self._steps is not None:
            self._steps.rewind(step)
        if self._last is not None and self._last > epoch:
            kept = [row for row in self.rows() if row["epoch"] <= epoch]
            replace_lines(self._file, map(_line, kept))
            self._last = max((row["epoch"] for row in kept), default=None)

    def rows(self) -> list[dict[str, Any]]:
        """What the file holds, in the order of epochs; lines that are none of ours are left out."""
        found = {}
        for line in read_whole_lines(self._file):
            try:
                row = read_note(line)
            except ValueError:
                continue
            if (
                isinstance(row, dict)
                and type(row.get("epoch")) is int
                and isinstance(row.get("metrics"), dict)
            ):
                found[row["epoch"]] = row
        return [found[epoch] for epoch in sorted(found)]

    def step_rows(self) -> list[dict[str, Any]]:
        """The points within epochs, in the order of steps."""
        lines = self._steps.lines() if self._steps is not None else []
        return [json.loads(line) for line in lines if _jsonl_step(line) is not None]

    def _row(self, epoch: int, step: int, metrics: Mapping[str, float]) -> dict[str, Any]:
        return {
            "epoch": epoch,
            "step": step,
            "attempt": self._attempt,
            "time": round(time.time(), 3),
            "metrics": {name: finite(value) for name, value in metrics.items()},
        }


def _jsonl_step(line: str) -> int | None:
    try:
        row = read_note(line)
    except ValueError:
        return None
    step = row.get("step") if isinstance(row, dict) and isinstance(row.get("metrics"), dict) else None
    return step if type(step) is int else None


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, sort_keys=True, allow_nan=False)
