"""Where the built-in run is tried: below a local directory, or below a prefix of a store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from torchrelay.checkpoint.storage.base import SingleWriter
from torchrelay.runners.chaos import images, schedule
from torchrelay.runners.chaos.pool import Worker, scratch
from torchrelay.runners.chaos.scenarios import SCENARIOS, Prepared, Scenario, prepare
from torchrelay.runners.chaos.schedule import Faults
from torchrelay.runners.chaos.stored import Prefix, StoredRun, fresh_prefix, prepare_stored


class Ground(Protocol):
    """A place for trials; processes and what they note have a local directory in any case."""

    directory: Path
    kinds: Mapping[str, Faults]

    @property
    def scenarios(self) -> Sequence[Scenario]:
        """Those that are played unless others are asked for."""

    def prepare(self, scenario: Scenario, worker: Worker) -> Prepared | StoredRun:
        """Make a scenario ready to be copied; StorageError where the run fails undisturbed."""

    def options(self) -> Mapping[str, object]:
        """What the job needs to be told there."""

    def fresh(self, worker: Worker) -> str:
        """A place for a run where nothing is yet."""

    def no_power(self, system: images.FileSystem) -> str | None:
        """Why there can be no power cut."""


class LocalGround:
    """A directory that is ours."""

    kinds = schedule.KINDS
    scenarios = SCENARIOS

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def prepare(self, scenario: Scenario, worker: Worker) -> Prepared:
        """See `Ground`."""
        return prepare(scenario, self.directory, worker.nursery)

    def options(self) -> Mapping[str, object]:
        """See `Ground`."""
        return {}

    def fresh(self, worker: Worker) -> str:
        """See `Ground`."""
        return str(worker.fresh())

    def no_power(self, system: images.FileSystem) -> str | None:
        """See `Ground`."""
        return images.why_not(system, self.directory)


class StoreGround:
    """A prefix that is ours. No scenario is about the page cache there."""

    kinds = schedule.STORE_KINDS
    scenarios = tuple(one for one in SCENARIOS if not one.large)

    def __init__(self, directory: Path, top: Prefix) -> None:
        self.directory, self.top = directory, top

    def prepare(self, scenario: Scenario, worker: Worker) -> StoredRun:
        """See `Ground`."""
        home = self.directory / f"base-{scenario.name}"
        return prepare_stored(scenario, self.top, home, worker.nursery, worker.plan)

    def options(self) -> Mapping[str, object]:
        """See `Ground`."""
        return {"single_writer": self.top.single_writer}

    def fresh(self, worker: Worker) -> str:
        """See `Ground`."""
        where = worker.fresh()
        return self.top.below(f"{where.parent.name}-{where.name}").url

    def no_power(self, system: images.FileSystem) -> str | None:
        """See `Ground`."""
        return f"{self.top.url} lies on no device of this machine"


@contextmanager
def ground(where: Path | str | None, single_writer: SingleWriter = None) -> Iterator[Ground]:
    """A fresh place below a directory (None: in memory) or a URL, which goes with all that is in it."""
    with scratch(None if isinstance(where, str) else where) as directory:
        if not isinstance(where, str):
            yield LocalGround(directory)
            return
        with fresh_prefix(where, single_writer) as top:
            yield StoreGround(directory, top)
