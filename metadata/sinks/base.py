"""What a tracker is to a run, and a text file of lines that several of them write.

The law: after any sequence of `log` and `rewind` a sink shows what a dictionary by epoch would hold, where
`log` sets the entry of its epoch and `rewind` drops the entries of all later ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from torchrelay.errors import StorageError
from torchrelay.metadata.fs import append_bytes, open_regular, replace_file


@dataclass(frozen=True)
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
