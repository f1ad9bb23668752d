"""`torchrelay ls`: list the epochs of a run or the runs in a directory; shared output helpers."""

from __future__ import annotations

import argparse
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrelay.checkpoint.format.position import CommittedPosition, Key
from torchrelay.checkpoint.load.info import Glance, glance_or_notes
from torchrelay.checkpoint.load.open import best_of_run
from torchrelay.checkpoint.log.tiered_storage import Notes, read_notes
from torchrelay.checkpoint.log.view import LogView
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.errors import RelayError
from torchrelay.jobs.runtime import undisturbed
from torchrelay.metadata.fs import finite
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.records import dataclass
from torchrelay.runners.monitoring.console import Output, human_number, printable, time_text
from torchrelay.runners.monitoring.status import NOT_BEGUN, Standing, standing
from torchrelay.runners.monitoring.text import human_bytes
from torchrelay.runners.remote_runs.resolve import locate, runs_below
from torchrelay.tools.cli.arguments import PLACE_OR_RUNS, verb


def entry_json(entry: CommittedPosition) -> dict[str, Any]:
    """Return the common keys of an epoch in every `--json` output."""
    return {
        "epoch": entry.position.epoch,
        "step": entry.position.step,
        "branch": entry.branch,
        "try": entry.attempt_name,
    }


def states_of(entry: CommittedPosition, current: Collection[Key]) -> list[str]:
    """List why an epoch cannot be used; `current` are the keys visible from the current branch."""
    states = [] if entry.key in current else ["abandoned"]
    states += [] if entry.healthy else ["quarantined"]
    return states + ([] if entry.resumable else ["not resumable"])


def current_keys(view: LogView) -> frozenset[Key]:
    """Return the keys of the epochs visible from the current branch."""
    return frozenset(one.key for one in view.line())


def marks_of(view: LogView, entry: CommittedPosition) -> list[str]:
    """Return the tags and pins of an epoch, such as `tag:paper`."""
    return [f"{mark.kind}:{mark.name}" for mark in view.marks if mark.target == entry.key]


def metrics_text(metrics: Mapping[str, float]) -> str:
    """Format metrics: `train/loss=0.1234 val/acc=0.9`."""
    return " ".join(f"{name}={human_number(value)}" for name, value in sorted(metrics.items()))


def metrics_of(line: Mapping[str, Any]) -> dict[str, float]:
    """Parse the metrics of an epoch's line; other values than numbers and "nan" or "inf" are dropped."""
    found = line.get("metrics")
    if not isinstance(found, dict):
        return {}
    values = ((name, _number(value)) for name, value in found.items())
    return {name: value for name, value in values if value is not None}


def best_of(lines: Sequence[Mapping[str, Any]], best: tuple[str, str]) -> tuple[float, int] | None:
    """Return the best finite value of a metric and the first epoch that reached it."""
    name, mode = best
    sign = -1.0 if mode == "max" else 1.0
    scored = [(metrics_of(line).get(name, math.nan), line["epoch"]) for line in lines]
    known = [(sign * value, epoch) for value, epoch in scored if math.isfinite(value)]
    if not known:
        return None
    value, epoch = min(known)
    return sign * value, epoch


def _number(value: Any) -> float | None:
    if isinstance(value, str):
        value = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}.get(value.lower())
    return float(value) if type(value) in (int, float) else None


_RUN_COLUMNS = ("run", "job", "state", "epoch", "best", "updated")


@dataclass(frozen=True)
class RunLine:
    """One run, an object of `ls --json`; `problem` is why its metadata cannot be read."""

    run: str
    job: str | None = None
    state: str | None = None
    stands: str = NOT_BEGUN.word
    why: str = ""
    epoch: int | None = None
    metric: str | None = None
    best: float | None = None
    best_epoch: int | None = None
    updated: float | None = None
    problem: str | None = None

    def cells(self) -> tuple[str, ...]:
        """Return the row of the table."""
        best = "-"
        if self.best is not None:
            best = f"{self.metric}={human_number(self.best)} (epoch {self.best_epoch})"
        return (
            self.run,
            self.job or "?",
            "unreadable" if self.problem else self.why if self.stands == "silent" else self.stands,
            "-" if self.epoch is None else str(self.epoch),
            best,
            "-" if self.updated is None else time_text(self.updated),
        )


def list_runs(paths: Sequence[Path], output: Output) -> int:
    """Print the runs; a damaged run is listed with its problem on stderr."""
    lines = [_run_line(path) for path in paths]
    if output.json:
        output.value({"runs": list(map(vars, lines))})
        return 0
    output.table(_RUN_COLUMNS, [line.cells() for line in lines])
    for line in lines:
        if line.problem:
            output.notice(f"{line.run}: {printable(line.problem)}")
    return 0


