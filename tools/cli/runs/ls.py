"""`torchrelay ls`: list the epochs of a run or the runs in a directory; runs by path or id.

The library is a directory with runs of all experiments below it, in which runs are found by their id.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrelay.checkpoint.format.position import CommittedPosition, Key
from torchrelay.checkpoint.load.info import glance_or_notes
from torchrelay.checkpoint.load.open import best_of_run
from torchrelay.checkpoint.log.tiered_storage import Notes, read_notes
from torchrelay.checkpoint.log.view import LogView
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.errors import RelayError, UsageError
from torchrelay.jobs.runtime import undisturbed
from torchrelay.metadata.experiments import newest_test, read_note
from torchrelay.metadata.fs import finite
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.records import dataclass
from torchrelay.runners.monitoring.console import Output, arg, human_number, printable, time_text, verb
from torchrelay.runners.monitoring.status import NOT_BEGUN, standing
from torchrelay.runners.monitoring.text import human_bytes
from torchrelay.runners.remote_runs.names import for_a_look, is_remote, last_name, parent, travels
from torchrelay.runners.remote_runs.resolve import existing_directory, locate, locate_run, runs_below
from torchrelay.tools.cli.arguments import PLACE_OR_RUNS
from torchrelay.tools.report.run_data import metrics_in


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
    return [f"{mark.kind}:{mark.name}" for mark in view.state.marks if mark.target == entry.key]


def metrics_text(metrics: Mapping[str, float]) -> str:
    """Format metrics: `train/loss=0.1234 val/acc=0.9`."""
    return " ".join(f"{name}={human_number(value)}" for name, value in sorted(metrics.items()))


def metrics_of(line: Mapping[str, Any]) -> dict[str, float]:
    """Parse the metrics of an epoch's line; other values than numbers and "nan" or "inf" are dropped."""
    found = line.get("metrics")
    if not isinstance(found, dict):
        return {}
    return metrics_in(found)


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


def best_text(metric: str | None, best: float, epoch: int | None) -> str:
    """Format the best value of a run: `val/acc=0.9 (epoch 3)`."""
    return f"{metric}={human_number(best)} (epoch {epoch})"


def _best(path: Path, run: RunDirectory) -> tuple[str | None, float | None, int | None]:
    """Return the metric by which a run selects its best epoch, its best value, and that epoch."""
    rule = best_of_run(path)
    if rule is None:
        return None, None, None
    return rule[0], *(best_of(run.metrics(), rule) or (None, None))


_RUN_COLUMNS = ("run", "job", "state", "epoch", "best", "updated")


_UNKNOWN: dict[str, Any] = {
    "job": None, "state": None, "stands": NOT_BEGUN.word, "why": "", "epoch": None, "metric": None,
    "best": None, "best_epoch": None, "updated": None, "problem": None,
}  # fmt: skip


def _run_json(path: Path) -> dict[str, Any]:
    """Return the object of `ls --json`; `problem` is why the metadata of the run cannot be read."""
    run = RunDirectory(path)
    try:
        identity, status, (metric, best, best_epoch) = run.identity() or {}, run.status(), _best(path, run)
        updated, state = status.get("updated"), status.get("state")
        lines, stands = run.metrics(), standing(path)
        epoch = status.get("committed")  # final status of an ended run, else the notes beside its epochs
        if type(epoch) is not int:
            epoch = next((line["epoch"] for line in reversed(lines) if line.get("saved") is True), None)
    except RelayError as error:
        return {"run": run.name, **_UNKNOWN, "problem": str(error)}
    known = {
        "job": identity.get("job"), "state": stands.state(state if isinstance(state, str) else None),
        "stands": stands.word, "why": stands.why, "epoch": epoch, "metric": metric, "best": best,
        "best_epoch": best_epoch, "updated": updated if type(updated) in (int, float) else None,
    }  # fmt: skip
    return {"run": run.name, **_UNKNOWN, **known}


def _run_cells(line: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        line["run"],
        line["job"] or "?",
        "unreadable" if line["problem"] else line["why"] if line["stands"] == "silent" else line["stands"],
        "-" if line["epoch"] is None else str(line["epoch"]),
        "-" if line["best"] is None else best_text(line["metric"], line["best"], line["best_epoch"]),
        "-" if line["updated"] is None else time_text(line["updated"]),
    )


