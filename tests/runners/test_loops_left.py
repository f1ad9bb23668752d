"""Loops of a program that end in unusual ways: what is saved, and what a later launch repeats."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from own_loops import EPOCHS, Training, nothing, run_face
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from torchrun import clean_environment

import torchrelay
from torchrelay import Checkpointer, EpochLoader, Job, JobRunner, Run, max_epochs
from torchrelay.errors import UsageError


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest that an undisturbed run leaves."""
    training = Training()
    run_face(training, tmp_path_factory.mktemp("whole"), nothing)
    return training.digest


def finish(where: Path) -> tuple[str, str]:
    """Launch again; return the status and the digest."""
    training = Training()
    return run_face(training, where, nothing).status, training.digest


@pytest.mark.parametrize("nested", [False, True])
def test_a_loop_within_the_steps_does_not_end_them(nested: bool, tmp_path: Path, whole: str) -> None:
    """A validation that has ended within the steps leaves the epoch unfinished; one behind them does not."""
    training = Training()
    with Run(tmp_path, training.blobs) as run:
        for epoch in run.epochs(EPOCHS):
            for batch in run.steps(training.loader):
                training.step(batch)
                if nested and epoch == 2 and run.ctx.step == 3:
                    list(run.steps([1, 2], count=False))
                    break
            if not nested:
                list(run.steps([1, 2], count=False))
            if epoch == 2:
                break
    ended = ("PREEMPTED", 1) if nested else ("STOPPED", 2)
    assert (run.result.status, int(run.result)) == ended
    assert finish(tmp_path) == ("FINISHED", whole)


@pytest.mark.parametrize("shorter", [False, True])
def test_loops_side_by_side(shorter: bool, tmp_path: Path) -> None:
    """Two loaders in zip() end with the first; a shorter second one leaves the first before its end."""
    values = torch.zeros(1)
    with Run(tmp_path, dict(values=values)) as run:
        for _ in run.epochs(2):
            second = run.steps([1, 2] if shorter else [1, 2, 3])
            for one, other in zip(run.steps([1, 2, 3]), second, strict=False):
                values += one + other
            break
    assert run.result.status == ("PREEMPTED" if shorter else "STOPPED")


@pytest.mark.parametrize("leaves", [False, True])
def test_a_loop_that_outlasts_the_one_beside_it(leaves: bool, tmp_path: Path) -> None:
    """zip_longest() resumes the longer loader, and leaving that one leaves the epoch within its steps."""
    values = torch.zeros(1)
    with Run(tmp_path, dict(values=values)) as run:
        for _ in run.epochs(2):
            for one, other in zip_longest(run.steps([1, 2], count=False), run.steps([1, 2, 3], count=False)):
                values += other
                if leaves and one is None:
                    break
            break
    assert values.item() == 6
    assert run.result.status == ("PREEMPTED" if leaves else "STOPPED")


@pytest.mark.parametrize("face", ["job", "run"])
def test_an_interruption_that_is_caught_still_ends_the_run(face: str, tmp_path: Path, whole: str) -> None:
    """A program that catches everything within its loop does not make a shortened epoch a whole one."""
    training = Training()

    def body(steps: Any, epoch: int) -> None:
        with suppress(BaseException):
            for at, batch in enumerate(steps(training.loader), 1):
                training.step(batch)
                if (epoch, at) == (2, 3):
                    os.kill(os.getpid(), signal.SIGTERM)

    if face == "run":
        with Run(tmp_path, training.blobs) as run:
            for epoch in run.epochs(EPOCHS):
                body(run.steps, epoch)
        result = run.result
    else:
        job = Job(blobs=training.blobs)
        job.epoch(lambda ctx: body(ctx.steps, ctx.epoch))
        job.stop_when(max_epochs(EPOCHS))
        result = JobRunner(job, tmp_path).train()
    assert (result.status, int(result)) == ("PREEMPTED", 1)
    assert torchrelay.open_checkpoint(tmp_path).epochs == (0, 1)
    assert finish(tmp_path) == ("FINISHED", whole)


@pytest.mark.parametrize("face", [Run, Checkpointer])
def test_a_blob_that_is_added_later_is_refused(face: Any, tmp_path: Path) -> None:
    """A new entry of the dictionary would not be saved, as one that is replaced is not."""
    blobs: dict[str, Any] = dict(value=torch.zeros(1))
    with pytest.raises(UsageError, match=r"blobs\['ema'\] was added after"), face(tmp_path, blobs) as opened:
        blobs["ema"] = torch.zeros(1)
        if face is Checkpointer:
            opened.save(1)
        else:
            list(opened.epochs(1))


