"""The kill storm: SIGKILLs at random moments, and after each the question whether anything was lost.

A third of the kills hits rank 0, a third another rank, a third all at once. Moments are drawn among the start
of the ranks, the steps of an epoch, and the save of an epoch, each with a random delay.
"""

from __future__ import annotations

import argparse
import random
import secrets
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from hosts import why_not
from launching import TrialError, end_like_an_error
from run_table import save_secs
from screen import Screen
from storm_checks import Findings, Watched, check_disk, check_end, check_start, fingerprints
from storm_hosts import AcrossHosts, HostPair, TorchrunAcrossHosts
from storm_job import EPOCHS
from storm_launchers import Forked, Launcher, UnderTorchrun, kill

import torchrelay
from torchrelay.errors import RelayError

ATTEMPT_SECS = 120.0
_WHOM = ("rank 0", "another rank", "all")
_WHOM_OF_HOSTS = ("a host", "an agent")
_JOB = Path(__file__).with_name("storm_job.py")


@dataclass(frozen=True)
class Pace:
    """How long things took in the undisturbed run, in seconds: what random delays are drawn from."""

    start: float
    epoch: float
    save: float


@dataclass(frozen=True)
class Strike:
    """Whom to kill, and when: so long after a moment that `due` recognises."""

    who: str
    ranks: tuple[int, ...]
    delay: float
    due: Callable[[], bool]


