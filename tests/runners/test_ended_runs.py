"""Runs that have ended and are started again: objects hold the state of the last epoch, or of the best."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from stage import warned
from torchrun import REPOSITORY, clean_environment, torchrun

import torchrelay
from torchrelay import Job, JobRunner, LocalSession, max_epochs, open_checkpoint
from torchrelay.errors import BlobError, UnknownEpochError, UsageError

BEST = ("val/acc", "max")
VALUES = {1: 0.1, 2: 0.9, 3: 0.3, 4: 0.2}


class Start:
    """One start of a program, with objects of its own; `ran` says which of its tasks ran."""

    def __init__(self, where: Path, epochs: int = 4, width: int = 3, **options: Any) -> None:
        self.ran: list[str] = []
        self.model = torch.nn.Linear(width, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.job = Job("ended", blobs=dict(model=self.model, optimizer=self.optimizer))
        self.job.setup(self.note("setup"))
        self.job.init(lambda ws: ws.update(total=torch.zeros(1)))
        self.job.epoch(self.train)
        self.job.download(self.note("download"))
        self.job.exit(self.note("exit"))
        self.job.stop_when(max_epochs(epochs))
        self.runner = JobRunner(self.job, where, code=False, **{"best": BEST, **options})

    def note(self, name: str) -> Callable[[], None]:
        return lambda: self.ran.append(name)

    def train(self, ctx: Any) -> None:
        self.ran.append(f"epoch {ctx.epoch}")
        self.optimizer.zero_grad()
        self.model(torch.rand(2, 3)).sum().backward()
        self.optimizer.step()
        ctx["total"] += 1
        ctx.log("val/acc", VALUES[ctx.epoch])

    @property
    def weight(self) -> list[list[float]]:
        return self.model.weight.tolist()

    def steps(self) -> int:
        return int(self.optimizer.state_dict()["state"][0]["step"])


def stored(run: Path, epoch: int) -> list[list[float]]:
    tensor: torch.Tensor = open_checkpoint(run, epoch).load_tensors("model.weight")["model.weight"]
    return tensor.tolist()


def files(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_a_run_that_has_ended_leaves_the_state_of_its_last_epoch(tmp_path: Path) -> None:
    """Models, optimizers, values of `init`, random states are as after the first train; no file changed."""
    torchrelay.seed(0)
    first = Start(tmp_path)
    first.runner.train()
    drawn, before = torch.rand(3), files(tmp_path)
    again = Start(tmp_path)
    assert again.weight != first.weight
    with LocalSession() as session:
        result = again.runner.train(session)
        assert session.blob("total").item() == 4.0
    assert torch.equal(torch.rand(3), drawn)
    assert (again.weight, again.steps(), again.ran) == (first.weight, 4, ["setup"])
    assert (result, result.status, result.committed, result.metrics) == (4, "FINISHED", 4, {"val/acc": 0.2})
    assert files(tmp_path) == before


def test_the_folds_of_a_cross_validation_are_scored_alike_the_second_time(tmp_path: Path) -> None:
    """A program that trains several runs and scores each gives the same scores when it is started again."""

    def scores() -> list[Any]:
        found = []
        for fold in range(3):
            torchrelay.seed(fold)
            start = Start(tmp_path / f"fold{fold}", epochs=2)
            start.runner.train()
            found.append(start.weight)
        return found

    assert scores() == scores()


class Net(torchrelay.Program):
    max_epochs = 2

    def make_data(self) -> Any:
        x = torch.randn(60, 6, generator=torch.Generator().manual_seed(0))
        y = (x.sum(1) > 0).long()
        return {"train": (x[:40], y[:40]), "test": (x[40:], y[40:])}

    def make_model(self) -> torch.nn.Module:
        return torch.nn.Linear(6, 2)


def test_a_program_that_has_trained_tests_the_trained_model(tmp_path: Path) -> None:
    """A new object of the class, trained into the same directory, tests to the same numbers."""
    told = []
    for _ in range(2):
        program = Net()
        assert program.train(tmp_path / "run") == 2
        told.append(program.test())
    assert told[0] == told[1]


KILLED = """
import os, sys, torch, torchrelay
from torchrelay import Job, JobRunner, max_epochs
from torchrelay.runners.training.journal import Journal
from torchrelay.runners.training.saver import Saver

