"""Protocol of metric sinks, and the CSV and JSON lines sinks.

The run's own `metrics.<generation>.jsonl` also contain abandoned epochs; sinks contain only the current
branch.

Invariant of all sinks: after any sequence of `log` and `rewind` the content is that of a dictionary by epoch,
where `log` sets an entry and `rewind` deletes all later ones.
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
    """The run of a sink: its directory, name, job and permanent id."""

    path: Path
    name: str
    job: str
    uuid: str

    @property
    def trackers(self) -> Path:
        """Directory of the built-in sinks' files."""
        return self.path / "trackers"


@runtime_checkable
class MetricSink(Protocol):
    """Receives the reduced metrics of a run per epoch; called on rank 0 in a separate thread.

    A sink with a method `log_steps(rows)` also gets points within an epoch, `(epoch, step, metrics)` by
    ascending steps of the whole run; `rewind` also deletes those of later steps.

    Errors of a sink become warnings. It is disabled for the rest of the launch after three failures in a row,
    or if a call takes longer than two minutes.
    """

    def open(self, run: TrackedRun, attempt: int) -> None:
        """Open the sink for a run.

        Args:
            run: Directory, name, job and permanent id of the run.
            attempt: The number of the launch, from 0.
        """

    def log(self, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of an epoch.

        Args:
            epoch: The epoch that ended, from 1.
            step: The steps of all epochs so far, 0 without steps.
            metrics: Reduced values by name; may contain NaN and infinities.
        """

    def rewind(self, epoch: int, step: int) -> None:
        """Delete everything after a position, because the run continues from there.

        Args:
            epoch: The last epoch to keep.
            step: The last step to keep.
        """

    def close(self) -> None:
        """Close the sink at the end of a launch; called at most once, not after a crash."""


OF_STEPS = "_step"
"""Suffix of metrics within epochs, which are separate curves."""


def axis(epoch: int, step: int) -> int:
    """Return the position on a tracker's axis: the step, or the epoch of a job without steps."""
    return step if step > 0 else epoch


def read_whole_lines(path: Path) -> list[str]:
    """Return the complete lines of a file, without a last line truncated by a crash; empty without a file.

    Raises StorageError if the file is unreadable or not text.
    """
    try:
        with open_regular(path) as file:
            data = file.read()
        return data[: data.rfind(b"\n") + 1].decode().split("\n")[:-1]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise StorageError(f"cannot read {path}: {error}; move it away, a new one is written") from error


def foreign(path: Path, begins: str) -> bool:
    """Return True if the file has another beginning: it is foreign and never overwritten.

    Raises StorageError if it cannot be read.
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
    """Append with a single write; raises StorageError."""
    try:
        append_bytes(path, text.encode())
    except OSError as error:
        raise StorageError(f"cannot append to {path}: {error.strerror}") from error


def replace_lines(path: Path, lines: Iterable[str]) -> None:
    """Replace the file atomically; raises StorageError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}") from error
    replace_file(path, "".join(f"{line}\n" for line in lines).encode(), sync="content")


class StepLines:
    """A file with a line per point, in step order, created by the first one.

    `begins` is the beginning of such files; `step_of` returns the step of a line (None: a line to keep).
    """

    def __init__(self, own: Path, begins: str, step_of: Callable[[str], int | None]) -> None:
        self.path = own.with_name(f"{own.stem}.steps{own.suffix}")
        self._begins, self._step_of = begins, step_of

    def append(self, lines: Iterable[str], header: str = "") -> None:
        """Append points; raises StorageError."""
        new = not self.path.exists()
        self._check()
        told = [header, *lines] if header and new else lines
        append_text(self.path, "".join(f"{line}\n" for line in told))

    def rewind(self, step: int) -> None:
        """Delete points of later steps, and a truncated line; raises StorageError."""
        if self.path.exists():
            self._check()
            replace_lines(self.path, [line for line in self.lines() if (self._step_of(line) or 0) <= step])

    def lines(self) -> list[str]:
        """Return the complete lines of the file."""
        return read_whole_lines(self.path)

    def _check(self) -> None:
        if foreign(self.path, self._begins):
            raise StorageError(f"{self.path} does not contain points by step: move it away")


