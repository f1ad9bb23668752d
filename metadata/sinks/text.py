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
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass as python_dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torchrelay.errors import StorageError
from torchrelay.metadata.fs import append_text, finite, open_regular, read_note, replace_file


@python_dataclass(frozen=True)
class TrackedRun:
    """The run of a sink.

    Args:
        path: Its directory.
        name: Its name.
        job: The name of its job.
        uuid: Its permanent id.

    Example:
        sink.open(TrackedRun(Path("runs/a"), "a", "hello", uuid4().hex), attempt=0)
    """

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

        Example:
            sink.open(TrackedRun(Path("runs/a"), "a", "hello", uuid4().hex), attempt=0)
        """

    def log(self, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of an epoch.

        Args:
            epoch: The epoch that ended, from 1.
            step: The steps of all epochs so far, 0 without steps.
            metrics: Reduced values by name; may contain NaN and infinities.

        Example:
            sink.log(3, 1500, {"train/loss": 0.25})
        """

    def rewind(self, epoch: int, step: int) -> None:
        """Delete everything after a position, because the run continues from there.

        Args:
            epoch: The last epoch to keep.
            step: The last step to keep.

        Example:
            sink.rewind(2, 1000)
        """

    def close(self) -> None:
        """Close the sink at the end of a launch; called at most once, not after a crash."""


OF_STEPS = "_step"
"""Suffix of metrics within epochs, which are separate curves."""


def axis(epoch: int, step: int) -> int:
    """Return the position on a tracker's axis: the step, or the epoch of a job without steps."""
    return step if step > 0 else epoch


def read_whole_lines(path: Path) -> list[str]:
    """Return the complete lines of a file, without a last line truncated by a crash; empty without a file."""
    try:
        with open_regular(path) as file:
            data = file.read()
        return data[: data.rfind(b"\n") + 1].decode().split("\n")[:-1]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise StorageError(f"cannot read {path}: {error}; move it away, a new one is written") from error


def foreign(path: Path, begins: str) -> bool:
    """Return True if the file has another beginning: it is foreign and never overwritten."""
    try:
        with open_regular(path) as file:
            found = file.read(len(begins))
        return found != begins.encode()[: len(found)]
    except FileNotFoundError:
        return False
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}; give another file") from error


