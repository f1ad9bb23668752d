"""Freezes ranks and hosts, cuts links and holds Python's lock, at random phases of a job on two hosts.

Prints for each kind how many were tried and found, and after how many seconds. Exit code 1 if anything
is not as promised, 3 if the machine cannot make hosts.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from hang_job import EPOCHS, PHASES
from host_ranks import HostNursery, Ranks
from hosts import Host, TwoHosts, why_not
from launching import TrialError, end_like_an_error, send, wait_until
from screen import Screen

import torchrelay
from torchrelay.errors import RelayError

KINDS = ("freeze-rank", "freeze-host", "cut", "one-way", "link-down", "lose-host", "hold-lock")
FOUND_SECS = 15.0
ENDED_SECS = 60.0
START_SECS = 90.0
HOLD_SECS = 14.0
PER_HOST = 2
_JOB = str(Path(__file__).with_name("hang_job.py"))
_REPORTS = ("PeerError", " exits: ", "first failure")


@dataclass(frozen=True)
class Case:
    """One hang: what is done to which rank or host, when. `epoch` 0 is before the first epoch task."""

    kind: str
    phase: str
    rank: int
    epoch: int

    @classmethod
    def drawn(cls, random_: random.Random, kinds: Sequence[str] = KINDS) -> Case:
        """Draw a case; only rank 0 commits."""
        phase = random_.choice(PHASES)
        rank = 0 if phase == "commit" else random_.randrange(2 * PER_HOST)
        return cls(random_.choice(kinds), phase, rank, random_.randrange(1, EPOCHS + 1))

    def __str__(self) -> str:
        return f"{self.kind} of rank {self.rank} at {self.phase} of epoch {self.epoch}"


@dataclass(frozen=True)
class Outcome:
    """The result of a case: seconds until all surviving hosts reported it, and until all survivors ended."""

    case: Case
    found_secs: float
    ended_secs: float
    said: str


class Hunt:
    """Runs cases on two hosts whose nurseries stay between them."""

    def __init__(self, hosts: tuple[Host, Host], nurseries: Sequence[HostNursery], root: Path) -> None:
        self.hosts = hosts
        self.nurseries = nurseries
        self.root = root
        self.number = 0
        self._rest = [set(host.pids()) for host in hosts]

    def run(self, case: Case) -> Outcome:
        """Run one case, then the same command again to its end; raises TrialError."""
        self.number += 1
        where = self.root / f"case{self.number}"
        where.mkdir(parents=True)
        plan = {"phase": case.phase, "rank": case.rank, "epoch": case.epoch}
        plan["hold_secs"] = HOLD_SECS if case.kind == "hold-lock" else 0
        (where / "plan.json").write_text(json.dumps(plan))
        ranks = Ranks(self.nurseries, PER_HOST, [_JOB, str(where / "run"), str(where)], where)
        try:
            self._await_phase(case, ranks, where)
            return self._strike(case, ranks, where)
        finally:
            self._clear(ranks)

    def _await_phase(self, case: Case, ranks: Ranks, where: Path) -> None:
        def ended() -> bool:
            return any(ranks.code(rank) is not None for rank in range(len(ranks.pids)))

        wait_until(lambda: (where / "at").exists() or ended(), START_SECS, f"{case}: the phase; see {where}")
        if not (where / "at").exists():
            raise TrialError(f"{case}: a rank ended before the phase; see {where}")

    def _strike(self, case: Case, ranks: Ranks, where: Path) -> Outcome:
        time.sleep(0.3)  # let the others come to where they wait
        began = time.monotonic()
        undo = self._fault(case, ranks)
        if case.kind != "freeze-rank":
            (where / "go").touch()
        try:
            outcome = self._watch(case, ranks, began)
        finally:
            undo()
        (where / "go").touch()
        self._expect_end(case, ranks)
        self._check_oracle(case, where)
        return outcome

    def _fault(self, case: Case, ranks: Ranks) -> Callable[[], None]:
        """Make the fault; return what undoes it."""
        host = self.hosts[case.rank // PER_HOST]
        if case.kind in ("freeze-rank", "freeze-host"):
            pids = [ranks.pids[case.rank]] if case.kind == "freeze-rank" else self._new(host)
            return _freeze(pids)
        if case.kind == "lose-host":
            for pid in self._new(host):
                send(pid, signal.SIGKILL)
        elif case.kind == "cut":
            return _both(*(one.deafen(other) for one, other in (self.hosts, self.hosts[::-1])))
        elif case.kind == "one-way":
            other = self.hosts[1 - case.rank // PER_HOST]
            return other.deafen(host)
        elif case.kind == "link-down":
            return host.unplug()
        return lambda: None

    def _watch(self, case: Case, ranks: Ranks, began: float) -> Outcome:
        """Wait until all survivors have ended as they should."""
        groups = self._survivors(case, ranks)
        code = 0 if case.kind == "hold-lock" else 6
        found = [0.0] * len(groups)
        while time.monotonic() - began < ENDED_SECS:
            now = time.monotonic() - began
            for at, group in enumerate(groups):
                if not found[at] and any(_reported(ranks.printed(rank)) for rank in group):
                    found[at] = now
            codes = {rank: ranks.code(rank) for group in groups for rank in group}
            if all(one is not None for one in codes.values()):
                if set(codes.values()) != {code}:
                    raise TrialError(f"{case}: the survivors ended with {codes}, not all with {code}")
                said = next((_reported(ranks.printed(rank)) for rank in codes), "")
                return Outcome(case, max(found), now, said)
            time.sleep(0.05)
        raise TrialError(f"{case}: after {ENDED_SECS:g} s ranks still live: {codes} (rank: exit code)")

    def _survivors(self, case: Case, ranks: Ranks) -> list[list[int]]:
        """Ranks that survive the fault, grouped by host."""
        groups = [ranks.on_host(0), ranks.on_host(1)]
        if case.kind in ("freeze-host", "lose-host"):
            del groups[case.rank // PER_HOST]
        if case.kind == "freeze-rank":
            groups = [[rank for rank in group if rank != case.rank] for group in groups]
        return groups

    def _expect_end(self, case: Case, ranks: Ranks) -> None:
        """What was frozen ends by itself once it is not, and never well."""
        everyone = range(len(ranks.pids))
        wait_until(
            lambda: all(ranks.code(rank) is not None for rank in everyone), 45, f"{case}: the thawed end"
        )
        codes = {rank: ranks.code(rank) for rank in everyone}
        if case.kind != "hold-lock" and 0 in codes.values():
            raise TrialError(f"{case}: a rank ended well: {codes}")
        wait_until(lambda: not any(map(self._new, self.hosts)), 10, f"{case}: the end of the host monitors")

    def _check_oracle(self, case: Case, where: Path) -> None:
        """What was acknowledged is there and is whole."""
        told = where / "oracle"
        epochs = (
            [json.loads(line)["epoch"] for line in told.read_text().splitlines()] if told.exists() else []
        )
        if not epochs:
            return
        newest = torchrelay.open_checkpoint(where / "run").position
        if newest.epoch < max(epochs):
            raise TrialError(f"{case}: epoch {max(epochs)} was acknowledged, {newest} is newest")
        if case.kind == "hold-lock" and max(epochs) != EPOCHS:
            raise TrialError(f"{case}: the run ended with epoch {max(epochs)}")

    def _new(self, host: Host) -> list[int]:
        """What runs on a host besides its nursery."""
        return [pid for pid in host.pids() if pid not in self._rest[self.hosts.index(host)]]

    def _clear(self, ranks: Ranks) -> None:
        for pid in [*ranks.pids, *(pid for host in self.hosts for pid in self._new(host))]:
            send(pid, signal.SIGKILL)
            send(pid, signal.SIGCONT)


def _freeze(pids: Sequence[int]) -> Callable[[], None]:
    for pid in pids:
        send(pid, signal.SIGSTOP)
    return lambda: [send(pid, signal.SIGCONT) for pid in pids] and None


def _both(*undo: Callable[[], None]) -> Callable[[], None]:
    return lambda: [one() for one in undo] and None


def _reported(text: str) -> str:
    """The first line that reports a failure."""
    return next((line for line in text.splitlines() if any(sign in line for sign in _REPORTS)), "")


def table(outcomes: Sequence[Outcome], missed: Sequence[tuple[Case, str]]) -> list[list[str]]:
    """Rows of kind, tried, as promised, seconds until found (median, longest), until ended (longest)."""
    rows = []
    for kind in KINDS:
        good = [one for one in outcomes if one.case.kind == kind]
        tried = len(good) + sum(case.kind == kind for case, _ in missed)
        found = [one.found_secs for one in good if kind != "hold-lock"]
        times = [f"{statistics.median(found):.1f}", f"{max(found):.1f}"] if found else ["-", "-"]
        ended = f"{max(one.ended_secs for one in good):.1f}" if good else "-"
        if tried:
            rows.append([kind, str(tried), str(len(good)), *times, ended])
    return rows


def hunt(cases: Sequence[Case], root: Path, screen: Screen) -> int:
    """Run the cases; 0 when all went as promised."""
    outcomes: list[Outcome] = []
    missed: list[tuple[Case, str]] = []
    with ExitStack() as stack:
        hosts = stack.enter_context(TwoHosts())
        nurseries = [stack.enter_context(HostNursery(host)) for host in hosts]
        time.sleep(0.5)
        trial = Hunt(hosts, nurseries, root)
        for case in cases:
            try:
                outcome = trial.run(case)
                if outcome.found_secs > FOUND_SECS:
                    raise TrialError(f"{case}: found only after {outcome.found_secs:.1f} s")
            except TrialError as error:
                missed.append((case, str(error)))
                screen.line(f"MISSED {error}")
                continue
            outcomes.append(outcome)
            said = f"{outcome.found_secs:.1f} s, ended {outcome.ended_secs:.1f} s: {outcome.said}"
            screen.line(f"{case}: {said if outcome.said else 'went on'}")
    screen.table(
        ("kind", "tried", "as promised", "found p50 s", "found max s", "ended max s"), table(outcomes, missed)
    )
    return 1 if missed else 0


def main() -> int:
    """Draw cases by the seed and run them."""
    parser = argparse.ArgumentParser(prog="scripts/campaigns/hang-hunt", description=__doc__)
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--kind", choices=KINDS, action="append", help="only these kinds")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep runs and logs here")
    options = parser.parse_args()
    end_like_an_error()
    screen = Screen()
    why = why_not()
    if why is not None:
        screen.line(why)
        return 3
    drawn = random.Random(options.seed)
    cases = [Case.drawn(drawn, options.kind or KINDS) for _ in range(options.cases)]
    root = options.keep.absolute() if options.keep else Path(tempfile.mkdtemp(prefix="torchrelay-hangs-"))
    screen.line(f"{len(cases)} cases, seed {options.seed}, in {root}")
    try:
        code = hunt(cases, root, screen)
    except RelayError as error:
        screen.line(f"the hunt failed: {error}", style="bold red")
        return 1
    if code == 0 and not options.keep:
        shutil.rmtree(root)
    return code


if __name__ == "__main__":
    sys.exit(main())
