"""The user's own job as target: struck once, then run again, it must go on from what it had."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torchrelay.errors import UsageError
from torchrelay.records import dataclass
from torchrelay.runners.chaos import damage, images, schedule
from torchrelay.runners.chaos.builtin import Wish
from torchrelay.runners.chaos.calls import CHANGING, read_calls
from torchrelay.runners.chaos.command_judge import (
    Kept,
    end_of,
    is_noticed,
    judge_left,
    judge_struck,
    kept_at,
)
from torchrelay.runners.chaos.command_runs import check_words, durable_slots, run_command
from torchrelay.runners.chaos.fault import Fault, fault_of
from torchrelay.runners.chaos.pool import scratch
from torchrelay.runners.chaos.scenarios import files_below
from torchrelay.runners.chaos.tally import Outcome, Tally, Verdict

DEFAULT_TRIALS = {"kill": 10, "errno": 10, "stall": 3, "flip": 500, "truncate": 100, "power": 5}
_FIRST_SECS = 3600.0
_FACTOR, _LEAST_SECS = 5.0, 60.0
"""A struck run may take so many times what the undisturbed one took, and at least this long."""


@dataclass(frozen=True)
class UserJob:
    """A command with `{run}` in it, and what is to be tried."""

    words: tuple[str, ...]
    wish: Wish

    def count(self, kind: str) -> int:
        """How many trials of a kind: every one takes as long as the command, twice."""
        return DEFAULT_TRIALS[kind] if self.wish.trials is None else self.wish.trials


class Reference:
    """The command as it ends undisturbed."""

    def __init__(self, job: UserJob, home: Path) -> None:
        check_words(job.words)
        self.job, self.home, self.run = job, home, home / "reference"
        begun = time.monotonic()
        try:
            done = run_command(job.words, self.run, home, None, _FIRST_SECS)
        except OSError as error:
            if error.filename != job.words[0]:
                raise
            raise UsageError(
                f"the command cannot be started: {error.filename}: {error.strerror}; name a program that can"
            ) from error
        self.limit_secs = max(_LEAST_SECS, _FACTOR * (time.monotonic() - begun))
        if done.code != 0:
            raise UsageError(
                f"the command fails undisturbed, with {done.code}: {done.tail or 'it printed nothing'}"
            )
        self.calls = done.calls
        self.newest, self.branch = end_of(self.run)

    def strike(self, fault: Fault, kind: str) -> Outcome:
        """Strike, look at what was durable, run again, judge."""
        run = self.home / "run"
        try:
            done = run_command(self.job.words, run, self.home, fault, self.limit_secs)
            if not done.fired:
                return Outcome(kind, str(fault), Verdict.MISSED)
            verdict, reason = judge_struck(fault, done)
            if verdict is Verdict.SURVIVED:
                verdict, reason = self.judge_again(run, kept_at(run, durable_slots(done.calls)))
            return Outcome(kind, str(fault), verdict, f"{done.struck}: {reason}" if reason else "")
        finally:
            shutil.rmtree(run, ignore_errors=True)

    def judge_again(self, run: Path, before: Kept) -> tuple[Verdict, str]:
        """Run the command without a fault: it must end as the undisturbed one, with all that was durable."""
        done = run_command(self.job.words, run, self.home, None, self.limit_secs)
        if done.code != 0 or done.late:
            return Verdict.FAILED, f"the next start ends with {done.code}: {done.tail}"
        return judge_left(run, before, self.newest, self.branch)

    def cut(self, system: images.FileSystem, number: int) -> Outcome:
        """Let the power fail before a call: the copy of the device is all that the next start has."""
        kind, name = f"power {system.name}", f"{system.name}@{number}"
        image, mount, after = (self.home / one for one in ("image", "mnt", "cut"))
        images.make(system, image)
        found: list[Kept] = []
        with images.mounted(system, image, mount) as where:

            def standing() -> None:
                found.append(kept_at(where / "run", _durable_now(self.home, where / "run")))
                images.copy(image, after)

            fault = Fault("pause", number)
            run_command(self.job.words, where / "run", self.home, fault, self.limit_secs, standing=standing)
        image.unlink()
        if not found:
            return Outcome(kind, name, Verdict.MISSED)
        with images.mounted(system, after, mount) as where:
            verdict, reason = self.judge_again(where / "run", found[0])
        after.unlink()
        return Outcome(kind, name, verdict, reason)

    def damaged(self, change: damage.Damage) -> Outcome:
        """Change a byte of the finished run: what the epochs consist of must not be proved any more."""
        with damage.done_to(str(self.run), change):
            told = is_noticed(self.run, change.path)
        verdict = Verdict.SURVIVED if told else Verdict.UNDETECTED
        return Outcome(change.kind, change.name, verdict, "" if told else f"{change.path}, byte {change.at}")


def _durable_now(home: Path, run: Path) -> set[int]:
    return durable_slots(read_calls(home / "calls", run))


def run_all(job: UserJob, say: Callable[[str], None]) -> Tally:
    """Try all kinds of the wish, one trial after another."""
    tally = Tally()
    with _reference(job, say) as reference:
        for kind in job.wish.kinds:
            if kind not in DEFAULT_TRIALS:
                tally.skipped[kind] = "it is for the built-in run only"
                continue
            say(f"{kind} ...")
            begun = time.monotonic()
            for outcome in _outcomes(reference, kind, tally):
                tally.add([outcome], outcome.kind)
                if outcome.bad:
                    say(f"{outcome.verdict.value}: --only {outcome.name}: {outcome.reason}")
            for one in {one.kind for one in tally.outcomes if one.kind.split()[0] == kind}:
                tally.seconds[one] = time.monotonic() - begun
    return tally


def _outcomes(reference: Reference, kind: str, tally: Tally) -> Iterator[Outcome]:
    job, chance = reference.job, random.Random(f"{reference.job.wish.seed}/{kind}")  # noqa: S311
    if kind in ("flip", "truncate"):
        for change in damage.draw(kind, files_below(reference.run), job.count(kind), job.wish.seed):
            yield reference.damaged(change)
    elif kind == "power":
        for name in job.wish.file_systems:
            yield from _cuts(reference, name, chance, tally)
    else:
        faults = list(schedule.KINDS[kind](reference.calls))
        wanted = len(faults) if job.wish.every else min(len(faults), job.count(kind))
        for fault in chance.sample(faults, wanted):
            yield reference.strike(fault, kind)


def _cuts(reference: Reference, name: str, chance: random.Random, tally: Tally) -> Iterator[Outcome]:
    system = _system(name)
    reason = images.why_not(system, reference.home)
    if reason:
        tally.skipped[f"power {name}"] = reason
        return
    numbers = [call.number for call in reference.calls if call.kind in CHANGING]
    for number in chance.sample(numbers, min(len(numbers), reference.job.count("power"))):
        yield reference.cut(system, number)


def _system(name: str) -> images.FileSystem:
    if name not in images.FILE_SYSTEMS:
        raise UsageError(f"there is no file system {name!r}: choose from {', '.join(images.FILE_SYSTEMS)}")
    return images.FILE_SYSTEMS[name]


@contextmanager
def _reference(job: UserJob, say: Callable[[str], None]) -> Iterator[Reference]:
    check_words(job.words)
    with scratch() as home:
        say("the command, undisturbed ...")
        yield Reference(job, home)


def repeated(job: UserJob, name: str) -> Tally:
    """The one trial of this name."""
    tally = Tally()
    what, _, number = name.partition("@")
    with _reference(job, lambda text: None) as reference:
        if what in images.FILE_SYSTEMS and number.isdecimal():
            outcome = reference.cut(_system(what), int(number))
        elif what in ("flip", "truncate") and number.isdecimal():
            change = damage.draw(what, files_below(reference.run), int(number) + 1, job.wish.seed)[-1]
            outcome = reference.damaged(change)
        else:
            outcome = reference.strike(fault_of(name), fault_of(name).what)
    if outcome.verdict is Verdict.MISSED:
        raise UsageError(f"{name}: the command ended before that call; a smaller number is reached")
    tally.add([outcome])
    return tally