_DEPTH = 4
"""`runs/<name>/<runner>/<id>` is the deepest layout that torchrelay creates."""
_NAMED = 5


LIBRARY = arg("--runs", "directory to find run ids in (default: TORCHRELAY_RUNS, else runs)", "DIR")


def library(asked: str | None) -> Path:
    """Return the directory of the library (default TORCHRELAY_RUNS, else `runs`), for a URL a mirror."""
    text = asked or os.environ.get("TORCHRELAY_RUNS") or "runs"
    if not is_remote(text):
        return Path(text)
    from torchrelay.runners.remote_runs.local_copies import mirror_of

    mirror = mirror_of(text)
    names = [""] if mirror.is_run() else mirror.names(_DEPTH)
    mirror.root.mkdir(parents=True, exist_ok=True)
    for name in names:
        mirror.run(name, for_a_look)
    return mirror.root


def runs_in(root: Path) -> list[Path]:
    """List the run directories below `root`, or itself; skips hidden directories and runs within runs."""
    return sorted(_runs(existing_directory(str(root)), _DEPTH))


def find_run(text: str, asked: str | None = None) -> RunDirectory:
    """Find a run by path, id or unique part of its id; raises UsageError."""
    if is_remote(text):
        from torchrelay.runners.remote_runs.local_copies import mirror_of

        locate_run(text, whole=False)  # reports the problem with it
        url = text.rstrip("/")
        above = parent(url)  # beside the others of its directory, so that it can be compared with them
        return mirror_of(url).run() if above is None else mirror_of(above).run(last_name(url))
    if Path(text).exists():
        return locate_run(text)
    root = library(asked)
    there = runs_in(root) if root.is_dir() else []
    found = [one for one in there if one.name == text] or [one for one in there if text and text in one.name]
    if len(found) == 1:
        from torchrelay.runners.remote_runs.local_copies import mirrored_run

        return mirrored_run(found[0], travels)  # all metadata of a remote run
    if not found and "/" not in text and there:
        newest = ", ".join(one.name for one in there[-_NAMED:])
        raise UsageError(
            f"no run {text}, and no run in {shown(root)} has that in its id; the newest are {newest}"
        )
    if not found:
        return locate_run(text)  # reports the problem with the path
    named = ", ".join(shown(one) for one in found[:_NAMED])
    raise UsageError(
        f"{len(found)} runs in {shown(root)} have {text!r} in their ids, such as {named}; give more of the id"
    )


def shown(path: Path) -> str:
    """Return the path as shown to users: the URL if the directory mirrors one."""
    from torchrelay.runners.remote_runs.local_copies import shown_place

    return shown_place(path)


def _runs(folder: Path, depth: int) -> Iterator[Path]:
    if (folder / "run.json").is_file():
        yield folder
        return
    try:
        inside = [one for one in folder.iterdir() if not one.name.startswith(".") and one.is_dir()]
    except PermissionError:
        return
    for one in inside if depth else ():
        yield from _runs(one, depth - 1)


@dataclass(frozen=True)
class LibraryLine:
    """One run, an object of `runs ls --json`; `problem` is why its metadata cannot be read."""

    id: str
    path: Path
    experiment: str
    state: str = "unreadable"
    why: str = ""
    epoch: int | None = None
    metric: str | None = None
    best: float | None = None
    best_epoch: int | None = None
    test: Mapping[str, Any] | None = None
    message: str = ""
    code_id: str | None = None
    config_id: str | None = None
    amended: tuple[str | None, ...] = ()
    created: float | None = None
    problem: str | None = None

    @property
    def key_metric(self) -> str:
        """The best value of the run's metric, else the newest test results."""
        if self.best is not None:
            return best_text(self.metric, self.best, self.best_epoch)
        found = self.test or {}
        values = [
            f"{name}={human_number(value) if isinstance(value, float) else value}"
            for name, value in sorted(found.items())
            if name != "epoch"
        ]
        return f"test {', '.join(values[:2])} (epoch {found.get('epoch')})" if values else "-"

    def json(self) -> dict[str, Any]:
        """Return the object of `runs ls --json`; a mirrored path is its URL."""
        return {**vars(self), "path": shown(self.path)}


