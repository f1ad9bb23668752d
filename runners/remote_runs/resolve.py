"""Resolve paths, URLs and `RUN@EPOCH` to a run directory, its checkpoints and an epoch.

    RUN    RUN@last    RUN@best    RUN@7    RUN@epoch=7,branch=0    RUN@tag=NAME

A path that exists is taken literally, also with special characters. Nothing is verified here: the result is
what the log states, and the files may be damaged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from torchrelay.checkpoint.format.position import CommittedPosition
from torchrelay.checkpoint.load import open as opening
from torchrelay.checkpoint.load.lookup import nearest_directory
from torchrelay.checkpoint.load.open import Best, best_of_run, place_of
from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.log.record import has_job
from torchrelay.checkpoint.log.tiered_storage import opened
from torchrelay.checkpoint.log.view import EpochQuery, LogView, named_entry, wanted
from torchrelay.checkpoint.storage.base import Distrusted, SingleWriter, Storage
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.checkpoint.storage.open import FILE, CountingStorage, is_url, shown, storage_of
from torchrelay.errors import UnknownEpochError, UsageError
from torchrelay.jobs.runtime import is_directory, split_run, undisturbed
from torchrelay.metadata.run_directory import CheckpointsAlone, RunDirectory
from torchrelay.records import dataclass
from torchrelay.runners.monitoring.console import Output
from torchrelay.runners.remote_runs.names import for_a_glance, for_a_look, is_remote, travels

_RUN_FILE = "run.json"
_NAMED_RUNS = 5


@dataclass(frozen=True)
class RunLocation:
    """A run or checkpoints at `where`, a path or URL; `run` is None for checkpoints without a run.

    `best` is the metric by which the run selects its best epoch, if it has one.
    """

    where: str
    run: RunDirectory | None
    storage: Storage
    best: Best | None = None

    def log(self) -> LogView:
        """Read the current log; empty if nothing is committed yet."""
        return open_log(self.storage)


def locate(text: str, *, whole: bool = False, single_writer: SingleWriter = None) -> RunLocation:
    """Find the run or checkpoints at a path or URL; raises UsageError for anything else.

    For a URL the metadata of the run are downloaded, with `whole` also its source and other files.
    `single_writer` is the user's promise about other writers.
    """
    if is_remote(text):
        found = _locate_at(text, whole=whole)
    else:
        path = existing_directory(text.removeprefix(FILE))
        run, checkpoints = RunDirectory(path), path / "checkpoints"
        if (path / _RUN_FILE).is_file() or has_job(checkpoints):
            found = RunLocation(text, run, LocalStorage(checkpoints), best_of_run(path))
        elif has_job(path):
            found = RunLocation(text, None, opened(path))
        else:
            names = [one.name for one in runs_below(text)]
            what = _named(names) if names else ": expected a run directory or its checkpoints"
            raise UsageError(f"{text} is not a run and has no checkpoints{what}")
    if single_writer is not None and isinstance(found.storage, Distrusted):
        found.storage.single_writer = single_writer
    return found


def _locate_at(url: str, *, whole: bool) -> RunLocation:
    from torchrelay.runners.remote_runs.local_copies import mirror_of  # imported late: paths need no store

    mirror = mirror_of(url)
    if not mirror.is_run():
        if runs := mirror.names():
            raise UsageError(f"{url} is not a run{_named(runs)}")
        found = place_of(url)
        return RunLocation(url, None, found.storage.storage, found.best)
    run = mirror.run(wanted=travels if whole else for_a_look)
    for name, why in mirror.left_out.items():
        Output().notice(f"{name} is ignored: {why}")
    return RunLocation(url, run, storage_of(run.checkpoints, "the checkpoints"), best_of_run(run.path))


def locate_run(text: str, *, whole: bool = True) -> RunDirectory:
    """Find a run directory; raises UsageError for anything else, also for checkpoints without a run."""
    run = locate(text, whole=whole).run
    if run is None:
        raise UsageError(f"{text} has checkpoints but no {_RUN_FILE}: torchrelay ls lists its epochs")
    return run


def locate_run_or_checkpoints(text: str) -> RunDirectory:
    """Find a run, or checkpoints without one, to read; raises UsageError for anything else."""
    found = locate(text, whole=False)
    if found.run is not None:
        return found.run
    url = found.where.rstrip("/") if is_remote(found.where) else None
    return CheckpointsAlone(found.where.removeprefix(FILE) if url is None else url.rpartition("/")[2], url)


def existing_directory(text: str) -> Path:
    """Return an existing directory; raises UsageError with the probable meaning otherwise."""
    path = Path(text)
    there = is_directory(path)
    if there is None:
        run, at, _ = text.rpartition("@")
        if at and not run:
            raise UsageError(f"{text} names no run: write its path before the @")
        if at and Path(run).exists():
            raise UsageError(f"{text} does not exist; this command takes a run without an epoch: use {run}")
        near = nearest_directory(path)
        raise UsageError(f"{text} does not exist{near}: expected a run directory or its checkpoints")
    if not there:
        raise UsageError(f"{text} is a file: expected a run directory or its checkpoints")
    return path


def runs_below(text: str) -> list[Path]:
    """Return the runs directly in a directory, by name; none for a run itself or a missing directory."""
    if is_remote(text):
        return [run.path for run in stored_runs_below(text)]
    path = Path(text.removeprefix(FILE))
    if (path / _RUN_FILE).exists() or has_job(path):
        return []
    return sorted(one.parent for one in path.glob(f"*/{_RUN_FILE}"))


def stored_runs_below(url: str) -> list[RunDirectory]:
    """Return the runs below a URL with the metadata for lists; none for a run itself."""
    from torchrelay.runners.remote_runs.local_copies import mirror_of

    mirror = mirror_of(url)
    names = [] if mirror.is_run() else mirror.names()
    return [mirror.run(name, for_a_glance) for name in names]


def each_run(texts: Sequence[str]) -> list[str]:
    """Replace directories of runs by their runs."""
    found: list[str] = []
    for text in texts:
        stored = is_remote(text)
        below = [run.where for run in stored_runs_below(text)] if stored else runs_below(text)
        found += map(str, below or [text])
    return found


def _named(names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"; it contains the run {names[0]}: use its path"
    more = ", ..." if len(names) > _NAMED_RUNS else ""
    return f"; it contains the runs {', '.join(names[:_NAMED_RUNS])}{more}: use the path of one"


LAST = EpochQuery(None, "last")


@dataclass(frozen=True)
class Selector:
    """A path or URL, the requested epoch (None if none), and that as `open_checkpoint` takes it."""

    path: str
    wish: EpochQuery | None = None
    epoch: str = "last"


@dataclass(frozen=True)
class Selected:
    """One live epoch: its location, the log, and its entry in the log."""

    place: RunLocation
    view: LogView
    entry: CommittedPosition

    @property
    def name(self) -> str:
        """The text that selects this epoch again: number, and branch unless it is current."""
        here = self.view.find(self.entry.position.epoch, step=self.entry.position.step)
        seen = here is not None and here.key == self.entry.key
        return f"{self.place.where}@{self.entry.position if seen else self.entry.key}"


def parse_selector(text: str, exists: Callable[[str], bool] | None = None) -> Selector:
    """Parse a text without reading checkpoints; raises UsageError for an invalid epoch.

    `exists` checks if a path exists literally (default: in the file system).
    """
    path, said = split_run(text, exists or (lambda path: not is_url(path) and Path(path).exists()))
    if said is None:
        return Selector(text)
    try:
        return Selector(path, wanted(said), said)
    except UsageError as error:
        raise UsageError(f"{text}: {error}") from None


def with_epoch(text: str, epoch: str) -> str:
    """Combine a location and an epoch option; raises UsageError if both name an epoch."""
    if parse_selector(text).wish is not None:
        raise UsageError(f"{text} and {epoch!r} both name an epoch: remove one of them")
    return f"{text}@{epoch}"


def select(text: str, default: EpochQuery = LAST, *, single_writer: SingleWriter = None) -> Selected:
    """Find the epoch that a text selects; `default` if it names none.

    `last` and `best` mean healthy whole epochs of the current branch. Raises UsageError for an invalid
    location and an undefined `best`, UnknownEpochError listing what exists.
    """
    selector = parse_selector(text)
    place = locate(selector.path, single_writer=single_writer)
    with undisturbed():
        view = place.log()
        return Selected(place, view, find_entry(place, view, selector.wish or default))


def find_entry(place: RunLocation, view: LogView, wish: EpochQuery) -> CommittedPosition:
    """Find the requested live entry; raises as `select` does."""
    where = shown(place.where)
    if view.empty:
        raise UnknownEpochError(f"nothing is committed in {where} yet")
    if wish.explicit:
        return named_entry(view, wish, where)
    opened = opening.CheckpointLocation(CountingStorage(place.storage), place.best)
    found = opening.candidates(opened, view, wish, None, lambda _: None)
    if not found:
        raise UnknownEpochError(f"no whole epoch in {where} is healthy: see torchrelay ckpt why")
    return found[0]
