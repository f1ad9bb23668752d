"""Moments of a run at which faults happen, what lies there before, and which faults are tried."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torchrelay.chaos.faults import ERRNOS, STORE_ERRNOS, Call, Fault, PlanFile, may_be_silent, read_calls
from torchrelay.chaos.processes import Nursery, Order
from torchrelay.checkpoint.storage.open import is_url, open_file_system
from torchrelay.errors import StorageError, UsageError
from torchrelay.records import dataclass


class Tree(Protocol):
    """All files of a run by their paths below it."""

    def paths(self) -> list[str]:
        """All of them, sorted."""

    def read(self, path: str) -> bytes:
        """One whole file."""

    def write(self, path: str, data: bytes) -> None:
        """Put bytes in the place of a file."""


class LocalTree:
    """A directory."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def paths(self) -> list[str]:
        """See `Tree`."""
        return sorted(str(one.relative_to(self.root)) for one in self.root.rglob("*") if one.is_file())

    def read(self, path: str) -> bytes:
        """See `Tree`."""
        return (self.root / path).read_bytes()

    def write(self, path: str, data: bytes) -> None:
        """See `Tree`."""
        (self.root / path).write_bytes(data)


class StoreTree:
    """A prefix of an fsspec file system. Names are as the store has them; ObjectStorage encodes some."""

    def __init__(self, system: Any, root: str) -> None:
        self.system, self.root = system, root

    def paths(self) -> list[str]:
        """See `Tree`."""
        return sorted(str(one)[len(self.root) + 1 :] for one in self.system.find(self.root))

    def read(self, path: str) -> bytes:
        """See `Tree`."""
        return bytes(self.system.cat_file(f"{self.root}/{path}"))

    def write(self, path: str, data: bytes) -> None:
        """See `Tree`."""
        name = f"{self.root}/{path}"
        self.system.makedirs(name.rpartition("/")[0], exist_ok=True)
        self.system.pipe_file(name, data)

    def remove(self) -> None:
        """Everything below the prefix, and the prefix."""
        if self.system.exists(self.root):
            self.system.rm(self.root, recursive=True)


@cache
def tree_of(run: str) -> Tree:
    """The files of a run directory or URL."""
    return StoreTree(*open_file_system(run, "the run")) if is_url(run) else LocalTree(Path(run))


TRAIN = "torchrelay.chaos.child.target:train"
CHECK = "torchrelay.chaos.child.target:check"


@dataclass(frozen=True)
class Scenario:
    """A run that goes from epoch `before` (None: from nothing) to epoch `until`.

    `torn`: its last writer was killed in the middle of a save. `large`: a tensor of so many float32 goes past
    the page cache. `program` is what is struck; the checks know only the real one.
    """

    name: str
    before: int | None
    until: int
    options: Mapping[str, Any] = field(default_factory=dict)
    torn: bool = False
    large: int = 0
    program: str = TRAIN


