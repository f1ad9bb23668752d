"""The built-in target from beginning to end: prepare, try, count."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from torchrelay.chaos import damage, power
from torchrelay.chaos import scenarios as schedule
from torchrelay.chaos.faults import fault_of
from torchrelay.chaos.places import Ground, StoredRun, ground
from torchrelay.chaos.processes import Order, Pool, Worker
from torchrelay.chaos.scenarios import CHECK, TRAIN, Prepared, Scenario, scenarios
from torchrelay.chaos.strikes import Outcome, Strike, Tally, Verdict, strike
from torchrelay.checkpoint.storage.base import SingleWriter
from torchrelay.errors import StorageError, UsageError
from torchrelay.records import dataclass

KINDS = ("kill", "errno", "read", "stall", "flip", "truncate", "power")
DEFAULT_TRIALS = {
    "kill": 300,
    "errno": 300,
    "read": 100,
    "stall": 30,
    "flip": 1000,
    "truncate": 200,
    "power": 24,
}
_BATCH = 100
_RESUMED_EVERY = 50
"""Of so many damaged runs one is also resumed."""
_UNDAMAGED = ("first", "large")
"""Scenarios without anything to damage: nothing is saved yet, or only numbers are."""


@dataclass(frozen=True)
class Wish:
    """What is to be tried. `trials` per kind; None: every boundary once, and the defaults of other kinds."""

    kinds: tuple[str, ...] = KINDS
    trials: int | None = None
    seed: int = 0
    scenarios: tuple[Scenario, ...] = ()
    file_systems: tuple[str, ...] = ("ext4",)
    every: bool = False
    keep: Path | None = None
    workers: int = 2
    single_writer: SingleWriter = None
    """Of runs at a URL."""

    def count(self, kind: str) -> int | None:
        """How many trials of a kind; None for every boundary."""
        if self.every and kind in schedule.KINDS:
            return None
        return DEFAULT_TRIALS[kind] if self.trials is None else self.trials


class BuiltIn:
    """A pool of warm workers and the scenarios, prepared when they are first needed."""

    def __init__(self, place: Ground, wish: Wish) -> None:
        self.place = place
        self.directory = place.directory
        self.wish = wish
        self.pool = Pool(place.directory, wish.workers)
        self._prepared: dict[str, Prepared | StoredRun] = {}

    def prepared(self, wanted: Sequence[Scenario]) -> list[Prepared | StoredRun]:
        """The scenarios, ready."""
        if not self._prepared:
            self.pool.map(self._warm, range(self.wish.workers * 2))
        new = [one for one in wanted if one.name not in self._prepared]
        for made in self.pool.map(lambda worker, one: self.place.prepare(one, worker), new):
            self._prepared[made.scenario.name] = made
        return [self._prepared[one.name] for one in wanted]

    def run(self, kind: str) -> Tally:
        """All trials of a kind."""
        tally = Tally()
        begun = time.monotonic()
        if kind == "power":
            for name in self.wish.file_systems:
                self._power(name, tally)
        elif kind in ("flip", "truncate"):
            tally.add(self._damage(kind), kind, time.monotonic() - begun)
        else:
            tally.add(self._strikes(kind), kind, time.monotonic() - begun)
        return tally

    def repeat(self, name: str) -> Tally:
        """The one trial that a table named."""
        scenario, _, rest = name.rpartition("/")
        if not scenario:
            raise UsageError(f"--only {name}: write the scenario too, as in resume/kill@37:after")
        one = self.prepared(scenarios([scenario]))[0]
        found = re.fullmatch(r"(flip|truncate|ext4|xfs|btrfs)@([0-9]{1,9})", rest)
        tally = Tally()
        if found is None:
            tally.add(self.pool.map(strike, [Strike(one, fault_of(rest), self.wish.keep)]))
        elif found[1] in power.FILE_SYSTEMS:
            if not isinstance(one, Prepared):
                raise UsageError(f"--only {name}: {self.place.no_power(power.FILE_SYSTEMS[found[1]])}")
            cuts = power.Cuts(one, power.FILE_SYSTEMS[found[1]], (int(found[2]),))
            tally.add(self.pool.map(power.cut, [cuts])[0])
        else:
            change = damage.draw(found[1], one.files(), int(found[2]) + 1, self.wish.seed)[-1]
            tally.add(self.pool.map(damage.look, [damage.Batch(one, (change,))])[0])
        return tally

    @property
    def _wanted(self) -> Sequence[Scenario]:
        return self.wish.scenarios or self.place.scenarios

    def _strikes(self, kind: str) -> list[Outcome]:
        ready = self.prepared(self._wanted)
        chosen = schedule.drawn(kind, self.place.kinds[kind], ready, self.wish.count(kind), self.wish.seed)
        return self.pool.map(strike, [Strike(one, fault, self.wish.keep) for one, fault in chosen])

    def _damage(self, kind: str) -> list[Outcome]:
        wanted = [one for one in self._wanted if one.name not in _UNDAMAGED]
        ready = self.prepared(wanted)
        each = -(-(self.wish.count(kind) or 1) // max(1, len(ready)))
        batches, resumed = [], []
        for one in ready:
            changes = damage.draw(kind, one.files(), each, self.wish.seed)
            batches += [
                damage.Batch(one, tuple(changes[at : at + _BATCH])) for at in range(0, len(changes), _BATCH)
            ]
            resumed += [damage.Resumed(one, change) for change in changes[::_RESUMED_EVERY]]
        looked = [outcome for part in self.pool.map(damage.look, batches) for outcome in part]
        return looked + self.pool.map(damage.resume, resumed)

    def _power(self, name: str, tally: Tally) -> None:
        if name not in power.FILE_SYSTEMS:
            raise UsageError(f"there is no file system {name!r}: choose from {', '.join(power.FILE_SYSTEMS)}")
        system = power.FILE_SYSTEMS[name]
        kind = f"power {name}"
        reason = self.place.no_power(system)
        if reason:
            tally.skipped[kind] = reason
            return
        wanted = [one for one in self._wanted if not one.large]
        ready = [one for one in self.prepared(wanted) if isinstance(one, Prepared)]
        begun = time.monotonic()
        plan = power.draw(ready, system, self.wish.count("power") or 1, self.wish.seed)
        found = [outcome for part in self.pool.map(power.cut, plan) for outcome in part]
        tally.add(found, kind, time.monotonic() - begun)

    def _warm(self, worker: Worker, _: int) -> None:
        """Let a nursery import what trials need; a worker that is warm already only does it faster."""
        if worker.warm:
            return
        worker.warm = True
        arguments = {
            "run": self.place.fresh(worker),
            "oracle": f"{worker.fresh()}.oracle",
            "options": dict(self.place.options()),
        }
        for order in (Order(TRAIN, {**arguments, "until": 1}, limit_secs=120.0), Order(CHECK, arguments)):
            ended = worker.nursery.warm(order)
            if not ended.well or (isinstance(ended.value, dict) and ended.value.get("error")):
                raise StorageError(
                    f"the built-in run fails undisturbed: {ended.reason} {ended.value or ended.trace}"
                )


@contextmanager
def built_in(wish: Wish, where: Path | str | None = None) -> Iterator[BuiltIn]:
    """A built-in target below a directory (None: in memory) or URL; all that it makes vanishes at the end."""
    with ground(where, wish.single_writer) as place:
        target = BuiltIn(place, wish)
        try:
            yield target
        finally:
            target.pool.close()


def run_all(
    wish: Wish, where: Path | str | None = None, say: Callable[[str], None] = lambda text: None
) -> Tally:
    """Try all kinds of a wish; `say` is called with each when it begins."""
    whole = Tally()
    with built_in(wish, where) as target:
        for kind in wish.kinds:
            say(f"{kind} ...")
            part = target.run(kind)
            whole.add(part.outcomes)
            whole.seconds.update(part.seconds)
            whole.skipped.update(part.skipped)
    return whole


def tried(tally: Tally) -> bool:
    """Whether every kind reached something: without faults a campaign shows nothing."""
    return all(tally.count(kind) for kind in tally.kinds) and bool(tally.outcomes)


def repeated(wish: Wish, name: str, where: Path | str | None = None) -> Tally:
    """The one trial of this name, alone."""
    with built_in(replace(wish, workers=1), where) as target:
        tally = target.repeat(name)
    if all(one.verdict is Verdict.MISSED for one in tally.outcomes):
        raise UsageError(f"{name}: the program ended before that call; a smaller number is reached")
    return tally
