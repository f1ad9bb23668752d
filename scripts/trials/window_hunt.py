"""Runs that accumulate gradients, cut anywhere: what is resumed must end in the bits of the run that was not.

A trial is a program (ranks, batches per window, who says where windows end, when gradients are cleared,
whether they are summed up in every batch) and a cut (what comes, at which step). A cut is SIGTERM, SIGUSR2
and two steps later SIGKILL, or SIGKILL alone. Starts are forked from this process, which has torch already.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import hashlib
import itertools
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torchrelay
from torchrelay import EpochLoader, Job, JobRunner, data_parallel, max_epochs

STEPS, EPOCHS = 7, 2
WINDOWS = range(2, 8)
CLEARED = ("after", "before", "kept", "never")
"""When a program clears gradients: behind a step, before a window, to zeros behind a step, never."""
CUTS = ("SIGTERM", "SIGUSR2", "SIGKILL")
WAIT_SECS = 60.0
_PORTS_TRIED = 5


@dataclass(frozen=True)
class Program:
    """A training; its windows continue over the ends of epochs, unless `accumulate` says where they end."""

    ranks: int
    window: int
    accumulate: bool
    cleared: str
    no_sync: bool

    def __str__(self) -> str:
        said = "accumulate=" if self.accumulate else "no accumulate="
        sync = ", no_sync" if self.no_sync else ""
        return f"{self.ranks} ranks, windows of {self.window}, {said}, cleared {self.cleared}{sync}"


@dataclass(frozen=True)
class Cut:
    """What comes at which of all steps; `signal` None lets the run end."""

    signal: str | None = None
    step: int = 0


def programs(ranks: Sequence[int] = (1, 2), windows: Sequence[int] = WINDOWS) -> Iterator[Program]:
    """All programs of the matrix."""
    for number, window, said, cleared in itertools.product(ranks, windows, (False, True), CLEARED):
        yield Program(number, window, said, cleared, no_sync=False)
        if number > 1:
            yield Program(number, window, said, cleared, no_sync=True)


def cuts() -> Iterator[Cut]:
    """All cuts of a program."""
    for name, step in itertools.product(CUTS, range(1, STEPS * EPOCHS + 1)):
        yield Cut(name, step)


class Sight(nn.Module):
    """Two layers; the second half of the steps leaves one of them unused."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 1)
        self.sometimes = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor, *, both: bool) -> torch.Tensor:
        """Both second layers, or one of them."""
        found = torch.tanh(self.first(x))
        return self.second(found) + self.sometimes(found) if both else self.second(found)


def train(run: Path, program: Program, cut: Cut) -> tuple[str, str]:
    """One start: the status that it ended with, and a digest of all that was trained."""
    torchrelay.seed(0)
    session = torchrelay.init() if program.ranks > 1 else None
    model = Sight()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    x = torch.randn(STEPS * 4, 6, generator=torch.Generator().manual_seed(1))
    loader = EpochLoader((x, x.sum(1, keepdim=True)), batch_size=4)
    trained = data_parallel(model)
    job = Job("windows", blobs={"model": model, "optimizer": optimizer, "loader": loader})
    blow = Blow(cut, _mark(run))

    @job.epoch
    def epoch(ctx: Any) -> None:
        steps = ctx.steps(loader, accumulate=program.window) if program.accumulate else ctx.steps(loader)
        for batch in steps:
            inputs, targets = batch
            total = ctx.total_steps
            ends = ctx.window_end if program.accumulate else total % program.window == 0
            begins = (ctx.step if program.accumulate else total) % program.window == 1
            if program.cleared == "before" and begins:
                optimizer.zero_grad()
            quiet = program.no_sync and not ends
            with trained.no_sync() if quiet else contextlib.nullcontext():  # type: ignore[operator]
                # Which parameters a rank uses is alike in all batches of a window: see docs/limits.md.
                found = trained(inputs, both=not program.no_sync and total % 3 != 0)
                ((found - targets).square().mean() * batch.weight / program.window).backward()
            if ends:
                optimizer.step()
                if program.cleared in ("after", "kept"):
                    optimizer.zero_grad(set_to_none=program.cleared == "after")
            blow.fall(total, ctx.rank)

    job.stop_when(max_epochs(EPOCHS))
    result = JobRunner(job, str(run), best=None, code=False, max_attempts=0).train(session)
    if session is not None:
        session.close()  # rank 0 has the store, and waits for the other; `os._exit` would not
    return str(result.status), digest(model, optimizer)