SCENARIOS = (
    Scenario("first", None, 1),
    Scenario("resume", 1, 3),
    Scenario("retention", 2, 4, {"keep_last": 1, "keep_optimizer_last": 1}),
    Scenario("asynchronous", 1, 3, {"asynchronous": True, "keep_last": 2}),
    Scenario("takeover", 1, 3, torn=True),
    Scenario("large", 1, 2, {"keep_last": 1}, large=(17 << 20) // 4),
)


def scenarios(names: Sequence[str] | None = None) -> tuple[Scenario, ...]:
    """The scenarios of these names, all of them by default; UsageError for a name that there is not."""
    known = {one.name: one for one in SCENARIOS}
    for name in names or ():
        if name not in known:
            raise UsageError(f"there is no scenario {name!r}: choose from {', '.join(known)}")
    return tuple(known[name] for name in names or known)


@dataclass(frozen=True)
class Prepared:
    """A scenario ready to be copied: the run, its oracle, and the calls of an undisturbed continuation."""

    scenario: Scenario
    run: Path
    oracle: Path
    calls: tuple[Call, ...]
    reads: tuple[Call, ...] = ()
    """The same calls, reads of files included."""

    def copy(self, where: Path) -> Copy:
        """Copy the run to `where` and its oracle beside it."""
        oracle = where.with_name(f"{where.name}.oracle")
        if self.run.exists():
            shutil.copytree(self.run, where, copy_function=shutil.copyfile)
        if self.oracle.exists():
            shutil.copyfile(self.oracle, oracle)
        return Copy(self.scenario, where, oracle)

    def files(self) -> list[tuple[str, int]]:
        """See `Ready`."""
        return files_below(self.run)


@dataclass(frozen=True)
class Copy:
    """One copy of a prepared run, for one trial."""

    scenario: Scenario
    run: Path
    oracle: Path

    @property
    def place(self) -> str:
        """See `Trial`."""
        return str(self.run)

    def struck(self, plan: PlanFile, fault: Fault, limit_secs: float) -> tuple[Order, PlanFile]:
        """See `Trial`; the plan is armed."""
        plan.arm(self.run, fault)
        return self.train(plan, limit_secs), plan

    def undisturbed(self, limit_secs: float) -> Order:
        """See `Trial`."""
        return self.train(None, limit_secs)

    def train(self, plan: PlanFile | None, limit_secs: float) -> Order:
        """The order to continue the run under a plan."""
        return self._order(self.scenario.program, plan, limit_secs, until=self.scenario.until)

    def check(self, limit_secs: float) -> Order:
        """See `Trial`."""
        return self._order(CHECK, None, limit_secs)

    def _order(self, function: str, plan: PlanFile | None, limit_secs: float, **more: Any) -> Order:
        arguments = {
            "run": str(self.run), "oracle": str(self.oracle), "large": self.scenario.large,
            "options": dict(self.scenario.options), **more,
        }  # fmt: skip
        return Order(function, arguments, plan.path if plan else None, limit_secs)

    def may_be_silent(self, fault: Fault, struck: str) -> bool:
        """See `Trial`."""
        return may_be_silent(fault, struck, str(self.run))

    def keep(self, where: Path) -> None:
        """See `Trial`."""
        for path in (self.run, self.oracle):
            if path.exists():
                shutil.move(str(path), where / path.name)

    def remove(self) -> None:
        """Delete it."""
        shutil.rmtree(self.run, ignore_errors=True)
        self.oracle.unlink(missing_ok=True)


def files_below(run: Path) -> list[tuple[str, int]]:
    """The files of the checkpoints of a local run that are not empty, sorted: path and bytes."""
    below = run / "checkpoints"
    sizes = {f"checkpoints/{path}": (below / path).stat().st_size for path in LocalTree(below).paths()}
    return [(path, size) for path, size in sizes.items() if size]


def prepare(scenario: Scenario, directory: Path, nursery: Nursery) -> Prepared:
    """Make what lies there before, and count the calls of what follows.

    Raises StorageError where the run does not even work undisturbed.
    """
    home = directory / f"base-{scenario.name}"
    home.mkdir(parents=True)
    base = Copy(scenario, home / "run", home / "oracle")
    plan = PlanFile(home / "plan")
    if scenario.before is not None:
        demand(nursery, base._order(TRAIN, None, 60.0, until=scenario.before))
    if scenario.torn:
        _tear(base, plan, nursery)
    prepared = Prepared(scenario, base.run, base.oracle, ())
    calls, reads = (_counted(prepared, home, plan, nursery, reads) for reads in (False, True))
    plan.close()
    return Prepared(scenario, base.run, base.oracle, calls, reads)


def _counted(
    prepared: Prepared, home: Path, plan: PlanFile, nursery: Nursery, reads: bool
) -> tuple[Call, ...]:
    """The calls of an undisturbed continuation."""
    log = home / f"calls{int(reads)}"
    trial = prepared.copy(home / "count")
    plan.arm(trial.run, None, log=log, reads=reads)
    demand(nursery, trial.train(plan, 60.0))
    trial.remove()
    return read_calls(log, trial.run)


def demand(nursery: Nursery, order: Order) -> None:
    """Carry an order out that must not fail; StorageError otherwise."""
    ended = nursery.run(order)
    if not ended.well or (isinstance(ended.value, dict) and ended.value.get("error")):
        raise StorageError(f"the built-in run fails undisturbed: {ended.reason}; {json.dumps(ended.value)}")


def _tear(base: Copy, plan: PlanFile, nursery: Nursery) -> None:
    """Kill the next save where its manifest is being written."""
    log = plan.path.with_name("torn-calls")
    spare = Prepared(base.scenario, base.run, base.oracle, ()).copy(base.run.with_name("torn"))
    plan.arm(spare.run, None, log=log)
    demand(nursery, spare._order(TRAIN, plan, 60.0, until=int(base.scenario.before or 0) + 1))
    at = next(one.number for one in read_calls(log, spare.run) if one.path.endswith("manifest.json")
              and one.kind == "write")  # fmt: skip
    spare.remove()
    plan.arm(base.run, Fault("kill", at))
    nursery.run(base._order(TRAIN, plan, 60.0, until=int(base.scenario.before or 0) + 1))
    if not plan.fired:
        raise StorageError("the writer of the scenario takeover was not killed")


class Struck(Protocol):
    """What became of a fault."""

    @property
    def fired(self) -> int:
        """How often it happened."""

    @property
    def struck(self) -> str:
        """The first call that it happened to: its sort and its path."""


class Trial(Protocol):
    """A copy of a prepared run, for one trial."""

    @property
    def scenario(self) -> Scenario:
        """The moment that it is in."""

    @property
    def place(self) -> str:
        """The run directory or URL, as errors must name it."""

    @property
    def oracle(self) -> Path:
        """The local file of what was acknowledged."""

    def struck(self, plan: PlanFile, fault: Fault, limit_secs: float) -> tuple[Order, Struck]:
        """The order to continue the run with a fault, and what will be known of that."""

    def undisturbed(self, limit_secs: float) -> Order:
        """The order to continue the run."""

    def check(self, limit_secs: float) -> Order:
        """The order to verify what is there, and to resume."""

    def may_be_silent(self, fault: Fault, struck: str) -> bool:
        """Whether the fault loses nothing, so that it need not be reported."""

    def keep(self, where: Path) -> None:
        """Leave what is there in a local directory."""

    def remove(self) -> None:
        """Delete it."""


class Ready(Protocol):
    """A scenario ready to be copied."""

    @property
    def scenario(self) -> Scenario:
        """The moment that it is in."""

    @property
    def calls(self) -> Sequence[Call]:
        """The calls of an undisturbed continuation."""

    @property
    def reads(self) -> Sequence[Call]:
        """The same, reads of files included."""

    def copy(self, where: Path) -> Trial:
        """A copy for one trial, which may use `where` and what lies beside it under longer names."""

    def files(self) -> Sequence[tuple[str, int]]:
        """The files of its checkpoints that are not empty, sorted: path and bytes."""


_ONCE = ("EINTR",)
"""Errors that say "again": for good they would only say that the system hangs."""
_AFTERWARDS = ("EIO", "EBUSY", "ETIMEDOUT", "ECONNRESET")
"""What a store may answer although it has done what it was asked for."""


def kills(calls: Sequence[Call]) -> Iterator[Fault]:
    """Before and after every call, and in the middle of every write."""
    for call in calls:
        yield Fault("kill", call.number)
        yield Fault("kill", call.number, "after")
        if call.kind == "write":
            yield Fault("kill", call.number, "middle")


def errnos(calls: Sequence[Call]) -> Iterator[Fault]:
    """Every error at every call, once and for good; short and empty writes."""
    for call in calls:
        whats = (*ERRNOS, "short", "zero") if call.kind == "write" else ERRNOS
        for what in whats:
            yield Fault(what, call.number)
            if what not in _ONCE:
                yield Fault(what, call.number, lasting=True)


def unread(calls: Sequence[Call]) -> Iterator[Fault]:
    """Reads that fail, once and for good, or give half; for calls that were counted with reads."""
    for call in calls:
        if call.kind == "read":
            yield from (Fault(what, call.number, reads=True) for what in ("EIO", "ESTALE", "EINTR", "short"))
            yield from (Fault(what, call.number, lasting=True, reads=True) for what in ("EIO", "short"))


def stalls(calls: Sequence[Call]) -> Iterator[Fault]:
    """A pause at every call."""
    for call in calls:
        yield Fault("stall", call.number)


def store_kills(calls: Sequence[Call]) -> Iterator[Fault]:
    """Before and after every call to a store."""
    for call in calls:
        yield Fault("kill", call.number)
        yield Fault("kill", call.number, "after")


def store_errnos(calls: Sequence[Call]) -> Iterator[Fault]:
    """Every error at every call to a store, once and for good; the answer lost after the call was done."""
    for call in calls:
        for what in STORE_ERRNOS:
            yield Fault(what, call.number)
            yield Fault(what, call.number, lasting=True)
            if what in _AFTERWARDS:
                yield Fault(what, call.number, "after")


def store_unread(calls: Sequence[Call]) -> Iterator[Fault]:
    """Half of the bytes that were asked for; listings that lack what is there, once and for good.

    Bytes that are always cut short are what damage is, and are taken for it.
    """
    for call in calls:
        if call.kind == "read":
            yield Fault("short", call.number, reads=True)
        if call.kind == "list":
            yield Fault("stale", call.number, reads=True)
            yield Fault("stale", call.number, lasting=True, reads=True)


Faults = Callable[[Sequence[Call]], Iterator[Fault]]
KINDS: Mapping[str, Faults] = {"kill": kills, "errno": errnos, "read": unread, "stall": stalls}
STORE_KINDS: Mapping[str, Faults] = {
    "kill": store_kills, "errno": store_errnos, "read": store_unread, "stall": stalls,
}  # fmt: skip
T = TypeVar("T", bound=Ready)


def drawn(
    kind: str, faults: Faults, prepared: Sequence[T], trials: int | None, seed: int
) -> list[tuple[T, Fault]]:
    """All faults of a kind in all scenarios, or `trials` of them, the same for the same seed.

    A sample takes turns between the scenarios, so that a few trials reach each. More trials than there are
    faults begin again: threads never meet in the same way twice.
    """
    rows = [
        [(one, fault) for fault in faults(one.reads if kind == "read" else one.calls)] for one in prepared
    ]
    if trials is None:
        return [pair for row in rows for pair in row]
    chance = random.Random(f"{seed}/{kind}")
    found: list[tuple[T, Fault]] = []
    while len(found) < trials and any(rows):
        for row in rows:
            chance.shuffle(row)
        longest = max(map(len, rows))
        found += [row[turn] for turn in range(longest) for row in rows if turn < len(row)]
    return found[:trials]
