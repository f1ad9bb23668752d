"""A run that leaves in the middle of an epoch ends, when it goes on, in what it would have been without."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ending_job import Start, start
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from stage import warned

from torchrelay import (
    Context,
    EpochLoader,
    Job,
    JobRunner,
    LocalSession,
    Node,
    Run,
    RunResult,
    Task,
    max_epochs,
)
from torchrelay.checkpoint.load.checkpoint import open_checkpoint
from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.errors import UnknownEpochError


def positions(run: Path) -> list[str]:
    """What a run has committed on its current branch."""
    return [str(entry.position) for entry in open_log(LocalStorage(run / "checkpoints"), None).line()]


def alone(run: Path, at: int | None = None, **how: object) -> Start:
    """One start in this process; at a tick it gets SIGTERM."""

    def ask(tick: int, ctx: Context) -> None:
        if tick == at:
            os.kill(os.getpid(), signal.SIGTERM)

    with LocalSession() as session:
        return start(session, run, ask, **how)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Start]:
    """The undisturbed run with an optimizer, played once."""
    known: dict[str, Start] = {}

    def of(kind: str) -> Start:
        if kind not in known:
            known[kind] = alone(tmp_path_factory.mktemp("whole") / "run", kind=kind)
        return known[kind]

    return of


@settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    ticks=st.lists(st.integers(1, 25), min_size=1, max_size=4),
    kind=st.sampled_from(["adamw", "sgd"]),
    asynchronous=st.booleans(),
)
@example([2, 2, 2], "adamw", False)  # thrice in the loop of one epoch
@example([7, 15], "sgd", True)  # in a loop over a range, and in the next epoch
@example([12, 2], "adamw", False)  # in an evaluation, twice
def test_a_run_that_left_any_number_of_times_ends_in_the_same_bits(
    whole, tmp_path_factory, ticks, kind, asynchronous
):
    """At any batch of training or evaluation, several times in one epoch too: state and metrics are equal."""
    run = tmp_path_factory.mktemp("left") / "run"
    for number, tick in enumerate([*ticks, None]):
        ended = alone(run, tick, kind=kind, seed=5 if number == 0 else 60 + number, asynchronous=asynchronous)
        if tick is None or ended.ticks < tick:  # the run was over before
            break
        assert ended.result.status == "PREEMPTED"
    assert ended.result.status == "FINISHED" and ended.result == 3
    assert ended.digest == whole(kind).digest
    assert ended.result.metrics == whole(kind).result.metrics
    assert positions(run) == ["0", "1", "2", "3"], "positions inside of epochs are retired"


@pytest.mark.parametrize(
    "change",
    [
        lambda model, optimizer: model.weight.data.mul_(0.5),
        lambda model, optimizer: optimizer.state.clear(),
        lambda model, optimizer: model.bias.requires_grad_(not model.bias.requires_grad),
    ],
    ids=["written through .data", "cleared state", "frozen"],
)
def test_code_before_a_resumed_loop_changes_the_state_once(
    tmp_path: Path, change: Callable[..., Any]
) -> None:
    """A continued task is called again, and what it changes before its loop counts once."""

    def trained(run: Path, leave_at: int = 0) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        loader = EpochLoader((torch.arange(24.0).reshape(12, 2),), batch_size=4)
        with Run(run, dict(model=model, optimizer=optimizer, loader=loader), best=None) as running:
            for _ in running.epochs(2):
                change(model, optimizer)
                for (batch,) in running.steps(loader):
                    optimizer.zero_grad()
                    model(batch).square().mean().backward()
                    optimizer.step()
                    if running.ctx.total_steps == leave_at:
                        os.kill(os.getpid(), signal.SIGTERM)
        assert running.result.status == ("PREEMPTED" if leave_at else "FINISHED")
        return {name: one.clone() for name, one in model.state_dict().items()}

    trained(tmp_path / "left", leave_at=5)
    resumed, whole = trained(tmp_path / "left"), trained(tmp_path / "whole")
    assert all(map(torch.equal, resumed.values(), whole.values()))


def test_a_position_inside_of_an_epoch_is_for_automatic_resume_only(tmp_path):
    """`last`, `best`, an epoch by number and the handler know whole epochs; retention keeps both."""
    run = tmp_path / "run"
    left = alone(run, 15 + 1, keep_last=1)  # of 13 ticks in the first epoch
    assert left.result.status == "PREEMPTED" and positions(run) == ["1", "1+3"]
    assert left.result.committed == 1
    handed = [json.loads(line) for line in (run / "metadata.jsonl").read_text().splitlines()]
    assert max(line["epoch"] for line in handed if "epoch" in line) == 1
    assert [open_checkpoint(run, epoch=name).epoch for name in ("last", "best", 1)] == [1, 1, 1]
    with pytest.raises(UnknownEpochError):
        open_checkpoint(run, epoch=2)
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["exit_code"], status["epoch"], status["step"]) == ("PREEMPTED", 75, 1, 3)


def counting(
    run: Path, loader: object, at: int, *, blobs: dict[str, object] | None = None
) -> tuple[RunResult, int]:
    """A job that sums what its loader gives; SIGTERM after the step `at`. Its result and its sum."""
    total = torch.zeros(1)
    job = Job("counting", blobs={"total": total, **(blobs or {})})

    @job.epoch
    def add(ctx: Context) -> None:
        for batch in ctx.steps(loader):
            total.add_(float(batch[0].sum() if isinstance(batch, (list, tuple)) else batch))
            if ctx.total_steps == at:
                os.kill(os.getpid(), signal.SIGTERM)

    job.stop_when(max_epochs(2))
    result = JobRunner(job, run).train(LocalSession())
    return result, int(total)


def test_a_loader_that_cannot_be_continued_costs_the_epoch_and_no_more(tmp_path, capsys):
    """A generator and an EpochLoader that is no blob: nothing inexact is saved, the reason is said."""
    data = (torch.ones(8, 1),)

    class Numbers:
        def __iter__(self):
            return iter([1, 2, 3, 4])

    for name, loader, reason in (
        ("foreign", Numbers(), "a Numbers cannot be resumed mid-epoch"),
        ("unknown", EpochLoader(data, batch_size=2), "its EpochLoader is not registered"),
    ):
        run = tmp_path / name
        result, _ = counting(run, loader, at=6)
        assert result.status == "PREEMPTED" and positions(run) == ["0", "1"]
        assert reason in capsys.readouterr().err
    result, total = counting(tmp_path / "foreign", Numbers(), at=0)
    assert result.status == "FINISHED" and total == 20
    result, _ = counting(tmp_path / "list", [1, 2, 3, 4], at=6)
    assert positions(tmp_path / "list") == ["0", "1", "1+2"]
    result, total = counting(tmp_path / "list", [1, 2, 3, 4], at=0)
    assert result.status == "FINISHED" and total == 20


@pytest.mark.parametrize(("window", "said"), [(3, True), (1, False)])
def test_an_index_of_batches_begins_anew_in_a_cut_window(tmp_path, caplog, window, said):
    """A loop that accumulates by the index of enumerate() is told what counts them instead."""

    def launch(cut: int) -> None:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = EpochLoader((torch.ones(16, 2),), batch_size=2)
        with Run(tmp_path, dict(model=model, optimizer=optimizer, loader=loader)) as run:
            for _ in run.epochs(1):
                for index, (x,) in enumerate(run.steps(loader)):
                    model(x).sum().backward()
                    if (index + 1) % window == 0:
                        optimizer.step()
                        optimizer.zero_grad()
                    if index == cut:
                        os.kill(os.getpid(), signal.SIGTERM)

    launch(4)
    launch(-1)
    assert ("after 5 batches, with gradients of an open window" in caplog.text) == said


def test_what_a_checkpoint_cannot_hold_costs_the_epoch(tmp_path, capsys):
    """A second loop of a task, a private name, a returned value: the epoch begins anew, and it says why."""
    for part, reason in (
        ("second loop", "give every loop a task of its own"),
        ("private name", "would be lost"),
        ("returned value", "returned a value"),
    ):
        for at in (6, 0):
            job, seen = Job("part", blobs={"total": (total := torch.zeros(1))}), []

            @job.epoch
            def before(ctx: Context, part=part) -> object:
                if part == "private name":
                    ctx["found"] = 1
                return 1 if part == "returned value" else None

            @job.epoch
            def learn(ctx: Context, part=part, at=at, total=total) -> None:
                for _ in range(2 if part == "second loop" else 1):
                    for number in ctx.steps([1, 2, 3]):
                        total.add_(number)
                        if ctx.step == (at - 1 if part == "second loop" else at - 4):
                            os.kill(os.getpid(), signal.SIGTERM)

            job.stop_when(max_epochs(1))
            result = JobRunner(job, tmp_path / part).train(LocalSession())
            assert positions(tmp_path / part) == (["0"] if at else ["0", "1"]), seen
            assert not at or reason in capsys.readouterr().err
        assert result.status == "FINISHED" and int(total) == (12 if part == "second loop" else 6)


def test_emulated_nodes_are_each_continued_where_they_were(tmp_path):
    """One node had done its epoch when the other was asked: each step is done once on each node."""

    def begin(at: int) -> tuple[RunResult, dict[str, list[int]]]:
        seen: dict[str, list[int]] = {"one": [], "two": []}
        with Job("nodes") as job:
            for name in ("one", "two"):
                with Node(name):

                    def make(ws) -> None:
                        ws["sum"] = 0

                    def add(ctx: Context, name=name) -> None:
                        for number in ctx.steps([1, 2, 3, 4, 5]):
                            ctx["sum"] += number
                            seen[name].append(number)
                            if name == "two" and number == at:
                                os.kill(os.getpid(), signal.SIGTERM)

                    Task(make, group=job.init_group)
                    Task(add, group=job.epoch_group)
            job.stop_when(max_epochs(1))
        with LocalSession() as session:
            result = JobRunner(job, tmp_path / "run").train(session)
            assert at or [session.workspace(name)["sum"] for name in seen] == [15, 15]
        return result, seen

    result, first = begin(3)
    assert result.status == "PREEMPTED" and positions(tmp_path / "run") == ["0", "0+5"]
    result, then = begin(0)
    assert result.status == "FINISHED"
    assert {name: first[name] + then[name] for name in first} == {
        "one": [1, 2, 3, 4, 5],
        "two": [1, 2, 3, 4, 5],
    }


def test_a_damaged_position_is_replaced_by_the_whole_epoch(tmp_path, whole):
    """Where the position inside of the epoch proves damaged the run goes on from the epoch before."""
    run = tmp_path / "run"
    assert alone(run, 16).result.status == "PREEMPTED"
    (place,) = (run / "checkpoints/data").glob("e00000001s*")
    next(place.glob("*.main.safetensors")).write_bytes(b"x")
    with warned() as texts:
        ended = alone(run, seed=99)
    assert any("1+3 is damaged" in text for text in texts)
    assert ended.digest == whole("adamw").digest


def test_a_position_is_only_read_by_who_knows_what_places_are(tmp_path):
    """Such a manifest names the feature, so that an older reader refuses it; others name none."""
    run = tmp_path / "run"
    alone(run, 3)
    stamps = {
        path.parent.name[:10]: json.loads(path.read_text())["format"]["features"]
        for path in (run / "checkpoints/data").glob("*/manifest.json")
    }
    assert stamps == {"e00000000-": [], "e00000000s": ["places"]}