def replace_lines(path: Path, lines: Iterable[str]) -> None:
    """Replace the file atomically; raises StorageError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}") from error
    replace_file(path, "".join(f"{line}\n" for line in lines).encode(), sync="content")


class _TextSink:
    """A file with a line per epoch, by default in `trackers/`, and a second one with a line per point.

    Class attributes are the file's name, the beginnings of both files, and what a foreign file is not.
    """

    FILE = BEGINS = STEPS_BEGIN = FOREIGN = ""
    STEPS_HEADER: Sequence[str] = ()

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = None if path is None else Path(path).absolute()
        self._last: int | None = None
        self._attempt = 0

    def open(self, run: TrackedRun, attempt: int) -> None:
        """Open the file, removing a truncated line."""
        self.path, self._attempt = self.path or run.trackers / self.FILE, attempt
        if foreign(self.path, self.BEGINS) and not self._read():
            raise StorageError(f"{self.path} {self.FOREIGN}: choose another file")
        self._write(self._read())

    def log(self, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
        """Append a line; rewrite the file for an existing epoch, and a table for a new metric."""
        row = self._row(epoch, step, metrics)
        if self._fits(row) and (self._last is None or epoch > self._last):
            append_text(self._file, f"{self._line(row)}\n")
            self._last = epoch
        else:
            self._write({**self._read(), epoch: row})

    def log_steps(self, rows: Sequence[tuple[int, int, Mapping[str, float]]]) -> None:
        """Append points within an epoch to a second file, such as `metrics.steps.csv`."""
        path = self._steps_file()
        begin = () if path.exists() else self.STEPS_HEADER
        lines = [*begin, *(line for row in rows for line in self._points(*row))]
        append_text(path, "".join(f"{line}\n" for line in lines))

    def rewind(self, epoch: int, step: int) -> None:
        """Delete lines of later epochs and points of later steps."""
        if (path := self._steps_file()).exists():
            kept = [line for line in read_whole_lines(path) if (self._step_of(line) or 0) <= step]
            replace_lines(path, kept)
        if self._last is not None and self._last > epoch:
            self._write({one: row for one, row in self._read().items() if one <= epoch})

    def close(self) -> None:
        """Do nothing: every line is already written."""

    @property
    def _file(self) -> Path:
        if self.path is None:
            raise ValueError("the sink was not opened")
        return self.path

    def _steps_file(self) -> Path:
        path = self._file.with_name(f"{self._file.stem}.steps{self._file.suffix}")
        if foreign(path, self.STEPS_BEGIN):
            raise StorageError(f"{path} does not contain points by step: move it away")
        return path

    def _write(self, rows: Mapping[int, Any]) -> None:
        replace_lines(self._file, self._lines([rows[epoch] for epoch in sorted(rows)]))
        self._last = max(rows, default=None)

    def _fits(self, row: Any) -> bool:
        return True

    def _lines(self, rows: Iterable[Any]) -> Iterable[str]:
        return map(self._line, rows)

    def _read(self) -> dict[int, Any]:
        raise NotImplementedError

    def _row(self, epoch: int, step: int, metrics: Mapping[str, float]) -> Any:
        raise NotImplementedError

    def _line(self, row: Any) -> str:
        raise NotImplementedError

    def _points(self, epoch: int, step: int, metrics: Mapping[str, float]) -> Iterable[str]:
        raise NotImplementedError

    def _step_of(self, line: str) -> int | None:
        raise NotImplementedError


_OWN = ["epoch", "step"]
_OF_STEPS = "step,epoch,metric,value"


class CsvSink(_TextSink):
    """Sink that writes `trackers/metrics.csv` in the run directory, or a given file.

    The first two columns are epoch and step; missing metrics are empty cells, and new metrics are new columns
    at the right. Numbers can be read back exactly.
    """

    FILE, BEGINS, STEPS_BEGIN, STEPS_HEADER = "metrics.csv", ",".join(_OWN), _OF_STEPS, (_OF_STEPS,)
    FOREIGN = "is not a table of metrics by epoch and step"

    def __init__(self, path: str | Path | None = None) -> None:
        super().__init__(path)
        self._names: list[str] = []

    def rows(self) -> dict[int, dict[str, float]]:
        """Return the metrics in the file by epoch."""
        rows = self._read().items()
        return {epoch: {name: float(cell) for name, cell in row[2].items()} for epoch, row in rows}

    def _row(self, epoch: int, step: int, metrics: Mapping[str, float]) -> Any:
        return epoch, step, {name: repr(float(value)) for name, value in metrics.items()}

    def _fits(self, row: Any) -> bool:
        return set(row[2]) <= set(self._names)

    def _line(self, row: Any) -> str:
        epoch, step, cells = row
        return _text([str(epoch), str(step), *(cells.get(name, "") for name in self._names)])

    def _lines(self, rows: Iterable[Any]) -> Iterable[str]:
        rows = list(rows)
        self._names = list(dict.fromkeys([*self._names, *(name for row in rows for name in row[2])]))
        return [_text([*_OWN, *self._names]), *map(self._line, rows)]

    def _points(self, epoch: int, step: int, metrics: Mapping[str, float]) -> Iterable[str]:
        return [_text([str(step), str(epoch), name, repr(float(one))]) for name, one in metrics.items()]

    def _step_of(self, line: str) -> int | None:
        step = line.partition(",")[0]
        return int(step) if step.isdecimal() else None

    def _read(self) -> dict[int, Any]:
        lines = csv.reader(f"{line}\n" for line in read_whole_lines(self._file))
        header, found = next(lines, []), {}
        self._names = header[2:] if header[:2] == _OWN else []
        for line in lines if header[:2] == _OWN else ():
            if len(line) >= 2 and line[0].isdecimal() and line[1].isdecimal():
                cells = {name: cell for name, cell in zip(self._names, line[2:], strict=False) if cell}
                found[int(line[0])] = int(line[0]), int(line[1]), cells
        return found


def _text(row: Iterable[str]) -> str:
    out = io.StringIO()
    csv.writer(out).writerow(row)  # with the file's line ending, so that cells with a part of it are quoted
    return out.getvalue().removesuffix("\r\n")


class JsonlSink(_TextSink):
    """Sink that writes `trackers/metrics.jsonl` in the run directory, or a given file.

    A line has epoch, step, attempt, time (Unix seconds) and metrics; NaN and infinities are strings.
    """

    FILE, BEGINS, STEPS_BEGIN = "metrics.jsonl", '{"attempt": ', '{"attempt": '
    FOREIGN = "does not contain metrics by epoch"

    def rows(self) -> list[dict[str, Any]]:
        """Return the valid lines of the file in epoch order."""
        return [row for _, row in sorted(self._read().items())]

    def step_rows(self) -> list[dict[str, Any]]:
        """Return the points within epochs, in step order."""
        rows = map(_parsed, read_whole_lines(self._steps_file()))
        return [row for row in rows if row is not None and type(row.get("step")) is int]

    def _row(self, epoch: int, step: int, metrics: Mapping[str, float]) -> Any:
        return {
            "epoch": epoch,
            "step": step,
            "attempt": self._attempt,
            "time": round(time.time(), 3),
            "metrics": {name: finite(value) for name, value in metrics.items()},
        }

    def _line(self, row: Any) -> str:
        return json.dumps(row, sort_keys=True, allow_nan=False)

    def _points(self, epoch: int, step: int, metrics: Mapping[str, float]) -> Iterable[str]:
        return [self._line(self._row(epoch, step, metrics))]

    def _step_of(self, line: str) -> int | None:
        step = (_parsed(line) or {}).get("step")
        return step if type(step) is int else None

    def _read(self) -> dict[int, Any]:
        rows = [row for row in map(_parsed, read_whole_lines(self._file)) if row is not None]
        return {row["epoch"]: row for row in rows if type(row.get("epoch")) is int}


def _parsed(line: str) -> dict[str, Any] | None:
    """Return the row of a line; None if it is not one."""
    with suppress(ValueError):
        row = read_note(line)
        if isinstance(row, dict) and isinstance(row.get("metrics"), dict):
            return row
    return None
