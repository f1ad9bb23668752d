"""The pytest plug-in: a fixture `chaos` that strikes a function of the user's at its file system calls.

pytest finds it by itself where torchrelay is installed; it imports nothing heavy.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from torchrelay.chaos.faults import Call, Fault
    from torchrelay.chaos.processes import Ended
    from torchrelay.chaos.strikes import Outcome, Tally

Work = Callable[[Path], object]
ON_PATH = "torchrelay.chaos.child.nursery:on_path"
LIMIT_SECS = 60.0


class Chaos:
    """Strikes functions that get a directory; they stand at the top of a file, for fresh processes call them.

    Per trial: `prepare(root)` fills the empty directory, `work(root)` is struck in a process of its own, and
    `check(root)` raises in another one if something is lost. Faults happen to calls below `root` only:
    `root.parent` is the place to note what was promised.
    """

    def __init__(self, directory: Path) -> None:
        from torchrelay.chaos.processes import Worker

        self._worker = Worker(directory / "chaos")
        self._trial = directory / "trial"

    def calls(self, work: Work, *, prepare: Work | None = None) -> tuple[Call, ...]:
        """The calls that an undisturbed `work` makes below its directory."""
        from torchrelay.chaos.faults import read_calls

        root, log = self._fresh(prepare), self._worker.directory / "calls"
        log.unlink(missing_ok=True)
        self._worker.plan.arm(root, None, log=log)
        self._demand(self._call(work, root, plan=True), "work")
        return read_calls(log, root)

    def kill_at_every_boundary(
        self,
        work: Work,
        check: Work,
        *,
        prepare: Work | None = None,
        trials: int | None = None,
        seed: int = 0,
    ) -> Tally:
        """SIGKILL before and after every call, and in the middle of every write; or `trials` of these."""
        from torchrelay.chaos.scenarios import kills

        faults = list(kills(self.calls(work, prepare=prepare)))
        return self._all("kill", _some(faults, trials, seed), work, check, prepare)

    def fail_at_every_boundary(
        self,
        work: Work,
        check: Work,
        *,
        prepare: Work | None = None,
        trials: int | None = None,
        seed: int = 0,
    ) -> Tally:
        """Every errno, once and for good, and short writes at every call; or so many `trials` of these.

        `work` may raise; what it promised before must hold.
        """
        from torchrelay.chaos.scenarios import errnos

        faults = list(errnos(self.calls(work, prepare=prepare)))
        return self._all("errno", _some(faults, trials, seed), work, check, prepare)

    def close(self) -> None:
        """End the processes."""
        self._worker.close()

    def _all(
        self, kind: str, faults: Iterable[Fault], work: Work, check: Work, prepare: Work | None
    ) -> Tally:
        from torchrelay.chaos.strikes import Tally

        return Tally([self._strike(kind, fault, work, check, prepare) for fault in faults])

    def _strike(self, kind: str, fault: Fault, work: Work, check: Work, prepare: Work | None) -> Outcome:
        from torchrelay.chaos.strikes import Outcome, Verdict

        root = self._fresh(prepare)
        self._worker.plan.arm(root, fault)
        struck = self._call(work, root, plan=True)
        if not self._worker.plan.fired:
            return Outcome(kind, str(fault), Verdict.MISSED)
        if struck.late or (kind == "kill" and not struck.killed):
            return Outcome(kind, str(fault), Verdict.FAILED, struck.reason)
        left = self._call(check, root)
        if left.well:
            return Outcome(kind, str(fault), Verdict.SURVIVED)
        return Outcome(kind, str(fault), Verdict.LOST, f"{self._worker.plan.struck}: {left.reason}")

    def _fresh(self, prepare: Work | None) -> Path:
        shutil.rmtree(self._trial, ignore_errors=True)
        root = self._trial / "root"
        root.mkdir(parents=True)
        if prepare is not None:
            self._demand(self._call(prepare, root), "prepare")
        return root

    def _call(self, function: Work, root: Path, *, plan: bool = False) -> Ended:
        from torchrelay.chaos.child.nursery import name_of
        from torchrelay.chaos.processes import Order

        name = name_of(function)
        order = Order(
            ON_PATH,
            {"function": name, "root": str(root)},
            self._worker.plan.path if plan else None,
            LIMIT_SECS,
            ahead=(name,),
        )
        return self._worker.nursery.run(order)

    def _demand(self, ended: Ended, what: str) -> None:
        if not ended.well:
            raise AssertionError(f"{what} fails undisturbed: {ended.reason}\n{ended.trace}")


def _some(faults: list[Any], trials: int | None, seed: int) -> list[Any]:
    if trials is None or trials >= len(faults):
        return faults
    return random.Random(seed).sample(faults, trials)


@pytest.fixture
def chaos(tmp_path: Path) -> Iterator[Chaos]:
    """Strike functions at their file system calls; see tests/chaos/README.md of torchrelay."""
    made = Chaos(tmp_path)
    try:
        yield made
    finally:
        made.close()
