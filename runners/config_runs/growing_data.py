"""Growing data: select the files of each epoch before it begins, and stop when no data is left.

A *partition* is a file in `data_path`, or an entry of a directory in it: each file there, and each directory
with its files. Partitions keep the order in which they were found; those found together are sorted by name,
and new ones are always appended. So an interrupted epoch continues over the files that it began with, and
partition n is the same after a restart.
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
"""A name, then its files: paths relative to the workspace if they are inside it."""


def partitions_there(data_path: Sequence[str], workspace: Path) -> list[Partition]:
    """List the existing partitions; hidden names and missing paths are skipped."""
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
    """Append new partitions to the known ones, keeping the order of the latter."""
    names = {one[0] for one in known}
    return [*known, *(one for one in there if one[0] not in names)]


class GrowingLoader(EpochLoader):
    """An EpochLoader that selects its data by `look` before each epoch.

    `there` lists partitions, `read` makes a dataset of files. With `per_partition` each partition gets that
    many epochs; without it an epoch covers all known partitions. `known` is part of the state.
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
        """Select the data of the epoch that begins, on rank 0 for all. UsageError if none is left."""
        if not self.samples_done:
            self.known = decide(peers, "data of the epoch", lambda: with_new(self.known, self.there()))
            self._open()

    def next_epochs(self) -> int:
        """Return the number of epochs that have data, counted from the beginning of the run."""
        return len(with_new(self.known, self.there())) * (self.per_partition or 1)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of an EpochLoader and the partitions known in this epoch."""
        return {**super().state_dict(), "known": [list(one) for one in self.known]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state; the files of an interrupted epoch are opened again."""
        self.known = [list(one) for one in state["known"]]
        if int(state["samples_done"]):
            self._open(int(state["epoch"]))
        super().load_state_dict(state)

    def _batches(self, *args: Any) -> Any:
        """Iterate over batches; raises NotAllowedNowError before the first `look`."""
        if not self._files:
            raise NotAllowedNowError(
                "the data of this epoch is not selected yet: call loader.look(peers) first"
            )
        return super()._batches(*args)

    def _open(self, epoch: int | None = None) -> None:
        """Open the files of an epoch; raises UsageError if there are none."""
        epoch, chosen = self.epoch if epoch is None else epoch, self.known
        if self.per_partition is not None:
            at = epoch // self.per_partition
            chosen = self.known[at : at + 1]
        if not chosen:
            raise UsageError(f"no data for epoch {epoch + 1}: only {len(self.known)} partitions are known")
        files = [file for partition in chosen for file in partition[1:]]
        if files != self._files:
            self._take(self._read(files))
            self._files = files


@dataclass(frozen=True)
class PartitionsOver:
    """Stop when a loader has no partition left; `at_start` is the number of epochs with data at the launch.

    A limit: new data lets a finished run continue.
    """

    name: str
    loader: GrowingLoader
    at_start: int
    rule: Rule = "rank0"
    limit: bool = True

    def ask(self, ctx: Any) -> StopAnswer:
        """Compare with the finished epochs; before the loader is loaded, use the agreed number."""
        loaded = getattr(ctx, "workspace", None) is not None
        there = max(self.at_start, self.loader.next_epochs()) if loaded else self.at_start
        if ctx.epoch < there:
            return StopAnswer(False)
        return StopAnswer(True, f"no partition of the data is left after {there} epochs")


_NOTHING_YET = [None]
"""Placeholder dataset until the first `look`; it is never read."""


def _below(path: Path) -> list[Path]:
    """List the files below a directory, except hidden ones."""
    found = (one for one in path.rglob("*") if one.is_file())
    return sorted(
        one for one in found if not any(part.startswith(".") for part in one.relative_to(path).parts)
    )


def _name(path: Path, workspace: Path) -> str:
    """Return the path relative to the workspace if it is inside, else absolute."""
    text = os.path.abspath(path)  # noqa: PTH100 - without following links
    return os.path.relpath(text, workspace) if text.startswith(f"{workspace}{os.sep}") else text


def growing_loader(
    kind: type, dataset: Dataset, workspace: Path, runner: RunnerSection, options: Mapping[str, Any]
) -> GrowingLoader:
    """Create a loader whose reader of class `kind` is created again for the files of each epoch."""

    def there() -> list[list[str]]:
        return partitions_there(dataset.data_path, workspace)

    def read(files: Sequence[str]) -> Any:
        of_epoch = replace(dataset, data_path=tuple(str(workspace / one) for one in files))
        return made_dataset(made(kind, of_epoch), of_epoch)

    per = runner.epochs_per_partition
    return GrowingLoader(there, read, dataset.batch_size, per_partition=per, **options)


def ends_of_data(context: StepContext) -> Iterator[PartitionsOver]:
    """Yield the stop conditions of phases that train partition by partition; identical on all ranks."""
    for phase in context.phases.values():
        loader = phase.loader
        if not isinstance(loader, GrowingLoader) or loader.per_partition is None:
            continue
        work = partial(_epochs, context.run_dir, f"{phase.name}.{LOADER}", loader)
        count = decide(context.session.peers, "partitions", work)
        yield PartitionsOver(f"{phase.name}.data", loader, count)


def _epochs(run_dir: str, blob: str, loader: GrowingLoader) -> int:
    """Count the epochs that have data, including partitions that the newest epoch of the run knew."""
    known: list[Partition] = []
    with suppress(RelayError):
        found = open_checkpoint(run_dir).value(blob)
        known = [list(one) for one in found.get("known", ())] if isinstance(found, dict) else []
    return len(with_new(known, loader.there())) * (loader.per_partition or 1)
