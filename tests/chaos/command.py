"""The user's own job as target: struck once, then run again, it must resume from what it had.

The oracle is the library's own log of calls: a record of the checkpoint log counts as acknowledged once its
name was linked and its directory synced after that, independent of what the program prints.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from torchrelay.chaos import damage, power, scenarios
from torchrelay.chaos.builtin import Wish
from torchrelay.chaos.faults import CHANGING, VARIABLE, Call, Fault, PlanFile, fault_of, library, read_calls
from torchrelay.chaos.processes import await_stillness, members, scratch
from torchrelay.chaos.scenarios import files_below
from torchrelay.chaos.strikes import Outcome, Tally, Verdict
from torchrelay.checkpoint.load.verify import verify_epoch
from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.log.record import slot_path
from torchrelay.checkpoint.log.view import STRIDE, LogView
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.errors import RelayError, UsageError
from torchrelay.records import dataclass

PLACE = "{run}"
_RECORD = re.compile(r"(?:checkpoints/)?log/([0-9]{20})\.json")
_LOG = re.compile(r"(?:checkpoints/)?log")
_POLL_SECS = 0.01
_TAIL = 600


@dataclass(frozen=True)
class Done:
    """How a command ended: its code (negative: a signal), what it printed, the calls it made."""

    code: int
    output: str
    calls: tuple[Call, ...]
    fired: int
    struck: str
    late: bool

    @property
    def tail(self) -> str:
        """The end of what it printed, in one line."""
        return " | ".join(self.output.strip().splitlines())[-_TAIL:]


def check_words(words: Sequence[str]) -> None:
    """Raise UsageError unless the command says where its run goes."""
    if not any(PLACE in word for word in words):
        raise UsageError(
            f"the command must train into {PLACE}, which every trial replaces by a fresh directory: "
            f"torchrelay chaos -- python train.py --run {PLACE}"
        )


def run_command(
    words: Sequence[str], run: Path, home: Path, fault: Fault | None, limit_secs: float,
    *, standing: Callable[[], object] | None = None,
) -> Done:  # fmt: skip
    """Run the command with `run` in the place of `{run}`; the library counts, and strikes.

    `standing` is called while a call stands still in a pause; the command is killed after that.
    """
    plan, log, output = PlanFile(home / "plan"), home / "calls", home / "output"
    log.unlink(missing_ok=True)
    plan.arm(run, fault, log=log)
    preload = ":".join(filter(None, [str(library()), os.environ.get("LD_PRELOAD", "")]))
    environment = {**os.environ, "LD_PRELOAD": preload, VARIABLE: str(plan.path)}
    with open(output, "wb") as file:
        process = subprocess.Popen(
            [word.replace(PLACE, str(run)) for word in words], stdin=subprocess.DEVNULL, stdout=file,
            stderr=subprocess.STDOUT, env=environment, start_new_session=True,
        )  # fmt: skip
        try:
            late = _wait(process, plan, limit_secs, standing)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)
    text = output.read_text(errors="replace")
    done = Done(process.returncode, text, read_calls(log, run), plan.fired, plan.struck, late)
    plan.close()
    return done


def _wait(
    process: subprocess.Popen[bytes], plan: PlanFile, limit_secs: float, standing: Callable[[], object] | None
) -> bool:
    """Wait for the end; whether it did not come in time."""
    until = time.monotonic() + limit_secs
    while process.poll() is None:
        if time.monotonic() > until:
            return True
        if standing is not None and plan.paused:
            os.killpg(process.pid, signal.SIGSTOP)
            for pid in members(process.pid):
                await_stillness(pid, until - time.monotonic())
            standing()
            return False
        time.sleep(_POLL_SECS)
    return False


def durable_slots(calls: Sequence[Call]) -> set[int]:
    """The log records that were linked and whose directory was synced afterwards, by slot."""
    linked: set[int] = set()
    durable: set[int] = set()
    for call in calls:
        found = _RECORD.fullmatch(call.path)
        if call.error or call.result < 0:
            continue
        if found and call.kind == "link":
            linked.add(int(found[1]))
        elif call.kind == "sync" and _LOG.fullmatch(call.path):
            durable |= linked
    return durable


_PROVED = ("manifest.json", ".safetensors")


@dataclass(frozen=True)
class Kept:
    """Records that were durable when the fault happened: their bytes, by slot."""

    records: dict[int, bytes]


def _storage_of(run: Path) -> LocalStorage:
    below = run / "checkpoints"
    return LocalStorage(below if below.is_dir() else run)


def end_of(run: Path) -> tuple[int, int]:
    """The newest epoch of a run that has ended, and its branch."""
    try:
        view = open_log(_storage_of(run))
    except RelayError as error:
        raise UsageError(f"the command leaves no readable checkpoints in {{run}}: {error}") from error
    newest = view.newest()
    if newest is None:
        raise UsageError(
            "the command leaves no epoch in {run}: let it save there, as JobRunner(job, run) does"
        )
    return newest.position.epoch, view.current.id


def kept_at(run: Path, slots: set[int]) -> Kept:
    """The bytes of durable records that stay, as they lie there; one that is gone has none."""
    root, newest = _storage_of(run).root, max(slots, default=0)
    files = {slot: root / slot_path(slot) for slot in slots if not _may_go(slot, newest)}
    return Kept({slot: file.read_bytes() if file.exists() else b"" for slot, file in files.items()})


def _may_go(slot: int, newest: int) -> bool:
    """Whether a log up to `newest` may have thinned this record away (format.md, section 4)."""
    return slot % STRIDE != 0 and slot <= newest - STRIDE


def judge_struck(fault: Fault, done: Done) -> tuple[Verdict, str]:
    """What the struck command itself did: it ended, and said the reason where it failed."""
    if done.late:
        return Verdict.FAILED, f"it did not end in time: {done.tail}"
    if fault.errno and done.code and os.strerror(fault.errno) not in done.output:
        return (
            Verdict.FAILED,
            f"it ended with {done.code} and did not say {os.strerror(fault.errno)}: {done.tail}",
        )
    return Verdict.SURVIVED, ""


def judge_left(run: Path, before: Kept, newest: int, branch: int) -> tuple[Verdict, str]:
    """Check that durable records are unchanged, live epochs are valid, and the end is the same."""
    storage = _storage_of(run)
    view = open_log(storage)
    for slot, data in before.records.items():
        file = storage.root / slot_path(slot)
        if _may_go(slot, view.slot):
            continue
        if not data or not file.exists() or file.read_bytes() != data:
            return Verdict.LOST, f"record {slot} of the log was durable and is not there any more"
    proofs = [verify_epoch(storage, entry, level="full") for entry in view.entries]
    for proof in proofs:
        if not proof.verified:
            return Verdict.LOST, f"epoch {proof.entry.position} is {proof.outcome.value}: {proof.reason}"
    return _judge_end(view, newest, branch)


def _judge_end(view: LogView, newest: int, branch: int) -> tuple[Verdict, str]:
    found = view.newest()
    if found is None or found.position.epoch != newest:
        return Verdict.FAILED, f"the run ends at epoch {found and found.position} instead of {newest}"
    if view.current.id != branch:
        return Verdict.LOST, "committed epochs were abandoned: the run is on another branch"
    return Verdict.SURVIVED, ""


def is_noticed(run: Path, path: str) -> bool:
    """Whether verification detects a change of this file, or does not need the file."""
    storage = _storage_of(run)
    try:
        view = open_log(storage)
        proofs = [verify_epoch(storage, entry, level="full") for entry in view.entries]
    except RelayError:
        return True
    if view.notices or not all(proof.verified for proof in proofs):
        return True
    tries = {name for entry in view.entries for name in (entry.attempt_name, *entry.needs)}
    live = any(f"data/{name}/" in path for name in tries)
    return not (live and path.endswith(_PROVED))


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

    def cut(self, system: power.FileSystem, number: int) -> Outcome:
        """Let the power fail before a call: the copy of the device is all that the next start has."""
        kind, name = f"power {system.name}", f"{system.name}@{number}"
        image, mount, after = (self.home / one for one in ("image", "mnt", "cut"))
        power.make_image(system, image)
        found: list[Kept] = []
        with power.mounted(system, image, mount) as where:

            def standing() -> None:
                found.append(kept_at(where / "run", _durable_now(self.home, where / "run")))
                power.copy_image(image, after)

            fault = Fault("pause", number)
            run_command(self.job.words, where / "run", self.home, fault, self.limit_secs, standing=standing)
        image.unlink()
        if not found:
            return Outcome(kind, name, Verdict.MISSED)
        with power.mounted(system, after, mount) as where:
            verdict, reason = self.judge_again(where / "run", found[0])
        after.unlink()
        return Outcome(kind, name, verdict, reason)

    def damaged(self, change: damage.Damage) -> Outcome:
        """Change a byte of the finished run: files of the epochs must then fail verification."""
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
    job, chance = reference.job, random.Random(f"{reference.job.wish.seed}/{kind}")
    if kind in ("flip", "truncate"):
        for change in damage.draw(kind, files_below(reference.run), job.count(kind), job.wish.seed):
            yield reference.damaged(change)
    elif kind == "power":
        for name in job.wish.file_systems:
            yield from _cuts(reference, name, chance, tally)
    else:
        faults = list(scenarios.KINDS[kind](reference.calls))
        wanted = len(faults) if job.wish.every else min(len(faults), job.count(kind))
        for fault in chance.sample(faults, wanted):
            yield reference.strike(fault, kind)


def _cuts(reference: Reference, name: str, chance: random.Random, tally: Tally) -> Iterator[Outcome]:
    system = _system(name)
    reason = power.why_not(system, reference.home)
    if reason:
        tally.skipped[f"power {name}"] = reason
        return
    numbers = [call.number for call in reference.calls if call.kind in CHANGING]
    for number in chance.sample(numbers, min(len(numbers), reference.job.count("power"))):
        yield reference.cut(system, number)


def _system(name: str) -> power.FileSystem:
    if name not in power.FILE_SYSTEMS:
        raise UsageError(f"there is no file system {name!r}: choose from {', '.join(power.FILE_SYSTEMS)}")
    return power.FILE_SYSTEMS[name]


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
        if what in power.FILE_SYSTEMS and number.isdecimal():
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
