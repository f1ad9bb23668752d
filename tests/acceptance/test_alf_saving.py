"""ALF's statements on when is saved, and on what is compared: 12, 18, 20."""

from __future__ import annotations

import faulthandler
import json
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import ending_job
import pytest
import torch
from lifecycle_cases import CONFIG, run, written
from paired_sessions import paired_sessions
from safetensors import safe_open
from torch import nn

from torchrelay import Job, JobRunner, LocalSession, load_blobs, max_epochs, open_checkpoint
from torchrelay.checkpoint.load.open import place_of, read_log
from torchrelay.errors import TaskFailedError, UsageError
from torchrelay.lifecycle import StepFailedError
from torchrelay.runners.session.run_state import RunState
from torchrelay.runners.session.steps import Siblings, StepLoop
from torchrelay.runners.session.stop_requests import Requests


def positions(run_dir: Path) -> list[str]:
    """The positions that a start could go on from now."""
    return [str(entry.position) for entry in read_log(place_of(run_dir)).line()]


def started(run_dir: Path, at: Any = lambda tick, ctx: None, **how: Any) -> ending_job.Start:
    with LocalSession() as session:
        return ending_job.start(session, run_dir, at, epochs=2, **how)


def asking(ticks: tuple[int, ...], found: list[list[str]], run_dir: Path) -> Any:
    """SIGUSR2 at these ticks; what there is to go on from two steps later."""

    def at(tick: int, ctx: Any) -> None:
        if tick in ticks:
            os.kill(os.getpid(), signal.SIGUSR2)
        if tick - 2 in ticks:
            found.append(positions(run_dir))

    return at


def test_alf_12_a_signal_saves_the_next_step_and_training_goes_on(tmp_path: Path, capfd) -> None:
    """A checkpoint inside of the epoch is there soon after SIGUSR2; nothing of the result changes by it."""
    handler = signal.getsignal(signal.SIGUSR2)
    whole = started(tmp_path / "whole")
    found: list[list[str]] = []
    asked = started(tmp_path / "asked", asking((2, 9), found, tmp_path / "asked"))
    assert (asked.digest, asked.values) == (whole.digest, whole.values) and asked.result.status == "FINISHED"
    # Epoch 1 has 6 steps over the loader, then 5 over a range: steps of a second task can be saved, too.
    assert [one[-1] for one in found] == ["0+2", "0+9"]
    assert positions(tmp_path / "asked") == ["0", "1", "2"]  # the place is given up when its epoch is saved
    assert "SIGUSR2: saved as 0+2" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGUSR2) is handler


def test_alf_12_a_run_that_dies_later_goes_on_from_there(tmp_path: Path) -> None:
    """What was saved on demand is the place where the next start goes on, to the same bits."""
    whole = started(tmp_path / "whole")

    def dies(tick: int, ctx: Any) -> None:
        if tick == 3:
            os.kill(os.getpid(), signal.SIGUSR2)
        if tick == 5:
            raise OSError("out of luck")

    with pytest.raises(TaskFailedError):
        started(tmp_path / "died", dies)
    assert positions(tmp_path / "died")[-1] == "0+3"
    again = started(tmp_path / "died", seed=99)
    assert (again.digest, again.values[-1]) == (whole.digest, whole.values[-1])
    assert again.ticks == whole.ticks - 3


def test_alf_12_where_a_step_cannot_be_saved_the_epoch_is(tmp_path: Path, capfd) -> None:
    """The reason is said once, and the end of the epoch serves the request."""
    job = Job("foreign", blobs={"model": nn.Linear(1, 1)})

    @job.epoch
    def train(ctx: Any) -> None:
        for number in ctx.steps(iter(range(4))):
            if number == 1:
                os.kill(os.getpid(), signal.SIGHUP)

    job.stop_when(max_epochs(1))
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, which is left alone
    try:
        with LocalSession() as session:
            JobRunner(job, tmp_path / "run", save_signal="SIGHUP").train(session)
    finally:
        signal.signal(signal.SIGHUP, before)
    said = capfd.readouterr().err
    assert said.count("SIGHUP: saved when epoch 1 ends (a range_iterator cannot be resumed") == 1
    assert positions(tmp_path / "run") == ["0", "1"]


