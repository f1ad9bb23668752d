"""Where the built-in run is tried: below a local directory, or below a fresh prefix of a store.

Objects are copied by this process through fsspec; a prepared run is kept in memory, for it is small.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from torchrelay.chaos import power
from torchrelay.chaos import scenarios as schedule
from torchrelay.chaos.faults import Call, Fault, PlanFile, may_be_silent_in_store, read_calls
from torchrelay.chaos.processes import Nursery, Order, Worker, scratch
from torchrelay.chaos.scenarios import (
    CHECK,
    SCENARIOS,
    Faults,
    Prepared,
    Scenario,
    StoreTree,
    demand,
    prepare,
)
from torchrelay.checkpoint.storage.base import SingleWriter, refusal
from torchrelay.checkpoint.storage.object_store import ObjectStorage
from torchrelay.checkpoint.storage.open import joined, shown
from torchrelay.errors import RelayError, StorageError, UsageError
from torchrelay.records import dataclass

_OWN_PROCESS = ("memory",)
"""File systems that end with the process that fills them."""


@dataclass(frozen=True)
class Prefix:
    """A place in a store that holds nothing but ours."""

    url: str
    tree: StoreTree
    single_writer: SingleWriter

    def below(self, name: str) -> Prefix:
        """A place in it."""
        return replace(
            self, url=joined(self.url, name), tree=StoreTree(self.tree.system, f"{self.tree.root}/{name}")
        )


@contextmanager
def fresh_prefix(url: str, single_writer: SingleWriter = None) -> Iterator[Prefix]:
    """A new prefix below the URL, removed with all that is in it; nothing else is looked at.

    Runs are single writers if it is unknown whether the store creates exclusively. Raises UsageError unless
    `url` is a URL of a store, StorageError if the store does not answer.
    """
    storage = ObjectStorage.open(url, "the storage", single_writer)
    if set(_OWN_PROCESS) & {storage.system.protocol, *storage.system.protocol}:
        raise UsageError(
            f"{shown(url)} lives in one process alone, and trials are processes: give a store that all see"
        )
    name = f"torchrelay-chaos-{secrets.token_hex(6)}"
    made = Prefix(joined(url, name), StoreTree(storage.system, f"{storage.root}/{name}"),
                  single_writer or ("external" if storage.doubt else None))  # fmt: skip
    with _told(url, "write to"):
        if storage.doubt and not storage.system.isdir(storage.root):
            raise UsageError(f"{shown(url)} is not a directory: give one, a new one is made in it")
        made.tree.write("marker", b"torchrelay chaos works below this prefix, and removes it\n")
    try:
        yield made
    finally:
        with _told(made.url, "remove"):
            made.tree.remove()


@contextmanager
def _told(url: str, verb: str) -> Iterator[None]:
    try:
        yield
    except RelayError:
        raise
    except Exception as error:
        raise refusal(shown(url), verb, error) from error


@dataclass(frozen=True)
class Calls:
    """What a struck process has written down: see `store_faults`."""

    log: Path

    @property
    def struck(self) -> str:
        """See `Struck`."""
        file = Path(f"{self.log}.struck")
        return file.read_text() if file.exists() else ""

    @property
    def fired(self) -> int:
        """See `Struck`."""
        return int(bool(self.struck))

    def remove(self) -> None:
        """Delete both files."""
        for file in (self.log, Path(f"{self.log}.struck")):
            file.unlink(missing_ok=True)


@dataclass(frozen=True)
class StoredCopy:
    """A run at a prefix of its own; see `Trial`."""

    scenario: Scenario
    prefix: Prefix
    oracle: Path

    @property
    def place(self) -> str:
        """The URL."""
        return self.prefix.url

    @property
    def calls(self) -> Calls:
        """Where its calls are written down."""
        return Calls(self.oracle.with_suffix(".calls"))

    def struck(self, plan: PlanFile, fault: Fault | None, limit_secs: float) -> tuple[Order, Calls]:
        """See `Trial`; the preloaded library and its plan have no part in it."""
        told = {"fault": str(fault or ""), "log": str(self.calls.log)}
        order = self.order(self.scenario.program, limit_secs, until=self.scenario.until, struck=told)
        return order, self.calls

    def undisturbed(self, limit_secs: float) -> Order:
        """See `Trial`."""
        return self.order(self.scenario.program, limit_secs, until=self.scenario.until)

    def check(self, limit_secs: float) -> Order:
        """See `Trial`."""
        return self.order(CHECK, limit_secs)

    def order(self, function: str, limit_secs: float, **more: Any) -> Order:
        """An order to a function of `target` or `checks`."""
        options = {**self.scenario.options, "single_writer": self.prefix.single_writer}
        arguments = {
            "run": self.place, "oracle": str(self.oracle), "large": self.scenario.large,
            "options": options, **more,
        }  # fmt: skip
        return Order(function, arguments, None, limit_secs)

    def may_be_silent(self, fault: Fault, struck: str) -> bool:
        """See `Trial`."""
        return may_be_silent_in_store(fault, struck)

    def keep(self, where: Path) -> None:
        """See `Trial`: the objects become files."""
        for path in self.prefix.tree.paths():
            (where / path).parent.mkdir(parents=True, exist_ok=True)
            (where / path).write_bytes(self.prefix.tree.read(path))

    def remove(self) -> None:
        """See `Trial`."""
        self.prefix.tree.remove()
        self.calls.remove()
        self.oracle.unlink(missing_ok=True)


@dataclass(frozen=True)
class StoredRun:
    """A prepared run: its objects and its oracle, in memory; see `Ready`."""

    scenario: Scenario
    top: Prefix
    objects: Mapping[str, bytes]
    acknowledged: bytes
    calls: tuple[Call, ...] = ()

    @property
    def reads(self) -> tuple[Call, ...]:
        """The same calls: in a store reads are always counted."""
        return self.calls

    def copy(self, where: Path) -> StoredCopy:
        """Put the objects at a prefix that was not used before."""
        copy = StoredCopy(self.scenario, self.top.below(f"{where.parent.name}-{where.name}"),
                          where.with_name(f"{where.name}.oracle"))  # fmt: skip
        for path, data in self.objects.items():
            copy.prefix.tree.write(path, data)
        if self.acknowledged:
            copy.oracle.write_bytes(self.acknowledged)
        return copy

    def files(self) -> list[tuple[str, int]]:
        """See `Ready`."""
        return [(path, len(data)) for path, data in sorted(self.objects.items()) if data]


def prepare_stored(
    scenario: Scenario, top: Prefix, home: Path, nursery: Nursery, plan: PlanFile
) -> StoredRun:
    """Make what lies there before, and count the calls of what follows.

    Raises StorageError where the run does not even work undisturbed.
    """
    home.mkdir(parents=True)
    base = StoredRun(scenario, top, {}, b"").copy(home / "base")
    if scenario.before is not None:
        demand(nursery, base.order(scenario.program, 120.0, until=scenario.before))
    if scenario.torn:
        _tear(base, top, home, nursery, plan)
    made = _as_it_is(base, top)
    base.remove()
    return replace(made, calls=_counted(made.copy(home / "count"), nursery, plan))


def _as_it_is(copy: StoredCopy, top: Prefix) -> StoredRun:
    tree = copy.prefix.tree
    known = copy.oracle.read_bytes() if copy.oracle.exists() else b""
    return StoredRun(copy.scenario, top, {path: tree.read(path) for path in tree.paths()}, known)


def _counted(copy: StoredCopy, nursery: Nursery, plan: PlanFile) -> tuple[Call, ...]:
    order, told = copy.struck(plan, None, 120.0)
    demand(nursery, order)
    calls = read_calls(told.log, Path("/"))
    copy.remove()
    return calls


def _tear(base: StoredCopy, top: Prefix, home: Path, nursery: Nursery, plan: PlanFile) -> None:
    """Kill the next save when its manifest is written."""
    calls = _counted(_as_it_is(base, top).copy(home / "torn"), nursery, plan)
    at = next(
        one.number for one in calls if one.kind in ("create", "write") and one.path.endswith("manifest.json")
    )
    order, told = base.struck(plan, Fault("kill", at, "after"), 120.0)
    if not nursery.run(order).killed or not told.fired:
        raise StorageError("the writer of the scenario takeover was not killed")
    told.remove()


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
        """The options that the job needs there."""

    def fresh(self, worker: Worker) -> str:
        """A place for a run where nothing is yet."""

    def no_power(self, system: power.FileSystem) -> str | None:
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

    def no_power(self, system: power.FileSystem) -> str | None:
        """See `Ground`."""
        return power.why_not(system, self.directory)


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

    def no_power(self, system: power.FileSystem) -> str | None:
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