def test_a_checkpointer_counts_steps_up_to_nine_digits(tmp_path: Path) -> None:
    """As the format does; what is beyond is refused by its own name and limit."""
    with Checkpointer(tmp_path, dict(value=torch.zeros(1))) as checkpointer:
        checkpointer.save(1, 10**9 - 1)
        assert str(checkpointer.resume()) == f"1+{10**9 - 1}"
        with pytest.raises(UsageError, match="invalid step: expected 0 to 999999999"):
            checkpointer.save(1, 10**9)


@pytest.mark.parametrize("fails", [False, True])
def test_a_failed_save_that_no_call_raises_is_warned_of(fails: bool, tmp_path: Path) -> None:
    """A program that ends, or raises, after an asynchronous save sees no exception if that save fails."""
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, torch, torchrelay\n"
        "from torchrelay.checkpoint.save import background\n"
        "ckpt = torchrelay.Checkpointer('ckpt', dict(value=torch.zeros(1)))\n"
        "ckpt.save(1)\n"
        "def full(*_): raise OSError(28, 'No space left on device')\n"
        "background.carry_out = full\n"
        "with ckpt if sys.argv[1] == 'True' else __import__('contextlib').nullcontext():\n"
        "    ckpt.save(2, asynchronous=True)\n"
        "    if sys.argv[1] == 'True': raise RuntimeError('planned')\n"
    )
    command = [sys.executable, program.name, str(fails)]
    done = subprocess.run(
        command, cwd=tmp_path, env=clean_environment({}), capture_output=True, text=True, check=False
    )
    assert done.returncode == fails, done.stderr
    assert done.stderr.count("epoch 2 was NOT saved: [Errno 28] No space left on device") == 1


@pytest.mark.parametrize(
    ("blobs", "fresh", "told"),
    [([], False, True), ([], True, False), (["loader"], False, False), (["parts"], False, False)],
    ids=["unregistered", "made in each epoch", "registered", "attribute of a blob"],
)
def test_a_loader_whose_state_is_not_saved_is_told(
    blobs: list[str], fresh: bool, told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A resumed run would begin its order again; one that each epoch makes anew needs no state."""

    class Parts:
        def __init__(self) -> None:
            self.loader = EpochLoader(list(range(4)), batch_size=2)

        def state_dict(self) -> dict[str, Any]:
            return dict(self.loader.state_dict())

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.loader.load_state_dict(state)

    parts = Parts()
    known = dict(loader=parts.loader, parts=parts, weights=torch.zeros(1))
    with Run(tmp_path, {name: known[name] for name in [*blobs, "weights"]}, best=None) as run:
        for _ in run.epochs(3):
            list(run.steps(Parts().loader if fresh else parts.loader))
    text = "the EpochLoader of the training loop is not a blob"
    assert sum(text in one.getMessage() for one in caplog.records) == told


@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("of", ["loader", "sampler", "inner"])
def test_a_generator_of_a_loader_is_told_like_its_loader(
    registered: bool, of: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As torch's notes on reproducibility have it: a resumed run would repeat the order of epoch 1."""
    generator = torch.Generator()
    sampler = RandomSampler(range(4), generator=generator)
    how: dict[str, dict[str, Any]] = {
        "loader": dict(shuffle=True, generator=generator),
        "sampler": dict(sampler=sampler),
        "inner": dict(batch_sampler=BatchSampler(sampler, 2, drop_last=False)),
    }
    loader = DataLoader(torch.arange(4), **how[of])  # type: ignore[arg-type]
    blobs = dict(weights=torch.zeros(1), **(dict(generator=generator) if registered else {}))
    with Run(tmp_path, blobs, best=None) as run:
        for _ in run.epochs(2):
            list(run.steps(loader))
    text = "the Generator of the training loop is not a blob"
    assert sum(text in one.getMessage() for one in caplog.records) == (not registered)


def test_a_block_without_the_loop_over_epochs_warns(tmp_path: Path) -> None:
    """`for epoch in range(n)` left as it was: nothing is saved, and the program would never know."""
    with pytest.warns(UserWarning, match=r"no loop over run\.epochs\(\): nothing was"), Run(tmp_path, {}):
        pass


def test_a_loss_with_its_graph_is_a_metric(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """Without torch's warning about tensors that require gradients, which would name a line of torchrelay."""
    torch.set_warn_always(True)
    try:
        with Checkpointer(tmp_path, {"state": {}}) as ckpt:
            ckpt.save(1, metrics={"loss": torch.ones(1, requires_grad=True)})
    finally:
        torch.set_warn_always(False)
    assert not recwarn.list


def test_an_epoch_that_is_saved_already_names_where_to_begin(tmp_path: Path) -> None:
    """As where a cell of a notebook is run again, whose loop begins at 1."""
    with Checkpointer(tmp_path, {"state": {}}) as ckpt:
        ckpt.save(2)
        with pytest.raises(UsageError, match=r"epoch 1 .* after epoch 2, .*: begin at start\.epoch \+ 1"):
            ckpt.save(1)