where, asynchronous = sys.argv[1], sys.argv[2] == "asynchronous"

def start(name):
    torchrelay.seed(len(name))
    w = torch.zeros(2)
    job = Job("killed", blobs=dict(w=w))
    job.epoch(lambda ctx: w.copy_(w + ctx.epoch))
    job.stop_when(max_epochs(3))
    runner = JobRunner(job, f"{where}/{name}", asynchronous=asynchronous, code=False)
    return w, runner

def dies_in(owner, verb, turn, name):
    child = os.fork()
    if child == 0:
        whole, calls = getattr(owner, verb), []
        def struck(self, *args):
            calls.append(1)
            if len(calls) == turn:
                os._exit(9)
            return whole(self, *args)
        setattr(owner, verb, struck)
        try:
            start(name)[1].train()
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9, name

PARTS = [(Journal, "final_part_done", number) for number in (1, 2, 3)]
POINTS = [(Saver, "_saved", 4), *PARTS, (Journal, "finished", 1)]
for number, point in enumerate(POINTS):
    name = f"{point[1]}{number}"
    dies_in(*point, name)
    for turn in range(2):
        w, runner = start(name)
        result = runner.train()
        print(name, int(result), result.status, w.tolist(), runner.run_directory.status()["state"])
"""


@pytest.mark.parametrize("kind", ["synchronous", "asynchronous"])
def test_a_run_that_is_killed_behind_its_last_commit_ends_with_its_state(tmp_path: Path, kind: str) -> None:
    """Wherever it dies, the next start and the one after it hold the last epoch, and the status says so."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path), kind],
        env=clean_environment(), capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and len(lines) == 10, done
    assert {line.partition(" ")[2] for line in lines} == {"3 FINISHED [6.0, 6.0] FINISHED"}, lines


def cut(content: bytes) -> bytes:
    return content[:-8]


def flip(content: bytes) -> bytes:
    return content[:-8] + bytes(255 - one for one in content[-8:])


@pytest.mark.parametrize(("damage", "setups"), [(cut, 1), (flip, 2)])
def test_a_run_whose_last_epoch_is_damaged_has_not_ended(
    tmp_path: Path, damage: Callable[[bytes], bytes], setups: int
) -> None:
    """It says so and trains the lost epoch again, whether damage shows before objects are made or after."""
    Start(tmp_path).runner.train()
    (data,) = (tmp_path / "checkpoints/data").glob("e00000004-*")
    for path in data.glob("*.safetensors"):
        path.write_bytes(damage(path.read_bytes()))
    again = Start(tmp_path)
    with warned() as texts:
        assert again.runner.train() == 4
    assert any("the run had ended, but resumes from an older epoch" in one for one in texts)
    assert again.ran == [*["setup"] * setups, "epoch 4", "download", "exit"]
    assert again.weight == stored(tmp_path, 4) and again.steps() == 4


def test_a_changed_model_is_refused_by_a_run_that_has_ended(tmp_path: Path) -> None:
    """Objects that the last epoch does not fit are no success either: the refusal names the leaf."""
    Start(tmp_path).runner.train()
    with pytest.raises(BlobError, match=r"model\.weight"):
        Start(tmp_path, width=5).runner.train()