def library_line(path: Path, root: Path) -> LibraryLine:
    """Read the metadata of a run; damage is reported in `problem`, not raised."""
    experiment = path.parent.relative_to(root).as_posix().removeprefix(".") if root in path.parents else ""
    try:
        run, note, stands = RunDirectory(path), read_note(path), standing(path)
        problems = list[str]()
        created = run.known_identity(problems.append).get("created")
        if note is not None:
            code_id, config_id = note.code_id, note.config_id
        else:  # those of the newest launch
            from torchrelay.metadata.code.capture import captures, code_id_of  # few runs need it

            newest = (captures(path) or [{}])[-1]
            said = newest.get("config_id")
            code_id, config_id = code_id_of(newest), said if isinstance(said, str) else None
        return LibraryLine(
            path.name,
            path,
            experiment,
            stands.word,
            stands.why,
            stands.epoch,
            *_best(path, run),
            newest_test(path),
            "" if note is None else note.message,
            code_id,
            config_id,
            () if note is None else tuple(one.get("code_id") for one in note.amended),
            created if type(created) in (int, float) else None,
            problems[0] if problems else None,
        )
    except RelayError as error:
        return LibraryLine(path.name, path, experiment, problem=str(error))


_COLUMNS = ("epoch", "branch", "ranks", "bytes", "state", "metrics", "directory")


def _epoch_cells(entry: CommittedPosition, line: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        str(entry.position),
        str(entry.branch),
        "?" if line["world_size"] is None else str(line["world_size"]),
        human_bytes(line["bytes"]),
        ", ".join((*line["states"], *line["tags"])) or "ok",
        metrics_text(metrics_of(line)),
        entry.attempt_name,
    )


@verb("list the runs in a directory, or the epochs of a run", PLACE_OR_RUNS)
def ls(chosen: argparse.Namespace, output: Output) -> int:
    """List runs or epochs; reads the log and the manifests, but no shards."""
    if runs := runs_below(chosen.path):
        found = [_run_json(path) for path in runs]
        if output.json:
            output.value({"runs": found})
            return 0
        output.table(_RUN_COLUMNS, list(map(_run_cells, found)))
        output.notices(f"{run['run']}: {printable(run['problem'])}" for run in found if run["problem"])
        return 0
    place = locate(chosen.path)
    with undisturbed():
        view = place.log()
        current, notes = current_keys(view), read_notes(place.storage)
        entries = (*view.abandoned(), *view.line())  # the current branch last
        lines = [_epoch_json(place.storage, view, entry, current, notes) for entry in entries]
    output.notices(view.notices)
    stands = None if place.run is None else standing(place.run.path)
    if output.json:
        output.value(
            {
                "stands": None if stands is None else stands.word,
                "why": "" if stands is None else stands.why,
                "job": view.job_name,
                "uuid": view.job_uuid,
                "branch": view.current.id,
                "epochs": lines,
                "notices": list(view.notices),
            }
        )
    elif lines:
        rows = [_epoch_cells(entry, line) for entry, line in zip(entries, lines, strict=True)]
        output.table(_COLUMNS, rows, spare=("directory", "ranks"))
    else:
        output.line(f"no committed epochs in {chosen.path}")
    if stands is not None and not stands.over and stands.word != "created" and not output.json:
        output.notice(f"{chosen.path} is {stands}")
    return 0


def _epoch_json(
    storage: Storage, view: LogView, entry: CommittedPosition, current: Collection[Key], notes: Notes | None
) -> dict[str, Any]:
    """Return the object of `ls --json`; values of an unreadable manifest are None, NaN and Inf strings."""
    try:
        seen = glance_or_notes(storage, entry)
    except OSError:  # `verify` reports the damage
        seen = None
    states = states_of(entry, current)
    if notes is not None:
        states.append("replicated" if entry.attempt_name in notes.replicated else "local")
    if seen is None and entry.healthy:
        states.append("manifest unreadable")
    return {
        **entry_json(entry),
        "world_size": None if seen is None else seen.nodes,
        "bytes": None if seen is None else seen.own_bytes,
        "states": states,
        "tags": marks_of(view, entry),
        "metrics": {} if seen is None else {name: finite(one) for name, one in seen.facts.metrics.items()},
    }
