"""From what is typed to a run directory, its checkpoints and an epoch: paths, URLs, `RUN@EPOCH`.

    RUN    RUN@last    RUN@best    RUN@7    RUN@epoch=7,branch=0    RUN@tag=NAME

A path that exists as it stands is one, whatever is in its name. Nothing is proved here: the entry is what
the log says, and its files may be damaged.
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
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.records import dataclass
from torchrelay.runners.monitoring.console import Output
from torchrelay.runners.remote_runs.names import for_a_glance, for_a_look, is_remote, travels

_RUN_FILE = "run.json"
_NAMED_RUNS = 5


@dataclass(frozen=True)
class RunLocation:
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


def locate(text: str, *, whole: bool = False, single_writer: SingleWriter = None) -> RunLocation:
    """Find what a path or URL names; raises UsageError for anything that torchrelay did not make.

    Of a run at a URL the notes are brought here, with `whole` also its source and what else it keeps.
    `single_writer` is what the user promises of other writers.
    """
    found = _locate_at(text, whole=whole) if is_remote(text) else _locate_here(text)
    if single_writer is not None and isinstance(found.storage, Distrusted):
        found.storage.single_writer = single_writer
    return found


def _locate_here(text: str) -> RunLocation:
    path = existing_directory(text.removeprefix(FILE))
    run, checkpoints = RunDirectory(path), path / "checkpoints"
    if (path / _RUN_FILE).is_file() or has_job(checkpoints):
        return RunLocation(text, run, LocalStorage(checkpoints), best_of_run(path))
    if has_job(path):
        return RunLocation(text, None, opened(path))
    raise UsageError(f"{text} is no run and holds no checkpoints{_below(text)}")


def _locate_at(url: str, *, whole: bool) -> RunLocation:
    from torchrelay.runners.remote_runs.local_copies import mirror_of  # imported late: paths need no store

    mirror = mirror_of(url)
    if not mirror.is_run():
        if runs := mirror.names():
            raise UsageError(f"{url} is no run{_named(runs)}")
        found = place_of(url)
        return RunLocation(url, None, found.storage.storage, found.best)
    run = mirror.run(wanted=travels if whole else for_a_look)
    for name, why in mirror.left_out.items():
        Output().notice(f"{name} is not looked at: {why}")
    return RunLocation(url, run, storage_of(run.checkpoints, "the checkpoints"), best_of_run(run.path))


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
    from torchrelay.runners.remote_runs.local_copies import mirror_of

    mirror = mirror_of(url)
    names = [] if mirror.is_run() else mirror.names(depth)
    return [mirror.run(name, for_a_glance) for name in names]


def each_run(texts: Sequence[str]) -> list[str]:
    """The same texts, but for a directory of runs its runs."""
    found: list[str] = []
    for text in texts:
        stored = is_remote(text)
        below = [run.where for run in stored_runs_below(text)] if stored else runs_below(text)
        found += map(str, below or [text])
    return found


def _below(text: str) -> str:
    names = [one.name for one in runs_below(text)]
    return _named(names) if names else ": give the path of a run directory or of its checkpoints"


def _named(names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"; below it is the run {names[0]}: give its path"
    more = ", ..." if len(names) > _NAMED_RUNS else ""
    return f"; below it are the runs {', '.join(names[:_NAMED_RUNS])}{more}: give the path of one"


LAST = EpochQuery(None, "last")


@dataclass(frozen=True)
class Selector:
    """A text taken apart: a path or URL, and the epoch that is wanted of it (None: none was named).

    `epoch` is what was written of it, as `open_checkpoint` takes it too.
    """

    path: str
    wish: EpochQuery | None = None
    epoch: str = "last"


@dataclass(frozen=True)
class Selected:
    """One live epoch: where it lies, the log as it was read, and its entry in it."""

    place: RunLocation
    view: LogView
    entry: CommittedPosition

    @property
    def name(self) -> str:
        """How people would write it again: the epoch by its number, and its branch unless it is current."""
        here = self.view.find(self.entry.position.epoch, step=self.entry.position.step)
        seen = here is not None and here.key == self.entry.key
        return f"{self.place.where}@{self.entry.position if seen else self.entry.key}"


def parse_selector(text: str, exists: Callable[[str], bool] | None = None) -> Selector:
    """Take a text apart; raises UsageError for a selector that means no epoch. Touches no checkpoint.

    `exists` says whether a path is there as it stands (by default: asks the file system).
    """
    path, said = split_run(text, exists or (lambda path: not is_url(path) and Path(path).exists()))
    if said is None:
        return Selector(text)
    try:
        return Selector(path, wanted(said), said)
    except UsageError as error:
        raise UsageError(f"{text}: {error}") from None


def with_epoch(text: str, epoch: str) -> str:
    """One text for a place and what an option says of it; raises UsageError where both name an epoch."""
    if parse_selector(text).wish is not None:
        raise UsageError(f"{text} and {epoch!r} both name an epoch: give one of them")
    return f"{text}@{epoch}"


def select(text: str, default: EpochQuery = LAST, *, single_writer: SingleWriter = None) -> Selected:
    """Find the epoch that a text means; `default` where it names none.

    `last` and `best` mean healthy whole epochs of the current branch. Raises UsageError for a place that
    is none and a `best` that nothing defines, UnknownEpochError saying what there is.
    """
    selector = parse_selector(text)
    place = locate(selector.path, single_writer=single_writer)
    with undisturbed():
        view = place.log()
        return Selected(place, view, find_entry(place, view, selector.wish or default))


def find_entry(place: RunLocation, view: LogView, wish: EpochQuery) -> CommittedPosition:
    """The live entry that is meant; raises as `select` does."""
    where = shown(place.where)
    if view.empty:
        raise UnknownEpochError(f"nothing is committed in {where} yet")
    if wish.explicit:
        return named_entry(view, wish, where)
    opened = opening.CheckpointLocation(CountingStorage(place.storage), place.best)
    found = opening.candidates(opened, view, wish, None, lambda _: None)
    if not found:
        raise UnknownEpochError(
            f"no whole epoch in {where} is healthy: torchrelay ckpt why says what became of them"
        )
    return found[0]