def test_load_best_is_one_call(tmp_path: Path) -> None:
    """Behind train, in a new process, in a session of the user's: all that is registered is of that epoch."""
    start = Start(tmp_path)
    start.runner.train()
    assert start.weight == stored(tmp_path, 4)
    assert start.runner.load_best() == 2
    assert start.weight == stored(tmp_path, 2) and start.steps() == 2
    assert start.runner.train() == 4 and start.weight == stored(tmp_path, 4)
    new = Start(tmp_path)
    assert new.runner.load_best() == 2 and new.ran == ["setup"]
    assert new.weight == stored(tmp_path, 2) and new.steps() == 2
    held = Start(tmp_path)
    with LocalSession() as session:
        held.runner.train(session)
        state = torch.get_rng_state()
        assert held.runner.load_best(session) == 2 and session.blob("total").item() == 2.0
        assert torch.equal(torch.get_rng_state(), state)
    assert held.ran == ["setup"] and held.weight == stored(tmp_path, 2)


def test_load_best_leaves_what_retention_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An epoch without its optimizer gives the model; the optimizer stays as it is, with one line."""
    start = Start(tmp_path, keep_optimizer_last=1)
    start.runner.train()
    assert start.runner.load_best() == 2
    assert start.weight == stored(tmp_path, 2) and start.steps() == 4
    assert "optimizer is unchanged, because keep_optimizer_last" in capsys.readouterr().err


def test_load_best_without_a_best_is_refused(tmp_path: Path) -> None:
    """Without a metric, without an epoch that has it, and without a manager, objects stay as they are."""
    start = Start(tmp_path, best=None)
    start.runner.train()
    last = start.weight
    with pytest.raises(UsageError, match="best="):
        start.runner.load_best()
    with pytest.raises(UnknownEpochError, match="val/other"):
        JobRunner(start.job, tmp_path, best=("val/other", "max"), code=False).load_best()
    with pytest.raises(UsageError, match="manager"):
        JobRunner(start.job).load_best()
    assert start.weight == last


@pytest.mark.ranks
@pytest.mark.timeout(150)
def test_ranks_hold_the_last_epoch_and_load_the_best(tmp_path: Path) -> None:
    """On two ranks a second start has each rank's own state of the last epoch; `load_best`, of the best."""
    program = REPOSITORY / "tests/programs/ended.py"
    done = torchrun(program, str(tmp_path), warm=True, ranks=2, cwd=tmp_path, timeout_secs=100)
    assert done.rc == 0, str(done)
    for rank in range(2):
        seen = json.loads((tmp_path / f"rank{rank}.json").read_text())
        first, again = seen["first"], seen["again"]
        assert seen["status"] == "FINISHED" and again["ran"] == ["setup"]
        assert seen["built"] != first["weight"] == again["weight"]
        assert (again["steps"], again["own"]) == ([3, 3], 3.0 * (rank + 1))
        epoch, best = seen["best"]
        assert epoch == 2 and best["own"] == 2.0 * (rank + 1) and best["weight"] != first["weight"]
        assert best["steps"] == [2, 2] and best["ran"] == ["setup"]


def test_factories_and_nodes_hold_the_last_epoch_too(tmp_path: Path) -> None:
    """What factories and `init` make on each of two nodes of one process has the state of that node."""

    def start() -> list[Any]:
        job = Job("made")
        job.blobs(net=lambda ctx: torch.nn.Linear(2, 1))
        job.setup(lambda ctx: ctx.workspace.update(scale=2.0))
        job.init(lambda ws: ws.update(count=0))

        @job.epoch
        def train(ctx: Any) -> None:
            ctx["count"] += ctx.rank + 1
            with torch.no_grad():
                ctx["net"].weight.fill_(ctx["scale"] * ctx.epoch)

        job.stop_when(max_epochs(3))
        with LocalSession(["a", "b"]) as session:
            assert JobRunner(job, tmp_path, code=False).train(session) == 3
            return [(session.blob(f"{n}:net").weight.tolist(), session.blob(f"{n}:count")) for n in "ab"]

    assert start() == start() == [([[6.0, 6.0]], 3), ([[6.0, 6.0]], 6)]
