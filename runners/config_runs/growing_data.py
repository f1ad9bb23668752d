"""Data that grow: which files an epoch is over, looked up before it begins, and when a run over them ends.

A *partition* is a file among `data_path`, or what lies in a directory among them: each file there, each
directory there with its files. Partitions are taken in the order in which they were found, those found at
once by name; none is ever put before one that was known. So an epoch that was left in its middle goes on over
the very files that it began with, whatever came meanwhile, and partition n is the same one after a restart.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torchrelay.checkpoint.load.checkpoint import open_checkpoint
from torchrelay.errors import NotAllowedNowError, RelayError, UsageError
from torchrelay.jobs.config.runner_schema import RunnerSection
from torchrelay.jobs.config.schema import Dataset
from torchrelay.jobs.data.loader import EpochLoader
from torchrelay.jobs.session import Peers, decide
from torchrelay.jobs.stop import Rule, StopAnswer
from torchrelay.records import dataclass
from torchrelay.runners.config_runs.context import StepContext
from torchrelay.runners.config_runs.selection import LOADER
from torchrelay.runners.config_runs.user_objects import made, made_dataset

Partition = list[str]
"""Its name, then its files: paths relative to the workspace where they lie below it."""


def partitions_there(data_path: Sequence[str], workspace: Path) -> list[Partition]:
    """The partitions that lie there now; what is not there yet is none. Hidden names are passed over."""
    found: dict[str, Partition] = {}
    for text in data_path:
        path = Path(text)
        inside = (one for one in path.iterdir() if not one.name.startswith(".")) if path.is_dir() else (path,)
        for one in sorted(inside):
            files = _below(one) if one.is_dir() else [one] if one.is_file() else []
            if files:
                name = _name(one, workspace)
                found.setdefault(name, [name, *(_name(file, workspace) for file in files)])
    return [found[name] for name in sorted(found)]


def with_new(known: Sequence[Partition], there: Sequence[Partition]) -> list[Partition]:
    """What was known, in its order, then what is new. Pure."""
    names = {one[0] for one in known}
    return [*known, *(one for one in there if one[0] not in names)]


class GrowingLoader(EpochLoader):
    """An EpochLoader whose data are looked up by `look`, before each epoch.

    `there` lists partitions, `read` makes a dataset of files. With `per_partition` an epoch is over one
    partition, so many times; without it over all that are known. `known` is state, beside that of an
    EpochLoader.
    """

    def __init__(
        self,
        there: Callable[[], list[Partition]],
        read: Callable[[Sequence[str]], Any],
        batch_size: int,
        *,
        per_partition: int | None = None,
        **options: Any,
    ) -> None:
        self.known: list[Partition] = []
        self.per_partition = per_partition
        self.there, self._read = there, read
        self._files: list[str] = []
        super().__init__(_NOTHING_YET, batch_size, **options)

    def look(self, peers: Peers) -> None:
        """Find out, on rank 0 and for all, what the epoch that begins is over; inside of one do nothing.

        Raises UsageError where there is no data for it.
        """
        if not self.samples_done:
            self.known = decide(peers, "data of the epoch", lambda: with_new(self.known, self.there()))
            self._open()

    def next_epochs(self) -> int:
        """How many epochs there are data for, counted from the run's beginning, as far as is known now."""
        return len(with_new(self.known, self.there())) * (self.per_partition or 1)

    def state_dict(self) -> dict[str, Any]:
        """As of an EpochLoader, and the partitions that the running epoch knows."""
        return {**super().state_dict(), "known": [list(one) for one in self.known]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As of an EpochLoader; the files of an epoch that was begun are read again."""
        self.known = [list(one) for one in state["known"]]
        if int(state["samples_done"]):
            self._open(int(state["epoch"]))
        super().load_state_dict(state)

    def _batches(self, *args: Any) -> Any:
        if not self._files:
            raise NotAllowedNowError("nobody has looked which data there are: call loader.look(peers) first")
        return super()._batches(*args)

    def _open(self, epoch: int | None = None) -> None:
        epoch, chosen = self.epoch if epoch is None else epoch, self.known
        if self.per_partition is not None:
            at = epoch // self.per_partition
            chosen = self.known[at : at + 1]
        if not chosen:
            raise UsageError(
                f"there is no data for epoch {epoch + 1}: {len(self.known)} partitions are known"
            )
        files = [file for partition in chosen for file in partition[1:]]
        if files != self._files:
            self._take(self._read(files))
            self._files = files


@dataclass(frozen=True)
class PartitionsOver:
    """Stop when a loader has no partition left; `at_start` is for how many epochs there was data then.

    A limit: data that came since make a run go on that had ended.
    """

    name: str
    loader: GrowingLoader
    at_start: int
    rule: Rule = "rank0"
    limit: bool = True

    def ask(self, ctx: Any) -> StopAnswer:
        """Compare with the epochs done; at a position that is not loaded, by what all agreed on."""
        loaded = getattr(ctx, "workspace", None) is not None
        there = max(self.at_start, self.loader.next_epochs()) if loaded else self.at_start
        if ctx.epoch < there:
            return StopAnswer(False)
        return StopAnswer(True, f"no partition of the data is left after {there} epochs")


_NOTHING_YET = [None]
"""A dataset that nobody reads: its only sample is in the place of those that are not looked up yet."""


def _below(path: Path) -> list[Path]:
    found = (one for one in path.rglob("*") if one.is_file())
    return sorted(
        one for one in found if not any(part.startswith(".") for part in one.relative_to(path).parts)
    )


def _name(path: Path, workspace: Path) -> str:
    text = os.path.abspath(path)  # noqa: PTH100 - without following links
    return os.path.relpath(text, workspace) if text.startswith(f"{workspace}{os.sep}") else text


def growing_loader(
    kind: type, dataset: Dataset, workspace: Path, runner: RunnerSection, options: Mapping[str, Any]
) -> GrowingLoader:
    """A loader over data that are read by a reader of class `kind`, made anew for the files of an epoch."""

    def there() -> list[list[str]]:
        return partitions_there(dataset.data_path, workspace)

    def read(files: Sequence[str]) -> Any:
        of_epoch = replace(dataset, data_path=tuple(str(workspace / one) for one in files))
        return made_dataset(made(kind, of_epoch), of_epoch)

    per = runner.epochs_per_partition
    return GrowingLoader(there, read, dataset.batch_size, per_partition=per, **options)


def ends_of_data(context: StepContext) -> Iterator[PartitionsOver]:
    """When a profile is over that goes from partition to partition; alike on all ranks."""
    for phase in context.phases.values():
        loader = phase.loader
        if not isinstance(loader, GrowingLoader) or loader.per_partition is None:
            continue
        work = partial(_epochs, context.run_dir, f"{phase.name}.{LOADER}", loader)
        count = decide(context.session.peers, "partitions", work)
        yield PartitionsOver(f"{phase.name}.data", loader, count)


def _epochs(run_dir: str, blob: str, loader: GrowingLoader) -> int:
    """How many epochs there are data for, by what the newest epoch of the run knew, if there is one."""
    known: list[Partition] = []
    with suppress(RelayError):
        found = open_checkpoint(run_dir).value(blob)
        known = [list(one) for one in found.get("known", ())] if isinstance(found, dict) else []
    return len(with_new(known, loader.there())) * (loader.per_partition or 1)