def test_alf_12_all_processes_save_at_one_step() -> None:
    """One of two processes is asked: both save, behind the same step, once."""
    saved: list[tuple[int, int]] = []

    def process(session: Any) -> None:
        rank = session.peers.rank
        state = RunState()
        state.requests = Requests()
        state.save_now = lambda: (state.requests.take_save(), saved.append((rank, state.step)))
        state.tracked = object()
        cursor = state.cursor_of("node")
        cursor._task = type("Everybody", (), {"node": None, "on": "all", "full_name": "task"})()
        for number in StepLoop(state, "node", range(8), True, session, Siblings(), True, cursor):
            if (rank, number) == (1, 2):
                state.requests.save("SIGUSR2")

    threads = [threading.Thread(target=process, args=(one,)) for one in paired_sessions(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert sorted(saved) == [(0, 4), (1, 4)] or sorted(saved) == [(0, 3), (1, 3)]


@pytest.mark.parametrize("ignored", [False, True])
def test_alf_12_the_signal_can_be_chosen_and_stays_the_programs(
    tmp_path: Path, request: pytest.FixtureRequest, ignored: bool
) -> None:
    """Signals that mean something else are refused; a program's own handler is left alone, in C as well.

    So too where the signal was ignored before, as an earlier training of the process has it.
    """
    found = signal.signal(signal.SIGUSR2, signal.SIG_IGN if ignored else signal.SIG_DFL)
    request.addfinalizer(lambda: signal.signal(signal.SIGUSR2, found))
    for name in ("SIGTERM", "SIGUSR1", "SIGKILL", "USR2", 12):
        with pytest.raises(UsageError, match="save_signal"):
            JobRunner(Job("x"), tmp_path / "run", save_signal=name)
    heard: list[int] = []
    for own in (True, False):
        job = Job("own", blobs={"x": torch.zeros(1)})
        job.epoch(lambda: os.kill(os.getpid(), signal.SIGUSR2))
        job.stop_when(max_epochs(1))
        with LocalSession() as session, (tmp_path / "stacks").open("w") as stacks:
            before = signal.getsignal(signal.SIGUSR2)
            if own:
                signal.signal(signal.SIGUSR2, lambda number, _: heard.append(number))
            else:
                faulthandler.register(signal.SIGUSR2, stacks)
            try:
                JobRunner(job, tmp_path / f"run{own}").train(session)
            finally:
                faulthandler.unregister(signal.SIGUSR2)
                signal.signal(signal.SIGUSR2, before)
    assert heard == [signal.SIGUSR2] and "Thread" in (tmp_path / "stacks").read_text()


def test_alf_18_an_error_leaves_what_was_held(tmp_path: Path) -> None:
    """`on_crash`: what the failed step left is in a file that can be read; the run goes on as without it."""
    whole = started(tmp_path / "whole")
    for policy in ("none", "save"):
        where = tmp_path / policy

        def dies(tick: int, ctx: Any) -> None:
            if tick == 4:
                next(ctx["model"].parameters()).data.fill_(7.0)
                raise FloatingPointError("as planned")

        for _ in range(2):  # the file of an earlier start goes
            with pytest.raises(TaskFailedError, match="as planned"):
                started(where, dies, on_crash=policy)
        files = sorted(path.name for path in where.glob("crash/*"))
        assert files == ([] if policy == "none" else ["trainer_0.attempt_1.safetensors"])
        assert positions(where) == ["0"]
        again = started(where)
        assert (again.digest, again.values) == (whole.digest, whole.values)
    left = tmp_path / "save/crash" / files[0]
    held = load_blobs(left)
    first = next(name for name in held if name.startswith("model.") and held[name].ndim)
    assert bool((held[first] == 7.0).all())
    assert held["torchrelay_crash"]["step"] == 4 and "as planned" in held["torchrelay_crash"]["error"]
    assert any(name.startswith("optimizer.state.") for name in held)
    with safe_open(left, framework="pt") as plain:
        assert first in set(plain.keys())
    with pytest.raises(UsageError, match="'save' or 'none'"):
        JobRunner(Job("x"), tmp_path / "run", on_crash="ask")


def test_alf_12_and_18_by_the_keys_of_a_configuration(tmp_path: Path) -> None:
    """`on_crash: save` and `save_signal` in YAML; a failing model leaves its file."""
    text = CONFIG.replace("  epochs: 2\n", "  epochs: 2\n  on_crash: save\n  save_signal: none\n")
    written(tmp_path, text)
    model = tmp_path / "model.py"
    model.write_text(model.read_text().replace(".square().mean()", ".square().mean() + [][0]"))
    with pytest.raises(StepFailedError, match="list index"):
        run(tmp_path)
    (left,) = (tmp_path / "run/crash").iterdir()
    assert "a.model.line.weight" in load_blobs(left)
    model.write_text(model.read_text().replace(" + [][0]", ""))
    assert run(tmp_path)["train1"] == 2
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(StepFailedError, match="invalid save_signal='SIGTERM'"):
        run(tmp_path, "runner.train1.save_signal=SIGTERM")


def disagreeing(run_dir: Path, **options: Any) -> list[str]:
    """Two nodes; in epoch 2 the second one gets another number into a parameter, where no sample looks."""

    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.zeros(400_000))
            self.other = nn.Parameter(torch.zeros(3))

    job = Job("replicas", blobs={"model": lambda ctx: Large()})

    @job.epoch
    def train(ctx: Any) -> None:
        with torch.no_grad():
            ctx["model"].other.add_(1)
            if (ctx.epoch, ctx.rank) == (2, 1):
                ctx["model"].table[150_000] = 1.0

    job.stop_when(max_epochs(7))
    with LocalSession(["trainer_0", "trainer_1"]) as session, pytest.warns(UserWarning) as warned:
        JobRunner(job, run_dir, max_failed_saves=9, **options).train(session)
    return [str(one.message) for one in warned if "NOT saved" in str(one.message)]


def test_alf_20_parameters_are_compared_every_k_epochs(tmp_path: Path) -> None:
    """`compare_every=3`: the epochs 3 and 6 find what samples did not, and name tensor and rank."""
    told = disagreeing(tmp_path / "run", compare_every=3)
    assert [text.split()[1] for text in told] == ["3", "6"]
    assert all("model.table" in text and "trainer_1" in text and "model.other" not in text for text in told)
    assert open_checkpoint(tmp_path / "run").epoch == 7
    with pytest.raises(UsageError, match="invalid compare_every=0"):
        JobRunner(Job("x"), tmp_path / "other", compare_every=0)


def test_alf_20_is_a_key_of_the_configuration(tmp_path: Path) -> None:
    """`checkpoint.compare_every` is read, and no part of what the run is."""
    result = run(tmp_path, "runner.train1.checkpoint.compare_every=2", "runner.train1.epochs=1")
    assert result["train1"] == 1
    assert run(tmp_path, "runner.train1.checkpoint.compare_every=3")["train1"] == 2
    captured = [json.loads((tmp_path / f"run/captured.{n}.json").read_text()) for n in (0, 1)]
    assert captured[0]["config_id"] == captured[1]["config_id"]
