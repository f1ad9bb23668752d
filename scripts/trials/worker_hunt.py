"""Signals to trainings whose samples come out of worker processes: each is left, saved and resumed.

A trial is a program (whose loader, how it starts workers, whether they stay), a signal, and whom it is sent
to: the ranks' groups under torchrun (`groups`), torchrun, `torchrelay launch`, or one plain process and its
group (`plain`). The run must be left at a step, saved, with the code 75; no process may stay; and the same
command must end in the bits of a run that was left alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch._dynamo
import torch.distributed.run  # what every launch imports, once
from forked_programs import forked_programs
from launching import Launch, TrialError, clean_environment, end_like_an_error, send, torchrun
from screen import Screen
from worker_job import Program, train

SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT", "SIGINT twice")
TARGETS = ("plain", "groups", "torchrun", "launch")
HANDLED = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
EPOCHS = (1, 2, 2, 3)
WAIT_SECS = 150.0
GONE_SECS = 20.0
_JOB = str(Path(__file__).with_name("worker_job.py"))


@dataclass(frozen=True)
class Trial:
    """A signal to a process, when the first rank reports a step of an epoch, and a moment later."""

    program: Program
    target: str
    signal: str
    epoch: int
    step: int
    wait_secs: float

    def __str__(self) -> str:
        return f"{self.signal} to {self.target} at {self.epoch}+{self.step}, {self.program}"

    @property
    def saves_and_goes_on(self) -> bool:
        """SIGUSR2 asks ranks for a save; launchers die of it, and their ranks leave."""
        return self.signal == "SIGUSR2" and self.target in ("plain", "groups")


def programs(loaders: Sequence[str], methods: Sequence[str]) -> list[Program]:
    """All programs of these loaders and ways to start workers."""
    kinds = [(one, how, stay) for one in loaders for how in methods for stay in (False, True)]
    return [
        Program(loader, method, persistent, greeted, 0.01, asynchronous)
        for loader, method, persistent in kinds
        for greeted, asynchronous in ((True, False), (True, True), (False, False))
    ]


def command_of(trial: Trial, run: Path) -> list[str]:
    """What a person types."""
    words = [_JOB, str(run), trial.program.text()]
    if trial.target == "plain":
        return [sys.executable, *words]
    if trial.target == "launch":
        logs = str(run.with_name(f"{run.name}.launch"))
        return [sys.executable, "-m", "torchrelay", "launch", "-j", "2", "--logs", logs, "--", *words]
    return torchrun(*words, ranks=2, options=[HANDLED])


class Hunt:
    """Plays trials in a directory; what went well is removed."""

    def __init__(self, where: Path) -> None:
        self._where = where
        self._number = 0
        self._truths: dict[tuple[Program, bool], str] = {}

    def play(self, trial: Trial) -> None:
        """Raises TrialError where something is not as promised."""
        truth = self._truth(trial)
        run = self._new()
        with Launch(command_of(trial, run), run.with_suffix(".log"), env=clean_environment()) as launch:
            wait_for(launch, f"at {trial.epoch} {trial.step}")
            time.sleep(trial.wait_secs)
            pids = family(launch.process.pid)
            _send(trial, launch.process.pid, pids)
            code = launch.wait(WAIT_SECS)
            found = bits(launch)
        _check_gone(pids)
        if found is None:
            self._check_left(trial, run, code)
            found = self._finish(trial, run)
        if found != truth:
            raise TrialError(f"{trial}: ended in {found}, not in {truth}; see {run}")
        for path in self._where.glob(f"{run.name}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _check_left(self, trial: Trial, run: Path, code: int) -> None:
        if trial.signal == "SIGUSR2" and not trial.saves_and_goes_on:
            return  # the launcher died of it, which ends its ranks as they stand
        status = json.loads((run / "status.json").read_text())
        told = {key: status.get(key) for key in ("state", "stop", "epoch", "step", "exit_code")}
        expected = {"plain": 75, "launch": 75}.get(trial.target, 1)
        if (status.get("state"), status.get("exit_code"), code) != ("PREEMPTED", 75, expected):
            raise TrialError(f"{trial}: the code is {code}, the status {told}; see {run}")
        if trial.saves_and_goes_on:
            raise TrialError(f"{trial}: it left, and was asked for a save; see {run}")
        at = (status.get("epoch"), status.get("step"))
        if trial.program.loader == "EpochLoader" and at <= (trial.epoch - 1, 0):
            raise TrialError(f"{trial}: nothing of the epoch was saved: {told}; see {run}")

    def _finish(self, trial: Trial, run: Path) -> str | None:
        with Launch(command_of(trial, run), run.with_suffix(".log"), env=clean_environment()) as launch:
            wait_for(launch, "bits ")
            code = launch.wait(WAIT_SECS)
        if code != 0:
            raise TrialError(f"{trial}: the same command ended with {code}; see {run}")
        return bits(launch)

    def _truth(self, trial: Trial) -> str:
        key = replace(trial.program, asynchronous=False), trial.target == "plain"
        if key not in self._truths:
            run = self._new()
            found = self._finish(trial, run)
            if found is None:
                raise TrialError(f"{trial.program} does not run to its end; see {run}")
            self._truths[key] = found
        return self._truths[key]

    def _new(self) -> Path:
        self._number += 1
        return self._where / f"run{self._number}"


def wait_for(launch: Launch, text: str) -> None:
    """Until a line has it, or the program has ended."""
    end = time.monotonic() + WAIT_SECS
    while not any(text in line for line in list(launch.lines)) and not launch.ended():
        if time.monotonic() > end:
            raise TrialError(f"{text!r} did not come within {WAIT_SECS:g} s; see {launch.log}")
        time.sleep(0.002)


def bits(launch: Launch) -> str | None:
    """What the first rank says at the end of a whole run."""
    return next((line.partition("bits ")[2] for line in launch.lines if "bits " in line), None)


def family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    try:
        texts = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:
        texts = []
    return [pid, *(one for text in texts for child in text.split() for one in family(int(child)))]


def _send(trial: Trial, pid: int, pids: Sequence[int]) -> None:
    """Send the signal, to a process or to groups."""
    number = getattr(signal, trial.signal.split()[0])
    whom = [pid]
    if trial.target in ("plain", "groups"):
        groups = {_group(one) for one in pids} - {None, pid if trial.target == "groups" else None}
        whom = [-one for one in groups if one is not None]
    for _ in range(1 + trial.signal.endswith("twice")):
        for one in whom:
            send(one, number)
        time.sleep(0.2 if trial.signal.endswith("twice") else 0)


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def _check_gone(pids: Sequence[int]) -> None:
    end = time.monotonic() + GONE_SECS
    while left := [pid for pid in pids if _lives(pid)]:
        if time.monotonic() > end:
            told = ", ".join(f"{pid} ({Path(f'/proc/{pid}/comm').read_text().strip()})" for pid in left)
            for pid in left:
                send(pid, signal.SIGKILL)
            raise TrialError(f"{told} still ran {GONE_SECS:g} s after the launcher's end")
        time.sleep(0.02)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def table(tried: Sequence[tuple[Trial, str | None]]) -> list[list[str]]:
    """Rows of target, signal, tried, as promised."""
    rows = []
    for target in TARGETS:
        for name in SIGNALS:
            ends = [why for trial, why in tried if (trial.target, trial.signal) == (target, name)]
            if ends:
                rows.append([target, name, str(len(ends)), str(ends.count(None))])
    return rows


def hunt(trials: Sequence[Trial], where: Path, screen: Screen) -> int:
    """Play the trials; 0 when all went as promised."""
    tried: list[tuple[Trial, str | None]] = []
    one = Hunt(where)
    for trial in trials:
        try:
            one.play(trial)
            tried.append((trial, None))
        except TrialError as error:
            tried.append((trial, str(error)))
            screen.line(f"MISSED {error}")
        with (where / "tried.jsonl").open("a") as file:
            print(json.dumps([str(trial), trial.wait_secs, tried[-1][1]]), file=file)
    screen.table(("sent to", "signal", "tried", "as promised"), table(tried))
    return int(any(why for _, why in tried))


def main() -> int:
    """Draw trials by the seed and play them."""
    parser = argparse.ArgumentParser(prog="scripts/campaigns/worker-hunt", description=__doc__)
    parser.add_argument("--count", type=int, default=1, help="trials of each signal to each target")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--target", choices=TARGETS, action="append", help="only these")
    parser.add_argument("--signal", choices=SIGNALS, action="append", help="only these")
    parser.add_argument("--loader", action="append", help="EpochLoader, DataLoader, StatefulDataLoader")
    parser.add_argument("--method", action="append", help="fork, spawn, forkserver")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep what went wrong here")
    options = parser.parse_args()
    end_like_an_error()
    drawn, screen = random.Random(options.seed), Screen()
    chosen = programs(options.loader or ["EpochLoader", "DataLoader"], options.method or ["fork"])

    def drawn_trial(target: str, name: str) -> Trial:
        when = drawn.choice(EPOCHS), drawn.randrange(1, 10), drawn.random() / 50
        return Trial(drawn.choice(chosen), target, name, *when)

    trials = [
        drawn_trial(target, name)
        for _ in range(options.count)
        for target in options.target or TARGETS
        for name in options.signal or SIGNALS
    ]
    where = options.keep.absolute() if options.keep else Path(tempfile.mkdtemp(prefix="torchrelay-workers-"))
    where.mkdir(parents=True, exist_ok=True)
    screen.line(f"{len(trials)} trials, seed {options.seed}, in {where}")
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` has it ignored
    train(str(where / "first"), Program(), lambda text: None)  # what is imported late is imported once
    with forked_programs():
        code = hunt(trials, where, screen)
    if code == 0 and not options.keep:
        shutil.rmtree(where)
    return code


if __name__ == "__main__":
    sys.exit(main())
