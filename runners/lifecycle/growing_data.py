"""Where data of a configuration grow: their loader, when a run over them ends, the look before an epoch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torchrelay.jobs.config.runner_schema import Runner as RunnerKeys
from torchrelay.jobs.config.schema import Dataset
from torchrelay.jobs.session import Peers, decide
from torchrelay.runners.lifecycle.context import StepContext
from torchrelay.runners.lifecycle.growing import (
    GrowingLoader,
    PartitionsOver,
    known_before,
    partitions_there,
    with_new,
)
from torchrelay.runners.lifecycle.phase_state import PhaseState
from torchrelay.runners.lifecycle.selection import LOADER
from torchrelay.runners.lifecycle.user_objects import made, made_dataset


def grows(runner: RunnerKeys, dataset: Dataset) -> bool:
    """Whether the data of an epoch are looked up before it."""
    return dataset.grows or runner.epochs_per_partition is not None


def growing_loader(
    kind: type, dataset: Dataset, workspace: Path, runner: RunnerKeys, options: Mapping[str, Any]
) -> GrowingLoader:
    """A loader over data that are read by a reader of class `kind`, made anew for the files of an epoch."""

    def there() -> list[list[str]]:
        return partitions_there(dataset.data_path, workspace)

    def read(files: Sequence[str]) -> Any:
        of_epoch = replace(dataset, data_path=tuple(str(workspace / one) for one in files))
        return made_dataset(made(kind, of_epoch), of_epoch)

    per = runner.epochs_per_partition
    return GrowingLoader(there, read, dataset.batch_size, per_partition=per, **options)


def look(phase: PhaseState, peers: Peers) -> None:
    """Before an epoch: have its data looked up, where they grow."""
    if isinstance(phase.loader, GrowingLoader):
        phase.loader.look(peers)


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
    known = known_before(run_dir, blob)
    return len(with_new(known, loader.there())) * (loader.per_partition or 1)
