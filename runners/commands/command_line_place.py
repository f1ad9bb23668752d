"""From a path or URL on the command line to a run directory and its checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torchrelay.checkpoint.load.lookup import nearest_directory
from torchrelay.checkpoint.load.open import Best, best_of_run, place_of
from torchrelay.checkpoint.log.job_file import has_job
from torchrelay.checkpoint.log.reader import open_log
from torchrelay.checkpoint.log.tiered_storage import opened
from torchrelay.checkpoint.log.view import LogView
from torchrelay.checkpoint.storage.base import Distrusted, SingleWriter, Storage
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.checkpoint.storage.open import FILE, storage_of
from torchrelay.errors import UsageError
from torchrelay.jobs.runtime import is_directory
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.records import dataclass
from torchrelay.runners.monitoring.console import Output
from torchrelay.runners.stored_runs.run_names import for_a_glance, for_a_look, travels
from torchrelay.runners.stored_runs.run_url import is_remote

_RUN_FILE = "run.json"
_NAMED_RUNS = 5


@dataclass(frozen=True)
class Place:
    """What lies at `where`, a path or URL: `run` is None for a bare directory of checkpoints.

    `best` is the metric by which the run calls an epoch its best, where it said one.
    """

    where: str
    run: RunDirectory | None
    storage: Storage
    best: Best | None = None

    def log(self) -> LogView:
        """The log as it is now; empty where nothing was committed yet."""
        return open_log(self.storage)


def locate(text: str, *, whole: bool = False, single_writer: SingleWriter = None) -> Place:
    """Find what a path or URL names; raises UsageError for anything that torchrelay did not make.

    Of a run at a URL the notes are brought here, with `whole` also its source and what else it keeps.
    `single_writer` is what the user promises of other writers.
    """
    found = _locate_at(text, whole=whole) if is_remote(text) else _locate_here(text)
    if single_writer is not None and isinstance(found.storage, Distrusted):
        found.storage.single_writer = single_writer
    return found


def _locate_here(text: str) -> Place:
    path = existing_directory(text.removeprefix(FILE))
    run, checkpoints = RunDirectory(path), path / "checkpoints"
    if (path / _RUN_FILE).is_file() or has_job(checkpoints):
        return Place(text, run, LocalStorage(checkpoints), best_of_run(path))
    if has_job(path):
        return Place(text, None, opened(path))
    raise UsageError(f"{text} is no run and holds no checkpoints{_below(text)}")


def _locate_at(url: str, *, whole: bool) -> Place:
    from torchrelay.runners.stored_runs.mirrors import mirror_of  # imported late: paths need no store

    mirror = mirror_of(url)
    if not mirror.is_run():
        if runs := mirror.names():
            raise UsageError(f"{url} is no run{_named(runs)}")
        found = place_of(url)
        return Place(url, None, found.storage.storage, found.best)
    run = mirror.run(wanted=travels if whole else for_a_look)
    for name, why in mirror.left_out.items():
        Output().notice(f"{name} is not looked at: {why}")
    return Place(url, run, storage_of(run.checkpoints, "the checkpoints"), best_of_run(run.path))


def locate_run(text: str, *, whole: bool = True) -> RunDirectory:
    """Find a run directory; raises UsageError for anything else, checkpoints without a run included."""
    run = locate(text, whole=whole).run
    if run is None:
        raise UsageError(f"{text} holds checkpoints but no run ({_RUN_FILE}): torchrelay ls lists its epochs")
    return run


def existing_directory(text: str) -> Path:
    """The directory that a text names; raises UsageError with what was probably meant where there is none."""
    path = Path(text)
    there = is_directory(path)
    if there is None:
        run, at, _ = text.rpartition("@")
        if at and not run:
            raise UsageError(f"{text} names no run: give its path before the @")
        if at and Path(run).exists():
            raise UsageError(f"there is no {text}; this verb takes a run and no epoch of it: give {run}")
        near = nearest_directory(path)
        raise UsageError(f"there is no {text}{near}: give the path of a run directory or of its checkpoints")
    if not there:
        raise UsageError(f"{text} is a file: give the path of a run directory or of its checkpoints")
    return path


def runs_below(text: str) -> list[Path]:
    """The runs that lie directly in a directory, by name; none for a run itself, and what is no directory."""
    if is_remote(text):
        return [run.path for run in stored_runs_below(text)]
    path = Path(text.removeprefix(FILE))
    if (path / _RUN_FILE).exists() or has_job(path):
        return []
    return sorted(one.parent for one in path.glob(f"*/{_RUN_FILE}"))


def stored_runs_below(url: str, depth: int = 1) -> list[RunDirectory]:
    """The runs below a URL, each with the notes that lists show; none for a run itself."""
    from torchrelay.runners.stored_runs.mirrors import mirror_of

    mirror = mirror_of(url)
    names = [] if mirror.is_run() else mirror.names(depth)
    return [mirror.run(name, for_a_glance) for name in names]


def each_run(texts: Sequence[str]) -> list[str]:
    """The same texts, but for a directory of runs its runs."""
    return [one for text in texts for one in (_runs_in(text) or [text])]


def _runs_in(text: str) -> list[str]:
    if is_remote(text):
        return [str(run.where) for run in stored_runs_below(text)]
    return list(map(str, runs_below(text)))


def _below(text: str) -> str:
    names = [one.name for one in runs_below(text)]
    return _named(names) if names else ": give the path of a run directory or of its checkpoints"


def _named(names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"; below it is the run {names[0]}: give its path"
    more = ", ..." if len(names) > _NAMED_RUNS else ""
    return f"; below it are the runs {', '.join(names[:_NAMED_RUNS])}{more}: give the path of one"
