"""Metrics for TensorBoard: event files, of which a later one says what it purges of the earlier ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchrelay.metadata.sinks.base import OF_STEPS, TrackedRun, axis

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FOLDER = "tensorboard"


class TensorBoardSink:
    """Writes below `trackers/tensorboard` in the run directory, or into the directory that it was given.

    The axis is the step, or the epoch of a job that counts no steps; `epoch` is a curve of its own.
    """

    def __init__(self, directory: str | Path | None = None) -> None:
        self.directory = None if directory is None else Path(directory).absolute()
        self._writer: SummaryWriter | None = None

    def open(self, run: TrackedRun, attempt: int) -> None:
        """Choose the directory; the file is made by the rewind that follows."""
        self.directory = self.directory or run.trackers / FOLDER

    def log(self, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
        """Write one event per metric, and have them on the disk."""
        writer = self._writer or self._new(None)
        for name, value in {**metrics, "epoch": float(epoch)}.items():
            writer.add_scalar(name, value, axis(epoch, step))
        writer.flush()

    def log_steps(self, rows: Sequence[tuple[int, int, Mapping[str, float]]]) -> None:
        """Write points within an epoch as curves of their own, `train/loss_step`."""
        writer = self._writer or self._new(None)
        for _, step, values in rows:
            for name, value in values.items():
                writer.add_scalar(f"{name}{OF_STEPS}", value, step)
        writer.flush()

    def rewind(self, epoch: int, step: int) -> None:
        """Begin a file that purges every event beyond the point where the run goes on."""
        self._new(axis(epoch, step) + 1)

    def close(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _new(self, purge_step: int | None) -> SummaryWriter:
        from torch.utils.tensorboard import SummaryWriter

        self.close()
        self._writer = SummaryWriter(str(self.directory), purge_step=purge_step)
        self._writer.flush()
        return self._writer
