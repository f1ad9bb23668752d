"""From what a user calls a checkpoint to a storage, a log and a proved entry."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from torchrelay.checkpoint.format.position import CommittedPosition
from torchrelay.checkpoint.load.info import glance
from torchrelay.checkpoint.load.lookup import nearest_directory
from torchrelay.checkpoint.load.verify import Proof, VerificationStatus, prove
from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.log.record import has_job, holds_job
from torchrelay.checkpoint.log.view import EpochQuery, LogView, best_first, named_entry, whole_epochs
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.checkpoint.storage.open import FILE, NOTES, CountingStorage, is_url, joined, storage_of
from torchrelay.errors import NoProvableEpochError, StorageError, UnknownEpochError, UsageError
from torchrelay.jobs.runtime import is_directory
from torchrelay.records import dataclass

Best = tuple[str, str]
Say = Callable[[str], None]


@dataclass(frozen=True)
class CheckpointLocation:
    """Where checkpoints lie, and the metric that the run there calls best, if it said one."""

    storage: CountingStorage
    best: Best | None = None

    @property
    def url(self) -> str:
        """For messages."""
        return self.storage.url


def place_of(where: str | os.PathLike[str] | Storage) -> CheckpointLocation:
    """A run directory (it has `checkpoints/`), a `db_prefix`, or a storage.

    Raises UsageError for what is none of them.
    """
    if isinstance(where, Storage):
        return CheckpointLocation(CountingStorage(where))
    if not isinstance(where, (str, os.PathLike)):
        raise UsageError(f"{where!r} is no path: give a run directory")
    if isinstance(where, str) and is_url(where) and not where.startswith(FILE):
        here = storage_of(where, "the place")
        for one in (here, storage_of(joined(where, "checkpoints"), "the place")):
            if holds_job(one):  # a prefix, or a run
                return CheckpointLocation(CountingStorage(one), None if one is here else _best_at(here))
        raise UsageError(f"{where} holds no checkpoints: give the prefix that the manager was given")
    if where == "":
        raise UsageError("an empty text names no run: give a run directory")
    path = Path(where.removeprefix(FILE) if isinstance(where, str) else where)
    there = is_directory(path)
    if not there:
        why = "a file" if there is False else f"not there{_meant(path)}"
        raise UsageError(f"{path} is {why}: give a run directory")
    if is_directory(path / "checkpoints"):
        return CheckpointLocation(CountingStorage(LocalStorage(path / "checkpoints")), best_of_run(path))
    if not has_job(path):
        raise UsageError(
            f"{path} holds no checkpoints: give a run directory (it has checkpoints/) or the prefix "
            "that the manager was given"
        )
    storage = LocalStorage(path)
    if storage.stat(NOTES) is not None:
        from torchrelay.checkpoint.log.tiered_storage import opened

        storage = opened(path)
    return CheckpointLocation(CountingStorage(storage))


def _meant(path: Path) -> str:
    run, at, epoch = str(path).rpartition("@")
    if at and run and Path(run).is_dir():
        return f" (did you mean {run}, and {epoch!r} as the epoch?)"
    return nearest_directory(path)


def _best_at(run: Storage) -> Best | None:
    try:
        said = json.loads(run.read_range("run.json", 0, run.stat("run.json") or 0)).get("best")
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    good = (
        isinstance(said, list) and len(said) == 2 and isinstance(said[0], str) and said[1] in ("min", "max")
    )
    return (said[0], said[1]) if good else None


def best_of_run(run: Path) -> Best | None:
    """The metric in `run.json`; a file that is odd or absent says nothing."""
    return _best_at(LocalStorage(run))


def proved_entry(
    place: CheckpointLocation, view: LogView, wish: EpochQuery, best: Best | None, say: Say
) -> Proof:
    """The epoch that is meant, its manifest proved.

    An explicit epoch is never replaced: DamagedError, StorageError, or UnknownEpochError; whether its
    files are there shows when they are needed. Of `last` and `best` the files must all be there and as
    long as they were; else the next one is taken, and that is said; NoProvableEpochError if none is
    left. Where an epoch cannot be looked at (I/O), StorageError: an older one would hide that.
    """
    if wish.explicit:
        return prove(place.storage, named_entry(view, wish, place.url), want=())
    reasons: list[str] = []
    for entry in candidates(place, view, wish, best, say):
        proof = prove(place.storage, entry, level="sizes")
        if proof.outcome is VerificationStatus.UNKNOWN:
            raise StorageError(f"epoch {entry.position} in {place.url} cannot be read now: {proof.reason}")
        if proof.proved:
            if reasons:
                say(f"{'; '.join(reasons)}. Epoch {entry.position} is used instead")
            return proof
        reasons.append(f"epoch {entry.position} is damaged: {proof.reason}")
    if reasons:
        raise NoProvableEpochError(
            f"no epoch in {place.url} is whole: {'; '.join(reasons)}. An epoch that is asked for by its "
            "number gives what is left of it"
        )
    raise UnknownEpochError(f"nothing is committed in {place.url} yet")


def candidates(
    place: CheckpointLocation, view: LogView, wish: EpochQuery, best: Best | None, say: Say
) -> Sequence[CommittedPosition]:
    """What `last` or `best` may mean, in that order; nothing is proved. Empty where nothing is committed.

    Raises UsageError where no metric says what "best" is, UnknownEpochError where no epoch has a value of it.
    """
    line = [entry for entry in whole_epochs(view, wish.branch) if entry.healthy]
    if wish.word == "last" or not line:
        return line
    chosen = best or place.best
    if chosen is None:
        raise UsageError(
            'epoch="best" needs a metric, and the run names none: give best=("val/acc", "max") here, '
            "or when it is trained (in a configuration: `keep_best`)"
        )
    if len(chosen) != 2 or chosen[1] not in ("min", "max"):
        raise UsageError(f'best={chosen!r} is no metric and direction: give for example ("val/acc", "max")')
    return _by_metric(place, line, chosen, say)


def _by_metric(
    place: CheckpointLocation, line: Sequence[CommittedPosition], best: Best, say: Say
) -> Sequence[CommittedPosition]:
    name, mode = best
    found: dict[str, float] = {}
    known: set[str] = set()
    for entry in line:
        try:
            metrics = glance(place.storage, entry).metrics
        except OSError as error:
            say(f"epoch {entry.position} is left out of the choice of the best one: {error}")
            continue
        known.update(metrics)
        if name in metrics:
            found[entry.try_name] = metrics[name]
    ordered = best_first(line, found, mode)
    if not ordered:
        there = ", ".join(sorted(known)) or "none at all"
        raise UnknownEpochError(
            f"no epoch in {place.url} has a value of metric {name!r}; there is {there}; "
            "best=(METRIC, 'max' or 'min') of JobRunner or open_checkpoint says another (in a "
            "configuration: `keep_best`)"
        )
    return ordered


def read_log(place: CheckpointLocation) -> LogView:
    """The log of a place; raises UnknownEpochError where nothing is committed."""
    view = open_log(place.storage)
    if view.empty:
        raise UnknownEpochError(f"nothing is committed in {place.url} yet")
    return view