def _run_line(path: Path) -> RunLine:
    run = RunDirectory(path)
    try:
        identity, status, rule = run.identity() or {}, run.status(), best_of_run(path)
        updated, state, lines, stands = (
            status.get("updated"),
            status.get("state"),
            run.metrics(),
            standing(path),
        )
    except RelayError as error:
        return RunLine(run.name, problem=str(error))
    epoch = status.get("committed")  # final status of an ended run, else the notes beside its epochs
    if type(epoch) is not int:
        epoch = next((line["epoch"] for line in reversed(lines) if line.get("saved") is True), None)
    best, best_epoch = (None if rule is None else best_of(lines, rule)) or (None, None)
    return RunLine(
        run.name,
        identity.get("job"),
        stands.state(state if isinstance(state, str) else None),
        stands.word,
        stands.why,
        epoch,
        None if rule is None else rule[0],
        best,
        best_epoch,
        updated if type(updated) in (int, float) else None,
    )


_COLUMNS = ("epoch", "branch", "ranks", "bytes", "state", "metrics", "directory")


@dataclass(frozen=True)
class EpochLine:
    """One committed epoch as shown by `ls`; fields from the manifest are None if it is unreadable."""

    entry: CommittedPosition
    states: tuple[str, ...]
    tags: tuple[str, ...]
    world_size: int | None
    nbytes: int | None
    metrics: Mapping[str, float]

    def json(self) -> dict[str, Any]:
        """Return the object of `ls --json`; NaN and Inf are strings."""
        return {
            **entry_json(self.entry),
            "world_size": self.world_size,
            "bytes": self.nbytes,
            "states": list(self.states),
            "tags": list(self.tags),
            "metrics": {name: finite(value) for name, value in self.metrics.items()},
        }

    def cells(self) -> tuple[str, ...]:
        """Return the row of the table."""
        return (
            str(self.entry.position),
            str(self.entry.branch),
            "?" if self.world_size is None else str(self.world_size),
            human_bytes(self.nbytes),
            ", ".join((*self.states, *self.tags)) or "ok",
            metrics_text(self.metrics),
            self.entry.attempt_name,
        )


@verb("list the runs in a directory, or the epochs of a run", PLACE_OR_RUNS)
def ls(chosen: argparse.Namespace, output: Output) -> int:
    """List runs or epochs; reads the log and the manifests, but no shards."""
    if runs := runs_below(chosen.path):
        return list_runs(runs, output)
    place = locate(chosen.path)
    with undisturbed():
        view = place.log()
        lines = _lines(place.storage, view)
    for notice in view.notices:
        output.notice(notice)
    stands = None if place.run is None else standing(place.run.path)
    if output.json:
        output.value(_json(view, lines, stands))
    elif lines:
        output.table(_COLUMNS, [line.cells() for line in lines], spare=("directory", "ranks"))
    else:
        output.line(f"no committed epochs in {chosen.path}")
    if stands is not None and not stands.over and stands.word != "created" and not output.json:
        output.notice(f"{chosen.path} is {stands}")
    return 0


def _lines(storage: Storage, view: LogView) -> list[EpochLine]:
    """Yield abandoned epochs, then the current branch, the newest last."""
    current = current_keys(view)
    notes = read_notes(storage)
    return [_line(storage, view, entry, current, notes) for entry in (*view.abandoned(), *view.line())]


def _line(
    storage: Storage, view: LogView, entry: CommittedPosition, current: Collection[Key], notes: Notes | None
) -> EpochLine:
    seen = _seen(storage, entry)
    states = states_of(entry, current)
    if notes is not None:
        states.append("replicated" if entry.attempt_name in notes.replicated else "local")
    if seen is None and entry.healthy:
        states.append("manifest unreadable")
    return EpochLine(
        entry,
        tuple(states),
        tuple(marks_of(view, entry)),
        None if seen is None else seen.nodes,
        None if seen is None else seen.own_bytes,
        {} if seen is None else seen.metrics,
    )


def _seen(storage: Storage, entry: CommittedPosition) -> Glance | None:
    try:
        return glance_or_notes(storage, entry)
    except OSError:  # `verify` reports the damage
        return None


def _json(view: LogView, lines: list[EpochLine], stands: Standing | None) -> dict[str, Any]:
    return {
        "stands": None if stands is None else stands.word,
        "why": "" if stands is None else stands.why,
        "job": view.job_name,
        "uuid": view.job_uuid,
        "branch": view.current.id,
        "epochs": [line.json() for line in lines],
        "notices": list(view.notices),
    }
