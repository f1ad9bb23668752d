"""Moments of a run at which faults happen: what lies there before, and what is then done."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

from torchrelay.errors import StorageError, UsageError
from torchrelay.records import dataclass
from torchrelay.runners.chaos.calls import Call, read_calls
from torchrelay.runners.chaos.fault import Fault
from torchrelay.runners.chaos.forks import Nursery, Order
from torchrelay.runners.chaos.plan import PlanFile
from torchrelay.runners.chaos.silence import may_be_silent
from torchrelay.runners.chaos.trees import LocalTree

TRAIN = "torchrelay.runners.chaos.target:train"
CHECK = "torchrelay.runners.chaos.checks:check"


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
