"""Sinks for MLflow, TensorBoard and Weights & Biases, and the `trackers` option.

- MLflow cannot delete points. A rewind that drops some creates a new MLflow run with the remaining points,
  times, parameters and tags, and deletes the old one (recoverable in MLflow, with its artifacts). So each run
  has one active MLflow run without overlapping curves.
- W&B requires increasing steps, and cannot resume or rewind offline. So every launch writes a complete W&B
  run: first the remaining earlier points, from a local file, then the new ones. Directories of earlier
  launches that were not synced are moved aside, so that `wandb sync --sync-all` finds one run; synced ones
  remain in W&B, in the same group.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrelay.errors import PACKAGES, UsageError, install_command
from torchrelay.metadata.sinks.text import OF_STEPS, CsvSink, JsonlSink, MetricSink, TrackedRun, axis

if TYPE_CHECKING:
    import wandb
    from mlflow.entities import Run
    from torch.utils.tensorboard import SummaryWriter


RUN_TAG, ATTEMPT_TAG = "torchrelay.run", "attempt"
_BATCH = 1000
"""Most metrics per call of MLflow."""
_NOT_IN_NAMES = re.compile(r"[^\w./: -]", re.ASCII)
"""Characters that MLflow does not allow in names."""


class MlflowSink:
    """Sink for MLflow at `uri` (default: MLflow's own), in the job's experiment."""

    def __init__(self, uri: str | None = None, experiment: str | None = None) -> None:
        self.uri, self.experiment = uri, experiment
        self._client: Any = None
        self._run_id = ""
        self._tags: dict[str, str] = {}

    def open(self, run: TrackedRun, attempt: int) -> None:
        """Resume the MLflow run of this run, or create one."""
        from mlflow.tracking import MlflowClient

        self._client = client = MlflowClient(tracking_uri=self.uri)
        self._tags = {RUN_TAG: run.uuid, ATTEMPT_TAG: str(attempt), "mlflow.runName": run.name}
        name = self.experiment or run.job
        known = client.get_experiment_by_name(name)
        experiment = str(known.experiment_id if known is not None else client.create_experiment(name))
        found = client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{run.uuid}'")
        found.sort(key=_began, reverse=True)  # two after a crash between creating one and deleting the other
        for older in found[1:]:
            client.delete_run(older.info.run_id)
        if found:
            self._run_id = found[0].info.run_id
            client.set_tag(self._run_id, ATTEMPT_TAG, self._tags[ATTEMPT_TAG])
            client.update_run(self._run_id, status="RUNNING")
        else:
            self._run_id = client.create_run(experiment, tags=self._tags).info.run_id

    def log(self, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
        """Log all metrics of an epoch with one call."""
        now, at = int(time.time() * 1000), axis(epoch, step)
        self._log((name, value, now, at) for name, value in {**metrics, "epoch": float(epoch)}.items())

    def log_steps(self, rows: Sequence[tuple[int, int, Mapping[str, float]]]) -> None:
        """Log points within an epoch as separate curves, `train/loss_step`."""
        now = int(time.time() * 1000)
        points = ((name, value, step) for _, step, values in rows for name, value in values.items())
        self._log((f"{name}{OF_STEPS}", value, now, step) for name, value, step in points)

    def rewind(self, epoch: int, step: int) -> None:
        """If there are later points, continue in a copy of the run without them."""
        client, last = self._client, axis(epoch, step)
        old = client.get_run(self._run_id)
        points = [one for name in old.data.metrics for one in client.get_metric_history(self._run_id, name)]
        if all(one.step <= last for one in points):
            return
        # Tags of users; MLflow's own tags describe the old run.
        tags = {name: text for name, text in old.data.tags.items() if not name.startswith("mlflow.")}
        self._run_id = client.create_run(
            old.info.experiment_id, start_time=old.info.start_time, tags={**tags, **self._tags}
        ).info.run_id
        for name, value in old.data.params.items():
            client.log_param(self._run_id, name, value)
        self._log((one.key, one.value, one.timestamp, one.step) for one in points if one.step <= last)
        client.delete_run(old.info.run_id)

    def close(self) -> None:
        """Mark the MLflow run as ended; the outcome is in the run's own status."""
        if self._client is not None and self._run_id:
            self._client.set_terminated(self._run_id)

    def _log(self, points: Iterable[tuple[str, float, int, int]]) -> None:
        from mlflow.entities import Metric

        metrics = [Metric(re.sub(_NOT_IN_NAMES, "_", name), *rest) for name, *rest in points]
        for begin in range(0, len(metrics), _BATCH):
            self._client.log_batch(self._run_id, metrics=metrics[begin : begin + _BATCH])


def _began(run: Run) -> tuple[int, str]:
    """Sort key by creation: a copy has the start time of its original, but a later attempt."""
    attempt = run.data.tags.get(ATTEMPT_TAG, "")
    return int(attempt) if attempt.isdecimal() else -1, run.info.run_id


FOLDER = "tensorboard"


class TensorBoardSink:
    """Sink that writes to `trackers/tensorboard` in the run directory, or a given one; `epoch` is a curve."""

    def __init__(self, directory: str | Path | None = None) -> None:
        self.directory = None if directory is None else Path(directory).absolute()
        self._writer: SummaryWriter | None = None

    def open(self, run: TrackedRun, attempt: int) -> None:
        """Choose the directory; the next `rewind` creates the file."""
        self.directory = self.directory or run.trackers / FOLDER

    def log(self, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
        """Write one event per metric and flush."""
        writer = self._writer or self._new(None)
        for name, value in {**metrics, "epoch": float(epoch)}.items():
            writer.add_scalar(name, value, axis(epoch, step))
        writer.flush()

    def log_steps(self, rows: Sequence[tuple[int, int, Mapping[str, float]]]) -> None:
        """Write points within an epoch as separate curves, `train/loss_step`."""
        writer = self._writer or self._new(None)
        for _, step, values in rows:
            for name, value in values.items():
                writer.add_scalar(f"{name}{OF_STEPS}", value, step)
        writer.flush()

    def rewind(self, epoch: int, step: int) -> None:
        """Begin a file that purges all later events."""
        self._new(axis(epoch, step) + 1)

    def close(self) -> None:
        """Flush and close."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _new(self, purge_step: int | None) -> SummaryWriter:
        from torch.utils.tensorboard import SummaryWriter

        self.close()
        self._writer = SummaryWriter(str(self.directory), purge_step=purge_step)
        self._writer.flush()
        return self._writer


WANDB_FOLDER = "wandb"
HISTORY = "history.jsonl"
ASIDE = "replaced"


class WandbSink:
    """Sink for W&B, by default in the job's project; `options` (entity, tags, notes) go to `wandb.init`."""

    def __init__(self, project: str | None = None, **options: Any) -> None:
        self.project, self.options = project, options
        self._root = Path()
        self._history = JsonlSink()
        self._begin: dict[str, Any] = {}
        self._run: wandb.Run | None = None

    def open(self, run: TrackedRun, attempt: int) -> None:
        """Read the points of earlier launches; the next `rewind` starts the W&B run."""
        self._root = run.trackers / WANDB_FOLDER
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
        """Store locally, then log."""
        run = self._run or self._start()
        self._history.log(epoch, step, metrics)
        run.log({**metrics, "epoch": epoch}, step=axis(epoch, step))

    def log_steps(self, rows: Sequence[tuple[int, int, Mapping[str, float]]]) -> None:
        """Store locally, then log as separate curves, `train/loss_step`."""
        run = self._run or self._start()
        self._history.log_steps(rows)
        for _, step, values in rows:
            run.log(_of_steps(values), step=step)

    def rewind(self, epoch: int, step: int) -> None:
        """Start a W&B run with the remaining points."""
        self._history.rewind(epoch, step)
        self._start()

    def close(self) -> None:
        """Finish the run; W&B's process writes the rest of the file after this process ends."""
        if self._run is not None:
            self._run.finish()
            self._run = None

    def _start(self) -> wandb.Run:
        import wandb

        self.close()
        aside = self._root / ASIDE
        for old in sorted(self._root.glob("wandb/offline-run-*")):
            if not any(old.glob("*.wandb.synced")):  # `wandb sync` must not find it
                aside.mkdir(exist_ok=True)
                with suppress(OSError):
                    old.rename(aside / old.name)
        settings = wandb.Settings(mode="offline", silent=True, console="off")
        self._run = wandb.init(dir=str(self._root), settings=settings, reinit="create_new", **self._begin)
        points = [(row["step"], 0, _of_steps(row["metrics"])) for row in self._history.step_rows()]
        for row in self._history.rows():
            values = {name: float(value) for name, value in row["metrics"].items()}
            points.append((axis(row["epoch"], row["step"]), 1, {**values, "epoch": row["epoch"]}))
        for step, _, values in sorted(points, key=lambda one: one[:2]):
            self._run.log(values, step=step)
        return self._run


def _of_steps(values: Mapping[str, float]) -> dict[str, float]:
    return {f"{name}{OF_STEPS}": float(value) for name, value in values.items()}


GROUP = "torchrelay.sinks"
"""Entry point group of packages with sinks: callables that take the text after the colon, or nothing."""
_BUILT_IN: dict[str, Callable[..., MetricSink]] = {
    "csv": CsvSink,
    "jsonl": JsonlSink,
    "tensorboard": TensorBoardSink,
    "mlflow": MlflowSink,
    "wandb": WandbSink,
}
"""The name of a sink that needs a package is also the module that it imports, and its key in `PACKAGES`."""
_METHODS = ("open", "log", "rewind", "close")


def sinks_of(trackers: Iterable[Any]) -> tuple[MetricSink, ...]:
    """Return the sinks for a list of names and objects, without creating files; raises UsageError."""
    if isinstance(trackers, (str, bytes)) or not isinstance(trackers, Iterable):
        raise UsageError(f"invalid trackers={trackers!r:.80}: expected a list such as ['csv', 'tensorboard']")
    given = list(trackers)
    twice = next((one for one in given if isinstance(one, str) and given.count(one) > 1), None)
    if twice is not None:
        raise UsageError(f"trackers has {twice!r} twice: both would write to the same place")
    return tuple(_sink(one) for one in given)


def _sink(wanted: Any) -> MetricSink:
    if isinstance(wanted, str):
        name, _, rest = wanted.partition(":")
        return _named(name, [rest] if rest else [])
    missing = [name for name in _METHODS if not callable(getattr(wanted, name, None))]
    if missing or isinstance(wanted, type):
        lacks = f"it lacks {', '.join(missing)}" if missing else "it is a class, not an object"
        raise UsageError(f"{wanted!r:.80} is not a tracker: {lacks} (see torchrelay.MetricSink)")
    found: MetricSink = wanted
    return found


def _named(name: str, rest: list[str]) -> MetricSink:
    if name in _BUILT_IN:
        if name in PACKAGES and find_spec(name) is None:
            raise UsageError(f"the tracker {name!r} needs a package: {install_command(name)}")
        return _BUILT_IN[name](*rest)
    offered = {point.name: point for point in entry_points(group=GROUP)}
    if name not in offered:
        known = sorted({*_BUILT_IN, *offered})
        meant = "".join(f"; did you mean {one!r}?" for one in get_close_matches(name, known, n=1))
        raise UsageError(f"unknown tracker {name!r:.80}; known are {', '.join(known)}{meant}")
    point = offered[name]
    try:
        made = point.load()(*rest)
    except Exception as error:
        raise UsageError(f"the tracker {point.name!r} ({point.value}) cannot be created: {error}") from error
    return _sink(made)