class Blow:
    """Strikes a start once, at the step of its cut or the first behind it; a mark says where it fell."""

    def __init__(self, cut: Cut, mark: Path) -> None:
        self._cut, self._mark = cut, mark
        self._fell = 0

    def fall(self, step: int, rank: int) -> None:
        """At the end of a step."""
        if self._cut.signal is None or step < self._cut.step:
            return
        if self._fell and self._cut.signal == "SIGUSR2" and step == self._fell + 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if not self._fell:
            self._fell = step
            if rank == 0:
                self._mark.write_text(str(step))
            if rank == 0 or self._cut.signal == "SIGKILL":
                os.kill(os.getpid(), getattr(signal, self._cut.signal))


def _mark(run: Path) -> Path:
    return run.parent / f"{run.name}.struck"


def struck(run: Path) -> int:
    """The step at which the last start was cut; 0 where it was not."""
    mark = _mark(run)
    step = int(mark.read_text()) if mark.exists() else 0
    mark.unlink(missing_ok=True)
    return step


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of parameters and their state, bit by bit; gradients that a step has left behind are none."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        state = optimizer.state.get(parameter, {})
        for one in (parameter, *(state[key] for key in sorted(state))):
            found.update(one.detach().numpy().tobytes())
    return found.hexdigest()


def start(run: Path, program: Program, cut: Cut) -> list[tuple[int, str]]:
    """Fork the ranks of a start; the exit code of each, and what it wrote: status and digest."""
    notes = [run.parent / f"{run.name}.rank{rank}" for rank in range(program.ranks)]
    for _ in range(_PORTS_TRIED):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        children = [_fork(run, program, cut, rank, port, note) for rank, note in enumerate(notes)]
        ends = [_wait(child) for child in children]
        if ends[0] != errno.EADDRINUSE:  # a hunt beside this one may have taken the port
            break
    found = [(end, note.read_text() if note.exists() else "") for end, note in zip(ends, notes, strict=True)]
    for note in notes:
        note.unlink(missing_ok=True)
    return found


def _fork(run: Path, program: Program, cut: Cut, rank: int, port: int, note: Path) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        with (run.parent / f"{run.name}.log").open("a") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        if program.ranks > 1:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(program.ranks))
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            os.environ["LOCAL_WORLD_SIZE"] = str(program.ranks)
        note.write_text(" ".join(train(run, program, cut)))
        code = 0
    except BaseException as error:
        print(type(error).__name__, error, file=sys.stderr)
        code = errno.EADDRINUSE if "EADDRINUSE" in str(error) else 1
    finally:
        os._exit(code)


def _wait(child: int) -> int:
    end = time.monotonic() + WAIT_SECS
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -signal.SIGALRM


def ended(found: Sequence[tuple[int, str]]) -> str | None:
    """What all ranks of a start that ran to its end trained; None where one did not."""
    if all(code == 0 and note.startswith("FINISHED ") for code, note in found):
        return "; ".join(note for _, note in found)
    return None