class _TextSink:
    """A given file, or one in `trackers/` of the run directory, with a second file for points."""

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = None if path is None else Path(path).absolute()
        self._last: int | None = None
        self._steps: StepLines | None = None

    def close(self) -> None:
        """Do nothing: every line is already written."""

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
    """Content of the file: metric names in column order, and a row per epoch."""

    names: list[str] = field(default_factory=list)
    rows: dict[int, tuple[int, dict[str, str]]] = field(default_factory=dict)


class CsvSink(_TextSink):
    """Sink that writes `trackers/metrics.csv` in the run directory, or a given file.

    The first two columns are epoch and step; missing metrics are empty cells, and new metrics are new columns
    at the right. Numbers can be read back exactly.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        super().__init__(path)
        self._names: list[str] = []

    def open(self, run: TrackedRun, attempt: int) -> None:
        """Open the file, removing a truncated line."""
        self.path = self.path or run.trackers / CSV_FILE

        def step_of(line: str) -> int | None:
            step = line.partition(",")[0]
            return int(step) if step.isdecimal() else None

        self._steps = StepLines(self.path, ",".join(_OF_STEPS), step_of)
        if foreign(self.path, ",".join(_OWN)):
            raise StorageError(
                f"{self.path} is not a table of metrics by epoch and step: choose another file"
            )
        self._write(self._read())

    def log(self, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
        """Append a row; for a new metric or an existing epoch rewrite the file."""
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
        """Delete rows of later epochs and points of later steps; columns stay."""
        if self._steps is not None:
            self._steps.rewind(step)
        if self._last is not None and self._last > epoch:
            table = self._read()
            table.rows = {one: row for one, row in table.rows.items() if one <= epoch}
            self._write(table)

    def rows(self) -> dict[int, dict[str, float]]:
        """Return the metrics in the file by epoch."""
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
    csv.writer(out).writerow(row)  # with the file's line ending, so that cells with a part of it are quoted
    return out.getvalue().removesuffix("\r\n") + "\n"


JSONL_FILE = "metrics.jsonl"
_BEGINS = '{"attempt": '
"""Beginning of a valid line, also of a truncated first one."""


class JsonlSink(_TextSink):
    """Sink that writes `trackers/metrics.jsonl` in the run directory, or a given file.

    A line has epoch, step, attempt, time (Unix seconds) and metrics; NaN and infinities are strings.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        super().__init__(path)
        self._attempt = 0

    def open(self, run: TrackedRun, attempt: int) -> None:
        """Open the file, removing a truncated line."""
        self.path = self.path or run.trackers / JSONL_FILE
        self._attempt = attempt
        self._steps = StepLines(self.path, _BEGINS, _jsonl_step)
        rows = self.rows()
        if not rows and foreign(self.path, _BEGINS):
            raise StorageError(f"{self.path} does not contain metrics by epoch: choose another file")
        replace_lines(self.path, map(_line, rows))
        self._last = max((row["epoch"] for row in rows), default=None)

    def log(self, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
        """Append a line, or replace that of an existing epoch."""
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
        """Delete lines of later epochs and points of later steps."""
        if self._steps is not None:
            self._steps.rewind(step)
        if self._last is not None and self._last > epoch:
            kept = [row for row in self.rows() if row["epoch"] <= epoch]
            replace_lines(self._file, map(_line, kept))
            self._last = max((row["epoch"] for row in kept), default=None)

    def rows(self) -> list[dict[str, Any]]:
        """Return the valid lines of the file in epoch order."""
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
        """Return the points within epochs, in step order."""
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
