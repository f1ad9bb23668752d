"""Metrics for Weights & Biases, offline: files that `wandb sync` sends whenever somebody wants that.

W&B refuses steps that do not increase, and offline it can neither resume nor rewind. So every attempt writes
one whole W&B run: first what stays of the epochs before, from a file of our own, then what comes. The
directories of earlier attempts that nobody has sent yet are moved aside, so that `wandb sync --sync-all`
finds one run per run of ours. Those that were sent stay in W&B, in the same group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrelay.metadata.sinks.base import OF_STEPS, TrackedRun, axis
from torchrelay.metadata.sinks.text import JsonlSink

if TYPE_CHECKING:
    import wandb

FOLDER = "wandb"
HISTORY = "history.jsonl"
ASIDE = "replaced"


class WandbSink:
    """Writes below `trackers/wandb` in the run directory; `project` is the job's name unless it is given.

    `options` go to `wandb.init` (entity, tags, notes, config).
    """

    def __init__(self, project: str | None = None, **options: Any) -> None:
        self.project, self.options = project, options
        self._root = Path()
        self._history = JsonlSink()
        self._begin: dict[str, Any] = {}
        self._run: wandb.Run | None = None

    def open(self, run: TrackedRun, attempt: int) -> None:
        """Find what earlier attempts logged; the W&B run begins with the rewind that follows."""
        self._root = run.trackers / FOLDER
        self._root.mkdir(parents=True, exist_ok=True)
        self._history = JsonlSink(self._root / HISTORY)
        self._history.open(run, attempt)
        self._begin = {
            "project": self.project or run.job,
            "group": run.name,
            "name": f"{run.name} attempt {attempt}",
            "id": f"{run.uuid[:16]}-{attempt}",
            **self.options,
        }

    def log(self, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
        """Remember, then log."""
        run = self._run or self._start()
        self._history.log(epoch, step, metrics)
        run.log({**metrics, "epoch": epoch}, step=axis(epoch, step))

    def log_steps(self, rows: Sequence[tuple[int, int, Mapping[str, float]]]) -> None:
        """Remember, then log, as curves of their own, `train/loss_step`."""
        run = self._run or self._start()
        self._history.log_steps(rows)
        for _, step, values in rows:
            run.log(_of_steps(values), step=step)

    def rewind(self, epoch: int, step: int) -> None:
        """Begin a W&B run of what stays."""
        self._history.rewind(epoch, step)
        self._start()

    def close(self) -> None:
        """Finish the run; W&B's own process, which outlives this one, writes the rest of the file."""
        if self._run is not None:
            self._run.finish()
            self._run = None

    def _start(self) -> wandb.Run:
        import wandb

        self.close()
        self._put_aside()
        settings = wandb.Settings(mode="offline", silent=True, console="off")
        self._run = wandb.init(dir=str(self._root), settings=settings, reinit="create_new", **self._begin)
        points = [(row["step"], 0, _of_steps(_numbers(row))) for row in self._history.step_rows()]
        for row in self._history.rows():
            values = {**_numbers(row), "epoch": row["epoch"]}
            points.append((axis(row["epoch"], row["step"]), 1, values))
        for step, _, values in sorted(points, key=lambda one: one[:2]):
            self._run.log(values, step=step)
        return self._run

    def _put_aside(self) -> None:
        """Move what was not sent, and is replaced by the run that begins, out of sight of `wandb sync`."""
        aside = self._root / ASIDE
        for old in sorted(self._root.glob("wandb/offline-run-*")):
            if not any(old.glob("*.wandb.synced")):
                aside.mkdir(exist_ok=True)
                with suppress(OSError):
                    old.rename(aside / old.name)


def _numbers(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: float(value) for name, value in row["metrics"].items()}


def _of_steps(values: Mapping[str, float]) -> dict[str, float]:
    return {f"{name}{OF_STEPS}": value for name, value in values.items()}
