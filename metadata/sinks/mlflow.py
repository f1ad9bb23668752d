"""Metrics for MLflow, in any of its stores (`sqlite:///mlflow.db`).

MLflow cannot take points back. Where a rewind drops any, the run goes on in a new MLflow run that gets what
stays, with its times, parameters and tags, and the old one is deleted (MLflow's bin keeps it, with its
artifacts). So there is one living MLflow run per run of ours, and its curves never overlap.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from torchrelay.metadata.sinks.base import OF_STEPS, TrackedRun, axis

if TYPE_CHECKING:
    from mlflow.entities import Metric, Run
    from mlflow.tracking import MlflowClient

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
        self._run_id = client.create_run(
            old.info.experiment_id, start_time=old.info.start_time, tags={**_own_tags(old), **self._tags}
        ).info.run_id
        for name, value in old.data.params.items():
            client.log_param(self._run_id, name, value)
        self._log(self._run_id, [_point(one) for one in points if one.step <= last])
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


def _own_tags(run: Run) -> dict[str, str]:
    """What was tagged by people; MLflow's own words are about the old run."""
    return {name: text for name, text in run.data.tags.items() if not name.startswith("mlflow.")}


def _point(metric: Metric) -> tuple[str, float, int, int]:
    return metric.key, metric.value, metric.timestamp, metric.step


def _batches(points: Iterator[Any]) -> Iterator[list[Any]]:
    while batch := list(islice(points, _BATCH)):
        yield batch
