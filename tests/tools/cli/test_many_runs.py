"""Many runs in one process, as notebooks, folds and sweeps make them, also in forks of it."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from samples import sample
from torchrun import REPOSITORY, clean_environment
from torchrun import torchrun as torchrun_of

from torchrelay import EpochLoader, Job, JobRunner, LocalSession, max_epochs
from torchrelay.errors import NotAllowedNowError

RUNS = sample(20, 50)


class PrunedError(Exception):
    """As a search library ends a trial with it; `value` is what it reads."""

    def __init__(self, value: float, *, step: int) -> None:
        super().__init__(value, step)
        self.value = value


def trial(run: Path | None, *, pruned: bool = False, **options: Any) -> weakref.ref[torch.nn.Module]:
    """One run in a scope of its own; what is left of its model, when nobody of the program has it."""
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = EpochLoader(torch.randn(16, 64), batch_size=8)
    job = Job("trial", blobs={"model": model, "optimizer": optimizer, "loader": loader})

    @job.epoch
    def epoch(ctx: Any) -> None:
        for batch in ctx.steps(loader):
            optimizer.zero_grad()
            model(batch[0]).square().mean().backward()
            optimizer.step()
        if pruned:
            raise PrunedError(0.5, step=ctx.epoch)

    job.stop_when(max_epochs(2))
    kept: Any = {} if run is None else {"code": False, **options}
    runner = JobRunner(job, run, best=None, **kept)
    value = None
    try:
        runner.train()
    except PrunedError as error:
        value = error.value
    assert value == (0.5 if pruned else None)
    return weakref.ref(model)


def program_of_runs(folder: Path) -> dict[str, list[int]]:
    """What a process holds before, between and behind two halves of many runs, every fifth of them pruned."""
    source = f"""
import ctypes, gc, json, os, sys, threading
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_many_runs import trial

def held():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    kib = next(int(line.split()[1]) for line in Path("/proc/self/status").open() if line.startswith("VmRSS"))
    return [len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), kib]

def play(numbers):
    for number in numbers:
        trial(Path(f"run{{number}}"), pruned=number % 5 == 4, asynchronous=number % 2 == 1, trackers=["csv"])

play(range(30))  # until the allocator has what these runs take
before = held()
play(range(30, 30 + {RUNS}))
between = held()
play(range(30 + {RUNS}, 30 + 2 * {RUNS}))
print(json.dumps({{"before": before, "between": between, "after": held()}}))
"""
    environment = clean_environment({"PYTHONPATH": f"{REPOSITORY}/src:{REPOSITORY}/tests/helpers"})
    done = subprocess.run(
        [sys.executable, "-c", source],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.timeout(300)
def test_many_runs_leave_nothing(tmp_path: Path) -> None:
    """No thread, no file descriptor and no MiB stays behind many runs in one process."""
    held = program_of_runs(tmp_path)
    first, second = (
        [after - before for before, after in zip(held[begin], held[end], strict=True)]
        for begin, end in (("before", "between"), ("between", "after"))
    )
    assert first[:2] == second[:2] == [0, 0], held
    assert min(first[2], second[2]) < 1024, f"what runs leave behind is left by both halves: {held}"


@pytest.mark.parametrize("pruned", [False, True], ids=["finished", "pruned"])
def test_a_model_goes_with_its_run(tmp_path: Path, pruned: bool) -> None:
    """What a run held is let go of when the program does, with no look of the garbage collector."""
    trial(tmp_path / "first", pruned=pruned)  # what is imported or made once
    gc.collect()
    gc.disable()
    try:
        assert trial(tmp_path / "second", pruned=pruned)() is None
        assert trial(None, pruned=pruned)() is None
    finally:
        gc.enable()


def test_a_pruner_of_optuna_reaches_its_study(tmp_path: Path) -> None:
    """TrialPruned in a task, or in a stop condition, ends the trial as pruned, and the study goes on."""
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)

    def objective(one: Any) -> float:
        job = Job("trial", blobs={"w": torch.zeros(1)})

        def prune(ctx: Any) -> bool:
            if one.number == 1:
                raise optuna.TrialPruned
            return False

        @job.epoch
        def epoch(ctx: Any) -> None:
            if one.number == 0:
                raise optuna.TrialPruned

        job.stop_when(max_epochs(1), prune)
        JobRunner(job, tmp_path / f"run{one.number}", code=False).train()
        return 1.0

    study = optuna.create_study()
    study.optimize(objective, n_trials=3)
    assert [one.state.name for one in study.trials] == ["PRUNED", "PRUNED", "COMPLETE"]


def in_a_fork(work: Any) -> str:
    """What `work` gives in a process that is forked here."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        gc.freeze()  # what earlier tests left may hold threads that a fork does not have
        try:
            os.write(theirs, str(work()).encode())
        except BaseException as error:
            os.write(theirs, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(theirs)
    with open(ours) as told:
        text = told.read()
    os.waitpid(child, 0)
    return text


def nested(run: Path, session: LocalSession | None = None) -> str:
    """A run inside of a task."""
    job = Job("inner", blobs={"w": torch.zeros(1)})

    @job.epoch
    def epoch(ctx: Any) -> None:
        ctx["w"].add_(1)

    job.stop_when(max_epochs(2))
    result = JobRunner(job, run, code=False).train(session)
    return f"{result.status} {int(result)}"


def test_a_process_that_a_task_forks_trains(tmp_path: Path) -> None:
    """It has a run of its own; its parent's session, and a second run in the parent, are refused as such."""
    job, told = Job("outer", blobs={"w": torch.zeros(1)}), {}
    session = LocalSession()

    @job.epoch
    def epoch(ctx: Any) -> None:
        told["fork"] = in_a_fork(lambda: nested(tmp_path / "inner"))
        told["session"] = in_a_fork(lambda: nested(tmp_path / "other", session))
        with pytest.raises(NotAllowedNowError, match="another train"):
            nested(tmp_path / "third")

    job.stop_when(max_epochs(1))
    with session:
        assert JobRunner(job, tmp_path / "outer", code=False).train(session).status == "FINISHED"
    assert told["fork"] == "FINISHED 2"
    assert f"belongs to process {os.getpid()}" in told["session"]


RANKS = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import torch, torchrelay
from test_many_runs import in_a_fork, nested
from torchrelay import Job, JobRunner, LocalSession, max_epochs
rank = torchrelay.init().env.rank
job = Job("outer", blobs={"w": torch.zeros(1)})

@job.epoch
def epoch(ctx):
    print(in_a_fork(lambda: nested(Path(f"inner{rank}"))))
    print(in_a_fork(lambda: nested(Path(f"local{rank}"), LocalSession())))

job.stop_when(max_epochs(1))
JobRunner(job, "outer", code=False).main([])
"""


@pytest.mark.ranks
@pytest.mark.timeout(200)
def test_a_process_that_a_rank_forks_is_no_rank(tmp_path: Path) -> None:
    """It is told so at once, with the remedy, which works; the ranks go on."""
    helpers = {"PYTHONPATH": f"{REPOSITORY}/src:{REPOSITORY}/tests/helpers"}
    done = torchrun_of(RANKS, str(Path(__file__).parent), ranks=2, cwd=tmp_path, env=helpers, warm=True)
    assert done.rc == 0, str(done)
    for rank in range(2):
        said = done.of_rank(rank)
        assert f"forked from rank {rank}" in said and "FINISHED 2" in said, str(done)
