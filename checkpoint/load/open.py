"""Resolve a path, URL or storage and an epoch to a storage, a log and a verified entry."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from torchrelay.checkpoint.format.position import CommittedPosition
from torchrelay.checkpoint.load.info import glance
from torchrelay.checkpoint.load.lookup import nearest_directory
from torchrelay.checkpoint.load.verify import Verification, VerificationStatus, verify_epoch
from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.log.record import has_job, holds_job
from torchrelay.checkpoint.log.view import EpochQuery, LogView, best_first, named_entry, whole_epochs
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.checkpoint.storage.open import FILE, NOTES, CountingStorage, is_url, joined, storage_of
from torchrelay.errors import NoProvableEpochError, StorageError, UnknownEpochError, UsageError
from torchrelay.jobs.runtime import is_directory
from torchrelay.records import Json, dataclass

Best = tuple[str, str]
Say = Callable[[str], None]


@dataclass(frozen=True)
class CheckpointLocation:
    """A storage with checkpoints, and the metric that its run uses for `best`, if any."""

    storage: CountingStorage
    best: Best | None = None

    @property
    def url(self) -> str:
        """The URL, for messages."""
        return self.storage.url


def place_of(where: str | os.PathLike[str] | Storage) -> CheckpointLocation:
    """The checkpoints of a run directory, a `db_prefix` or a storage; raises UsageError for all else."""
    if isinstance(where, Storage):
        return CheckpointLocation(CountingStorage(where))
    if not isinstance(where, (str, os.PathLike)):
        raise UsageError(f"invalid path {where!r}: expected a run directory")
    if isinstance(where, str) and is_url(where) and not where.startswith(FILE):
        here = storage_of(where, "the place")
        for one in (here, storage_of(joined(where, "checkpoints"), "the place")):
            if holds_job(one):  # a prefix, or a run
                return CheckpointLocation(CountingStorage(one), None if one is here else _best_at(here))
        raise UsageError(f"{where} holds no checkpoints: give the prefix that the manager was given")
    if where == "":
        raise UsageError("an empty text is not a path: give a run directory")
    path = Path(where.removeprefix(FILE) if isinstance(where, str) else where)
    there = is_directory(path)
    if not there:
        run, at, epoch = str(path).rpartition("@")
        meant = f" (did you mean {run}, and {epoch!r} as the epoch?)"
        if not (at and run and Path(run).is_dir()):
            meant = nearest_directory(path)
        why = "a file" if there is False else f"not there{meant}"
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


def _best_at(run: Storage) -> Best | None:
    try:
        return best_in(json.loads(run.read_range("run.json", 0, run.stat("run.json") or 0)).get("best"))
    except (OSError, ValueError, AttributeError, RecursionError):
        return None


def best_in(said: Json) -> Best | None:
    """The metric and direction that `run.json` calls best; None for anything odd."""
    good = (
        isinstance(said, list) and len(said) == 2 and isinstance(said[0], str) and said[1] in ("min", "max")
    )
    return (said[0], said[1]) if good else None


def best_of_run(run: Path) -> Best | None:
    """The metric in `run.json`; None for a file that is malformed or absent."""
    return _best_at(LocalStorage(run))


def verified_entry(
    place: CheckpointLocation, view: LogView, wish: EpochQuery, best: Best | None, say: Say
) -> Verification:
    """The chosen epoch, with its manifest verified.

    A number is never replaced: it raises DamagedError, StorageError or UnknownEpochError; its files are
    checked when they are read. `last` and `best` need all files present and of the right size; otherwise the
    next epoch is taken and reported. Raises NoProvableEpochError if none is left, and StorageError for an
    epoch that cannot be checked, because an older one would hide that.
    """
    if wish.explicit:
        return verify_epoch(place.storage, named_entry(view, wish, place.url), want=())
    reasons: list[str] = []
    for entry in candidates(place, view, wish, best, say):
        result = verify_epoch(place.storage, entry, level="sizes")
        if result.outcome is VerificationStatus.UNKNOWN:
            raise StorageError(f"epoch {entry.position} in {place.url} cannot be read now: {result.reason}")
        if result.verified:
            if reasons:
                say(f"{'; '.join(reasons)}. Epoch {entry.position} is used instead")
            return result
        reasons.append(f"epoch {entry.position} is damaged: {result.reason}")
    if reasons:
        raise NoProvableEpochError(
            f"no epoch in {place.url} is undamaged: {'; '.join(reasons)}. Give an epoch's number to "
            "load what is left of it"
        )
    raise UnknownEpochError(f"nothing is committed in {place.url} yet")


def candidates(
    place: CheckpointLocation, view: LogView, wish: EpochQuery, best: Best | None, say: Say
) -> Sequence[CommittedPosition]:
    """Candidates for `last` or `best`, best first, not verified. Empty without commits.

    Raises UsageError without a metric for "best", UnknownEpochError if no epoch has a value of it.
    """
    line = [entry for entry in whole_epochs(view, wish.branch) if entry.healthy]
    if wish.word == "last" or not line:
        return line
    chosen = best or place.best
    if chosen is None:
        raise UsageError('epoch="best" needs a metric, and the run names none: give best=("val/acc", "max")')
    if len(chosen) != 2 or chosen[1] not in ("min", "max"):
        raise UsageError(
            f'invalid best={chosen!r}: expected a metric and a direction, such as ("val/acc", "max")'
        )
    name, mode = chosen
    found: dict[str, float] = {}
    known: set[str] = set()
    for entry in line:
        try:
            metrics = glance(place.storage, entry).facts.metrics
        except OSError as error:
            say(f"epoch {entry.position} is skipped when choosing the best one: {error}")
            continue
        known.update(metrics)
        if name in metrics:
            found[entry.attempt_name] = metrics[name]
    ordered = best_first(line, found, mode)
    if not ordered:
        there = ", ".join(sorted(known)) or "no metric"
        raise UnknownEpochError(
            f"no epoch in {place.url} has a value of metric {name!r} (found: {there}); choose another by "
            "best=(METRIC, 'max' or 'min') of JobRunner or open_checkpoint"
        )
    return ordered


def read_log(place: CheckpointLocation) -> LogView:
    """Read the log of a location; raises UnknownEpochError if nothing is committed."""
    view = open_log(place.storage)
    if view.empty:
        raise UnknownEpochError(f"nothing is committed in {place.url} yet")
    return view
