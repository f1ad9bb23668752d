"""Sinks from what users write, and trackers of other makers: MLflow, TensorBoard, Weights & Biases.

MLflow cannot take points back. Where a rewind drops any, the run goes on in a new MLflow run that gets what
stays, with its times, parameters and tags, and the old one is deleted (MLflow's bin keeps it, with its
artifacts). So there is one living MLflow run per run of ours, and its curves never overlap.

W&B refuses steps that do not increase, and offline it can neither resume nor rewind. So every attempt writes
one whole W&B run: first what stays of the epochs before, from a file of our own, then what comes. The
directories of earlier attempts that nobody has sent yet are moved aside, so that `wandb sync --sync-all`
finds one run per run of ours. Those that were sent stay in W&B, in the same group.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from importlib.metadata import entry_points
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrelay.errors import UsageError, install_command
from torchrelay.metadata.sinks.text import OF_STEPS, CsvSink, JsonlSink, MetricSink, TrackedRun, axis

if TYPE_CHECKING:
    import wandb
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient
    from torch.utils.tensorboard import SummaryWriter


RUN_TAG, ATTEMPT_TAG = "torchrelay.run", "attempt"
_BATCH = 1000
"""The most metrics that one call of MLflow takes."""


class MlflowSink:
    """Logs to the store at `uri` (by default what MLflow itself would use), in the job's experiment."""

    def __init__(self, uri: str | None = None, experiment: str | None = None) -> None:
        self.uri, self.experiment = uri, experiment
        self._client: MlflowClient | None = None
        self._run_id = ""
        self._tags: dict[str, str] = {}

    def open(self, run: TrackedRun, attempt: int) -> None:
        """Go on in the MLflow run of this run, or begin one."""
        from mlflow.tracking import MlflowClient

        self._client = client = MlflowClient(tracking_uri=self.uri)
        self._tags = {RUN_TAG: run.uuid, ATTEMPT_TAG: str(attempt), "mlflow.runName": run.name}
        experiment = self._experiment_id(client, self.experiment or run.job)
        found = client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{run.uuid}'")
        found.sort(key=_began, reverse=True)  # two after a crash between making one and deleting the other
        for older in found[1:]:
            client.delete_run(older.info.run_id)
        if found:
            self._go_on(client, found[0].info.run_id)
        else:
            self._run_id = client.create_run(experiment, tags=self._tags).info.run_id

    @staticmethod
    def _experiment_id(client: MlflowClient, name: str) -> str:
        known = client.get_experiment_by_name(name)
        return str(known.experiment_id if known is not None else client.create_experiment(name))

    def _go_on(self, client: MlflowClient, run_id: str) -> None:
        self._run_id = run_id
        client.set_tag(run_id, ATTEMPT_TAG, self._tags[ATTEMPT_TAG])
        client.update_run(run_id, status="RUNNING")

    def log(self, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
        """Log all metrics of an epoch by one call."""
        now, at = int(time.time() * 1000), axis(epoch, step)
        values = {**metrics, "epoch": float(epoch)}
        self._log(self._run_id, [(_known_name(name), value, now, at) for name, value in values.items()])

    def log_steps(self, rows: Sequence[tuple[int, int, Mapping[str, float]]]) -> None:
        """Log points within an epoch as curves of their own, `train/loss_step`."""
        now = int(time.time() * 1000)
        self._log(
            self._run_id,
            [
                (_known_name(f"{name}{OF_STEPS}"), value, now, step)
                for _, step, values in rows
                for name, value in values.items()
            ],
        )

    def rewind(self, epoch: int, step: int) -> None:
        """Where anything lies beyond the point, go on in a copy of the run that ends there."""
        client, last = self._open, axis(epoch, step)
        old = client.get_run(self._run_id)
        points = [one for name in old.data.metrics for one in client.get_metric_history(self._run_id, name)]
        if all(one.step <= last for one in points):
            return
        # What was tagged by people; MLflow's own words are about the old run.
        tags = {name: text for name, text in old.data.tags.items() if not name.startswith("mlflow.")}
        self._run_id = client.create_run(
            old.info.experiment_id, start_time=old.info.start_time, tags={**tags, **self._tags}
        ).info.run_id
        for name, value in old.data.params.items():
            client.log_param(self._run_id, name, value)
        kept = [(one.key, one.value, one.timestamp, one.step) for one in points if one.step <= last]
        self._log(self._run_id, kept)
        client.delete_run(old.info.run_id)

    def close(self) -> None:
        """Say that nothing is being logged any more; how the run ended is in its own status."""
        if self._client is not None and self._run_id:
            self._client.set_terminated(self._run_id)

    def _log(self, run_id: str, points: Iterable[tuple[str, float, int, int]]) -> None:
        from mlflow.entities import Metric

        for batch in _batches(Metric(*point) for point in points):
            self._open.log_batch(run_id, metrics=batch)

    @property
    def _open(self) -> MlflowClient:
        if self._client is None:
            raise ValueError("the sink was not opened")
        return self._client


def _began(run: Run) -> tuple[int, str]:
    """Order of making: a copy has the start of its original, but a later attempt."""
    attempt = run.data.tags.get(ATTEMPT_TAG, "")
    return int(attempt) if attempt.isdecimal() else -1, run.info.run_id


def _known_name(name: str) -> str:
    """MLflow refuses some characters in names."""
    return re.sub(r"[^\w./: -]", "_", name, flags=re.ASCII)


def _batches(points: Iterator[Any]) -> Iterator[list[Any]]:
    while batch := list(islice(points, _BATCH)):
        yield batch


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


WANDB_FOLDER = "wandb"
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


GROUP = "torchrelay.sinks"
"""The entry points of packages that offer sinks: callables of the text behind the colon, or of nothing."""
_BUILT_IN: dict[str, Callable[..., MetricSink]] = {
    "csv": CsvSink,
    "jsonl": JsonlSink,
    "tensorboard": TensorBoardSink,
    "mlflow": MlflowSink,
    "wandb": WandbSink,
}
_NEEDS_PACKAGES = ("tensorboard", "mlflow", "wandb")
"""The module that such a tracker imports has its name, as has the feature in `errors.PACKAGES`."""
_METHODS = ("open", "log", "rewind", "close")


def sinks_of(trackers: Iterable[Any]) -> tuple[MetricSink, ...]:
    """The sinks that a list of names and objects means; creates no file.

    Raises UsageError for an unknown name, a package that is not installed, a thing that is no sink, and
    for two built-in sinks of one name, which would write into one file.
    """
    if isinstance(trackers, (str, bytes)) or not isinstance(trackers, Iterable):
        raise UsageError(f"trackers is {trackers!r:.80}; give a list, for example ['csv', 'tensorboard']")
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
        lacks = f"it lacks {', '.join(missing)}" if missing else "it is a class, give an object"
        raise UsageError(f"{wanted!r:.80} is no tracker: {lacks} (torchrelay.MetricSink says what one has)")
    found: MetricSink = wanted
    return found


def _named(name: str, rest: list[str]) -> MetricSink:
    if name in _BUILT_IN:
        if name in _NEEDS_PACKAGES and find_spec(name) is None:
            raise UsageError(f"the tracker {name!r} needs a package: {install_command(name)}")
        return _BUILT_IN[name](*rest)
    offered = {point.name: point for point in entry_points(group=GROUP)}
    if name not in offered:
        known = sorted({*_BUILT_IN, *offered})
        meant = "".join(f"; did you mean {one!r}?" for one in get_close_matches(name, known, n=1))
        raise UsageError(f"there is no tracker {name!r:.80}; there are {', '.join(known)}{meant}")
    point = offered[name]
    try:
        made = point.load()(*rest)
    except Exception as error:
        raise UsageError(f"the tracker {point.name!r} ({point.value}) cannot be made: {error}") from error
    return _sink(made)