class Hunt:
    """Plays trials in a directory; remembers what each program trains uninterrupted."""

    def __init__(self, where: Path) -> None:
        # What torch imports when it first trains is imported once, and not in every start.
        train(where / "first", Program(1, 2, accumulate=False, cleared="after", no_sync=False), Cut())
        self._where = where
        self._truths: dict[Program, str | None] = {}
        self._number = 0

    def play(self, program: Program, cut: Cut) -> str | None:
        """What went wrong; None where the bits are those of the run that was not cut."""
        truth = self._truth(program)
        if truth is None:
            return f"{program}: does not run to its end (see {self._where})"
        run = self._new()
        first = start(run, program, cut)
        if struck(run) != cut.step:
            return f"{program}, {cut.signal} at step {cut.step}: was not cut there (see {run}.log)"
        # A cut behind the last step of the run comes too late to be one.
        found = ended(first) or ended(start(run, program, Cut()))
        if found == truth:
            return None
        what = "other bits" if found is not None else "does not resume"
        return f"{program}, {cut.signal} at step {cut.step}: {what} (see {run}.log)"

    def play_chains(self, program: Program, name: str) -> Iterator[str]:
        """The same signal at each step once, in as few runs as that takes: each start resumes from a cut.

        A run leaves out the steps that a save went beyond, because ranks agree on a step further on; the
        next run cuts there. Fewer starts than cuts one by one, which follow where the end is wrong.
        """
        left = {cut.step for cut in cuts() if cut.signal == name}
        if self._truth(program) is None:
            yield f"{program}: does not run to its end (see {self._where})"
            return
        while left:
            run, steps, at = self._new(), set[int](), 0
            while wanted := [step for step in left if step > at]:
                found = ended(start(run, program, Cut(name, min(wanted))))
                if not (at := struck(run)):
                    break
                steps.add(at)
            else:
                found = found or ended(start(run, program, Cut()))
            if not steps & left:
                yield f"{program}, {name} at step {min(left)}: was not cut there (see {run}.log)"
                return
            left -= steps
            if found is None or found != self._truth(program):
                told = [said for step in sorted(steps) if (said := self.play(program, Cut(name, step)))]
                yield from told or [f"{program}, {name} at {sorted(steps)}: other bits (see {run}.log)"]

    def _truth(self, program: Program) -> str | None:
        if program not in self._truths:
            self._truths[program] = ended(start(self._new(), program, Cut()))
        return self._truths[program]

    def _new(self) -> Path:
        self._number += 1
        return self._where / f"run{self._number}"


def chosen(seed: int, ranks: Sequence[int], windows: Sequence[int]) -> list[tuple[Program, Cut]]:
    """All of the matrix once, in an order that soon has met every value of each column."""
    trials = list(itertools.product(programs(ranks, windows), cuts()))
    random.Random(seed).shuffle(trials)
    return trials


def main(arguments: Sequence[str]) -> int:
    """Play until the time is over or the matrix is; 1 where a trial went wrong."""
    parser = argparse.ArgumentParser(prog="scripts/campaigns/window-hunt", description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--count", type=int, help="so many cuts, however long they take")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--windows", type=int, nargs="+", default=WINDOWS)
    parser.add_argument("--all", action="store_true", help="the whole matrix, however long it takes")
    given = parser.parse_args(arguments)
    begin, wrong, count = time.monotonic(), 0, 0
    with tempfile.TemporaryDirectory() as where:
        for tried, found in _played(Hunt(Path(where)), given):
            count, wrong = count + tried, wrong + len(found)
            for said in found:
                print(said, flush=True)
            late = given.count is None and time.monotonic() - begin > given.seconds
            if count == given.count or (late and not given.all):
                break
    print(f"{count} cuts in {time.monotonic() - begin:.0f} s, {wrong} ended wrong")
    return 1 if wrong else 0


def _played(hunt: Hunt, given: argparse.Namespace) -> Iterator[tuple[int, list[str]]]:
    """Of each piece of the matrix how many cuts it had, and what went wrong."""
    if given.all:
        for program, name in itertools.product(programs(given.ranks, given.windows), CUTS):
            yield STEPS * EPOCHS, list(hunt.play_chains(program, name))
            print(f"tried: {program}, {name}", file=sys.stderr, flush=True)
    else:
        for program, cut in chosen(given.seed, given.ranks, given.windows):
            said = hunt.play(program, cut)
            yield 1, [said] if said else []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