class Storm:
    """Kills until there were enough; every violation is kept in `findings`."""

    def __init__(
        self, options: argparse.Namespace, root: Path, screen: Screen, pair: HostPair | None = None
    ) -> None:
        self.pair = pair
        self.whom = [*_WHOM, *(_WHOM_OF_HOSTS if pair is not None else ())]
        self.options = options
        self.root = root
        self.screen = screen
        self.random = random.Random(options.seed)
        self.findings = Findings()
        self.kills: Counter[tuple[str, str]] = Counter()
        self.runs = 0
        self.stood_still = 0

    def run(self) -> None:
        """The whole storm."""
        reference, pace = self._undisturbed()
        text = f"{self.options.kills} kills, seed {self.options.seed}, launcher {self.options.launcher}"
        with self.screen.stage(text, self.options.kills) as tell:
            while self.kills.total() < self.options.kills:
                watched = self._next_run()
                launcher = self._launcher(watched)
                try:
                    self._strike_until_finished(launcher, watched, reference, pace)
                finally:
                    launcher.close()
                wrong = len(self.findings.violations)
                tell(
                    self.kills.total(),
                    f"{self.kills.total()} kills, {self.runs - 1} runs, {wrong} violations",
                )
                if self.findings.good:
                    shutil.rmtree(watched.run.parent)

    def _next_run(self) -> Watched:
        self.runs += 1
        place = self.root / f"run_{self.runs:03}"
        (place / "outside").mkdir(parents=True)
        return Watched(place / "run", place / "outside")

    def _launcher(self, watched: Watched) -> Launcher:
        argv = [str(_JOB), str(watched.run), str(watched.outside)]
        log = watched.outside / "output.log"
        if self.pair is not None and self.options.launcher == "torchrun":
            return TorchrunAcrossHosts(
                self.pair, argv, self.options.ranks, watched.outside, self.options.restarts
            )
        if self.pair is not None:
            return AcrossHosts(self.pair, argv, self.options.ranks, watched.outside)
        if self.options.launcher == "torchrun":
            return UnderTorchrun(argv, self.options.ranks, log, self.options.restarts)
        return Forked(argv, self.options.ranks, log)

    def _undisturbed(self) -> tuple[dict[int, str], Pace]:
        """Run the job once in peace: what its epochs are, and how long things take."""
        watched = self._next_run()
        launcher = self._launcher(watched)
        try:
            launcher.start()
            began = time.monotonic()
            _wait(lambda: bool(watched.starts()) or launcher.finished())
            started = time.monotonic()
            _wait(launcher.finished)
        finally:
            launcher.close()
        found = fingerprints(watched)
        if sorted(found) != list(range(EPOCHS + 1)):
            raise TrialError(f"the undisturbed run has epochs {sorted(found)}")
        epoch = (time.monotonic() - started) / EPOCHS
        return found, Pace(started - began, epoch, longest_save(watched))

    def _strike_until_finished(
        self, launcher: Launcher, watched: Watched, reference: dict[int, str], pace: Pace
    ) -> None:
        proved: set[str] = set()
        while True:
            newest, begun, tries = watched.newest(), len(watched.starts()), watched.tries()
            launcher.start()
            strike = self._draw(watched, pace, newest, begun)
            struck = self._wait_and_kill(strike, launcher)
            if struck:
                launcher.after_kill()
            check_disk(watched, reference, self.findings, proved)
            trained = check_start(watched, newest, begun, self.findings)
            if struck is None:
                self.stood_still += 1
                continue
            if not struck:
                check_end(watched, reference, self.findings)
                return
            self.kills[strike.who, moment_of(watched, tries, trained=trained)] += 1

    def _wait_and_kill(self, strike: Strike, launcher: Launcher) -> bool | None:
        """Kill when it is due; False when the job was faster and finished, None when it stood still."""
        still = False

        def over() -> bool:
            nonlocal still
            still = launcher.stands_still()
            return still or strike.due() or launcher.finished()

        _wait(over)
        if still:
            return None
        time.sleep(strike.delay)
        if self.pair is not None and launcher.finished():
            return False  # hosts and agents live on after the job
        return kill(launcher.targets(strike.who, strike.ranks)) or not self._finished_soon(launcher)

    def _finished_soon(self, launcher: Launcher) -> bool:
        """Whether ranks that were gone before the kill are gone because the job is over."""
        end = time.monotonic() + 5
        while time.monotonic() < end:
            if launcher.finished():
                return True
            time.sleep(0.01)
        return False

    def _draw(self, watched: Watched, pace: Pace, newest: int | None, begun: int) -> Strike:
        """The next kill; once there were enough, one that is never due."""
        ranks = range(self.options.ranks)
        if self.kills.total() >= self.options.kills:
            return Strike("all", tuple(ranks), 0.0, lambda: False)
        who = self.random.choice(self.whom)
        other = self.random.choice(ranks[1:] or ranks)
        any_ = self.random.choice(ranks) if self.pair is not None else 0
        hit = {"rank 0": (0,), "another rank": (other,), "all": tuple(ranks)}.get(who, (any_,))
        moment = self.random.choices(["start", "steps", "save"], [1, 2, 3])[0]
        first = 0 if newest is None else min(newest + 1, EPOCHS)
        epoch = self.random.randint(first, EPOCHS)
        if moment == "start":
            return Strike(who, hit, self.random.uniform(0, 1.2 * pace.start), lambda: True)
        if moment == "steps":
            return Strike(who, hit, self.random.uniform(0, pace.epoch), _training(watched, epoch, begun))
        tries = watched.tries()
        return Strike(who, hit, self.random.uniform(0, pace.save), _saving(watched, epoch, tries))

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Who was killed when."""
        moments = ["before training", "in an epoch", "in a save", "committed, untold", "after the last epoch"]
        rows = [[who, *[str(self.kills[who, moment]) for moment in moments]] for who in self.whom]
        return ["killed", *moments], rows


def longest_save(watched: Watched) -> float:
    """Seconds of the slowest save after the initial one, which plans for the first time."""
    epochs = [torchrelay.open_checkpoint(watched.run, epoch=epoch) for epoch in range(1, EPOCHS + 1)]
    return max(save_secs(watched.run, checkpoint) for checkpoint in epochs)


def _training(watched: Watched, epoch: int, begun: int) -> Callable[[], bool]:
    """Whether this attempt trains, and every epoch before `epoch` is acknowledged."""
    return lambda: len(watched.starts()) > begun and (watched.acknowledged() or 0) >= epoch - 1


def _saving(watched: Watched, epoch: int, before: set[str]) -> Callable[[], bool]:
    """Whether a new try of an epoch has appeared."""
    start = f"e{epoch:08}"
    return lambda: any(name.startswith(start) for name in watched.tries() - before)


def moment_of(watched: Watched, tries_before: set[str], *, trained: bool) -> str:
    """What the job was doing when it was killed, from its files."""
    view = watched.view()
    committed = {entry.attempt_name for entry in view.entries}
    newest = max(view.epochs(), default=None)
    if watched.tries() - tries_before - committed:
        return "in a save"
    if newest is not None and (watched.acknowledged() is None or newest > (watched.acknowledged() or 0)):
        return "committed, untold"
    if newest == EPOCHS:
        return "after the last epoch"
    return "in an epoch" if trained else "before training"


def _wait(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + ATTEMPT_SECS
    while not condition():
        if time.monotonic() > end:
            raise TrialError(f"an attempt took longer than {ATTEMPT_SECS:g} s")
        time.sleep(0.001)


def main() -> int:
    """Run the storm; 0 when every promise was kept, 1 otherwise."""
    parser = argparse.ArgumentParser(
        prog="scripts/campaigns/kill-storm", description="Kills ranks at random moments."
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 32))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--launcher", choices=("forked", "torchrun"), default="forked")
    parser.add_argument("--restarts", type=int, default=3, help="torchrun's --max-restarts")
    parser.add_argument("--hosts", type=int, choices=(1, 2), default=1, help="2: namespaces; needs root")
    options = parser.parse_args()
    end_like_an_error()
    screen = Screen()
    why = why_not() if options.hosts == 2 else None
    if why is not None:
        screen.line(why)
        return 3
    with HostPair() if options.hosts == 2 else nullcontext() as pair:
        return _storm(Storm(options, Path(tempfile.mkdtemp(prefix="torchrelay-storm-")), screen, pair))


def _storm(storm: Storm) -> int:
    screen, began = storm.screen, time.monotonic()
    try:
        storm.run()
    except RelayError as error:
        screen.line(f"the storm broke off (seed {storm.options.seed}): {error}", style="bold red")
        screen.line(f"everything is kept in {storm.root}")
        return 1
    screen.table(*storm.table())
    return _tell(storm, time.monotonic() - began)


def _tell(storm: Storm, secs: float) -> int:
    found, say = storm.findings, storm.screen.line
    say(f"kills {storm.kills.total()}, runs finished {found.finished}, epochs verified {found.epochs_proved}")
    if storm.stood_still:
        say(f"jobs that stood still, one torchrun waiting for the other: {storm.stood_still}")
    say(f"committed epochs lost: {len(found.lost)}")
    say(f"mixtures: {len(found.mixed)}")
    say(f"restarts that came to train: {found.restarts}, not from the newest epoch: {len(found.not_newest)}")
    say(f"finished runs that differ from the undisturbed one: {len(found.other_end)}")
    say(f"seed {storm.options.seed}, {storm.options.ranks} ranks, {storm.options.launcher}, {secs:.0f} s")
    for violation in found.violations:
        say(violation, style="red")
    if found.good:
        shutil.rmtree(storm.root)
        return 0
    say(f"everything is kept in {storm.root}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
