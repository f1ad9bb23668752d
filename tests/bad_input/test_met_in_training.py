"""What a running job meets: saves that fail, names that come too late, objects that no longer fit."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_input import Trial, newest_try, noted, small_disk, tree
from torch import nn
from torchrun import clean_environment

from torchrelay import LocalSession, MultiNodeCheckpointManager, open_checkpoint
from torchrelay.errors import (
    BlobError,
    DirectoryInUseError,
    NotAllowedNowError,
    RelayError,
    SaveFailedError,
    UsageError,
)
from torchrelay.runners.training.journal import SaveWarning


def fails(trial: Trial, where: Any, kind: type[RelayError], *words: str, **options: Any) -> str:
    with pytest.raises(RelayError) as caught:
        trial.train(where, **options)
    text = str(caught.value)
    assert type(caught.value) is kind, f"{type(caught.value).__name__}: {text}"
    for word in words:
        assert word in text, f"no {word!r} in {text!r}"
    return text


def status(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "status.json").read_text()))


# Saves that fail


def filling(disk: Path, full: range) -> Callable[[Any], None]:
    """An epoch task that fills the disk at the first epoch of `full` and frees it after the last."""
    filler = disk / "filler"

    def epoch(ctx: Any) -> None:
        ctx["w"].add_(1)
        if ctx.epoch == full.start:
            with filler.open("wb", buffering=0) as file, suppress(OSError):
                while True:
                    file.write(bytes(1024))
        if ctx.epoch == full.stop:
            filler.unlink()

    return epoch


def test_a_disk_that_fills_up_and_is_freed(tmp_path: Path) -> None:
    """Epochs that found the disk full are not committed and warn with the reason; later ones are saved."""
    with small_disk(tmp_path / "disk", "size=3m") as disk:
        run = disk / "run"
        trial = Trial({"w": torch.zeros(50_000)}, epochs=4, epoch=filling(disk, range(2, 4)))
        with noted() as said:
            result = trial.train(run)
        assert (result, result.committed) == (4, 4)
        unsaved = [text for text in said if "NOT saved" in text]
        assert [text.split(" was")[0] for text in unsaved] == ["epoch 2", "epoch 3"]
        assert all("No space left" in text and "free some space" in text for text in unsaved)
        tries = {path.name[:9] for path in (run / "checkpoints" / "data").iterdir()}
        assert tries == {"e00000000", "e00000001", "e00000004"}, "failed tries gave their space back"
        for epoch in (1, 4):
            assert open_checkpoint(run, epoch=epoch).load_tensors("w")["w"][0] == epoch
        with pytest.raises(RelayError, match="no epoch 2"):
            open_checkpoint(run, epoch=2)


def test_too_many_saves_that_fail(tmp_path: Path) -> None:
    """After `max_failed_saves` in a row the run ends with code 5; the epochs before are whole."""
    with small_disk(tmp_path / "disk", "size=3m") as disk:
        run = disk / "run"
        trial = Trial({"w": torch.zeros(50_000)}, epochs=9, epoch=filling(disk, range(2, 9)))
        with noted():
            text = fails(trial, run, SaveFailedError, "2 saves failed", "No space left", max_failed_saves=2)
        assert SaveFailedError.exit_code == 5 and "max_failed_saves" in text
        assert trial.ran == ["setup", "epoch 1", "epoch 2", "epoch 3"]
        (disk / "filler").unlink()
        again = Trial({"w": torch.zeros(50_000)}, epochs=2)
        assert again.train(run) == 2
        assert again.ran == ["setup", "epoch 2"]


def test_a_value_that_cannot_be_stored_appears_later(tmp_path: Path) -> None:
    """The save fails with the path inside the blob; it warns, counts, and ends the run with code 5."""

    def epoch(ctx: Any) -> None:
        if ctx.epoch >= 2:
            ctx["config"] = {"optim": {"fn": [1, lambda: 2]}}

    trial = Trial({"config": {"optim": {"fn": [1]}}}, epochs=5, epoch=epoch)
    with noted() as said:
        fails(trial, tmp_path / "run", SaveFailedError, "config.optim.fn[1]", max_failed_saves=2)
    assert any("epoch 2 was NOT saved" in text and "config.optim.fn[1] is a" in text for text in said)
    found = status(tmp_path / "run")
    assert (found["state"], found["exit_code"]) == ("FAILED", 5)
    assert "config.optim.fn[1]" in found["error"]
    assert not list((tmp_path / "run" / "checkpoints" / "data").glob("e00000002*"))


class Moody:
    """State that cannot be had from the second time on."""

    def __init__(self) -> None:
        self.asked = 0

    def state_dict(self) -> dict[str, int]:
        self.asked += 1
        if self.asked > 2:
            raise RuntimeError("not in the mood")
        return {"asked": 0}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


def test_a_state_dict_that_raises(tmp_path: Path) -> None:
    """The blob, its type and what it raised are named; the epochs before are kept."""
    with noted() as said, pytest.raises(SaveFailedError, match="not in the mood"):
        Trial({"moody": Moody()}).train(tmp_path / "run")
    assert all("blob 'moody' (Moody) raised RuntimeError: not in the mood" in text for text in said)
    assert newest_try(tmp_path / "run", 0).exists()


# Names


def test_registering_too_late(tmp_path: Path) -> None:
    """A blob registered by an epoch task is refused with the remedy; the run is noted as failed."""
    trial = Trial(epoch=lambda ctx: trial.job.blobs(late=torch.zeros(1)))
    fails(trial, tmp_path / "run", NotAllowedNowError, "'late'", "setup")
    assert status(tmp_path / "run")["exit_code"] == 2


def test_a_name_created_after_init(tmp_path: Path) -> None:
    """It is reported once, with its node and the remedy, and not saved."""

    def epoch(ctx: Any) -> None:
        ctx.workspace.parent["later"] = ctx.epoch

    with noted() as said:
        Trial(epochs=3, epoch=epoch).train(tmp_path / "run")
    (text,) = said
    assert "'later' appeared on trainer_0" in text and "register it as a blob" in text
    assert "later" not in open_checkpoint(tmp_path / "run", epoch=3).blobs


class Deep:
    """An object that saves an optimizer that lies two levels below it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.parts = [[optimizer]]

    def state_dict(self) -> dict[str, Any]:
        return {"own": self.parts[0][0].state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.parts[0][0].load_state_dict(state["own"])


def test_an_optimizer_of_an_earlier_run_of_the_process_is_not_told(tmp_path: Path) -> None:
    """As where a script pretrains a model, and then trains it with another optimizer."""
    model = nn.Linear(2, 1)
    kept = []
    with noted() as said:
        for stage in ("pretrain", "finetune"):
            optimizer = torch.optim.Adam(model.parameters())
            kept.append(optimizer)

            def epoch(_: Any, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.zero_grad()
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()

            blobs = {"model": model, "optimizer": optimizer}
            Trial(blobs, epochs=2, epoch=epoch).train(tmp_path / stage)
    assert not [text for text in said if "is not a blob" in text]


@pytest.mark.parametrize(
    "kind", ["unregistered", "behind a scheduler", "dicts", "registered", "inside", "stateless"]
)
def test_an_optimizer_whose_state_nobody_saves_is_told_once(tmp_path: Path, kind: str) -> None:
    """A resumed run would begin without its state, in silence; one that is saved somehow is not told."""
    model = nn.Linear(2, 1)
    made = torch.optim.SGD if kind == "stateless" else torch.optim.Adam
    optimizer = made(model.parameters(), lr=0.1)
    more = {
        "behind a scheduler": lambda: {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)},
        "dicts": lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        "registered": lambda: {"optimizer": optimizer},
        "inside": lambda: {"deep": Deep(optimizer)},
    }

    def epoch(_: Any) -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    with noted() as said:
        Trial({"model": model, **more.get(kind, dict)()}, epochs=3, epoch=epoch).train(tmp_path / "run")
    said = [text for text in said if "is not a blob" in text]
    assert len(said) == (kind in ("unregistered", "behind a scheduler", "dicts"))
    assert all("Adam, which trains model." in text and "optimizer=optimizer" in text for text in said)
    log = (tmp_path / "run/logs/attempt_0/rank_0.log").read_text()
    assert [
        line.endswith("optimizer=optimizer)") for line in log.splitlines() if " W r0/1 Adam, " in line
    ] == (
        [True] * len(said)  # without the place in our source
    )


class Adapted(nn.Module):
    """A layer whose `state_dict` leaves out what `hidden` says, or shows it by another name."""

    def __init__(self, *, renames: bool) -> None:
        super().__init__()
        self.base, self.extra = nn.Linear(2, 1), nn.Linear(2, 1)
        self.renames = renames
        self.register_state_dict_post_hook(Adapted.hide)
        self.register_load_state_dict_pre_hook(Adapted.show)

    def hide(self, state: dict[str, Any], prefix: str, _: Any) -> None:
        for name in [name for name in state if name.startswith(f"{prefix}extra.")]:
            content = state.pop(name)
            if self.renames:
                state[name.replace("extra.", "added.")] = content.detach()

    def show(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name in [name for name in state if name.startswith(f"{prefix}added.")]:
            state[name.replace("added.", "extra.")] = state.pop(name)
        for name, one in self.extra.named_parameters() if not self.renames else ():
            state[f"{prefix}extra.{name}"] = one


@pytest.mark.parametrize("renames", [False, True])
def test_a_trained_parameter_that_a_module_leaves_out_is_told_once(tmp_path: Path, renames: bool) -> None:
    """A resumed run would train on from what the program builds; one under another name is saved."""
    model = Adapted(renames=renames)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def epoch(_: Any) -> None:
        optimizer.zero_grad()
        (model.base(torch.ones(1, 2)) + model.extra(torch.ones(1, 2))).sum().backward()
        optimizer.step()

    with noted() as said:
        Trial({"model": model, "optimizer": optimizer}, epochs=3, epoch=epoch).train(tmp_path / "run")
    said = [text for text in said if "absent from the state_dict()" in text]
    assert [text.startswith("model.extra.weight, model.extra.bias: trained") for text in said] == [True] * (
        not renames
    )


@pytest.mark.parametrize("initial", [True, False])
@pytest.mark.parametrize("group", ["init", "setup"])
def test_an_object_that_only_a_task_made(tmp_path: Path, group: str, initial: bool) -> None:
    """No later start could make it again: refused before anything is saved, with the remedy."""
    trial = Trial(**{group: lambda ws: ws.update(model=nn.Linear(1, 1))})
    fails(trial, tmp_path / "run", BlobError, "'model' (Linear)", "job.blobs(", save_initial=initial)
    assert trial.ran == ["setup"]
    assert list((tmp_path / "run" / "checkpoints" / "data").iterdir()) == []


@pytest.mark.parametrize("names", [("model", "model.weight"), ("model.a", "model")])
def test_names_of_init_that_mix_with_a_blob(tmp_path: Path, names: tuple[str, str]) -> None:
    """A name of init that is a dotted prefix of a blob, or the other way round, is refused with both."""
    trial = Trial({names[0]: torch.zeros(1)}, init=lambda ws: ws.update({names[1]: 3}))
    fails(trial, tmp_path / "run", UsageError, repr(names[0]), repr(names[1]), "rename")


def test_the_reserved_name_made_by_init(tmp_path: Path) -> None:
    """`rng` belongs to the random states."""
    trial = Trial(init=lambda ws: ws.update(rng=3))
    fails(trial, tmp_path / "run", UsageError, "'rng' is reserved")


def test_a_registered_module_that_is_replaced(tmp_path: Path) -> None:
    """A module that others hold cannot be rebound in the workspace."""
    trial = Trial({"m": nn.Linear(1, 1)}, epoch=lambda ctx: ctx.workspace.update(m=nn.Linear(1, 1)))
    fails(trial, tmp_path / "run", UsageError, "'m' on trainer_0", "Linear", "load_state_dict")


def test_a_member_of_the_set_that_is_deleted(tmp_path: Path) -> None:
    """A name of the checkpoint set that is gone fails the save, by name."""

    def epoch(ctx: Any) -> None:
        del ctx.workspace.parent["step"]

    trial = Trial(init=lambda ws: ws.update(step=0), epochs=1, epoch=epoch)
    gone = pytest.warns(SaveWarning, match="'step' of the checkpoint set is gone")
    with gone, pytest.raises(SaveFailedError, match="the last one, epoch 1"):
        trial.train(tmp_path / "run")


# Another program on the same run


def resumed(tmp_path: Path, before: dict[str, Any], after: dict[str, Any]) -> str:
    Trial(before).train(tmp_path / "run")
    held = {name: thing.detach().clone() for name, thing in after.items() if isinstance(thing, torch.Tensor)}
    trial = Trial(after, epochs=3)
    told = ("does not fit", "nothing was changed")
    text = fails(trial, tmp_path / "run", BlobError, *told, resume_strict=True)
    assert trial.ran == ["setup"]
    assert all(torch.equal(after[name], tensor) for name, tensor in held.items())
    whole = Trial({name: before[name] for name in before}, epochs=3)
    assert whole.train(tmp_path / "run") == 3, "the program that fits goes on as if nothing had been"
    assert whole.ran == ["setup", "epoch 3"]
    return text


def test_a_registered_name_that_the_checkpoint_lacks(tmp_path: Path) -> None:
    """Where `resume_strict` asks for it the start is refused, and the missing leaf is named."""
    before, after = {"w": torch.zeros(3)}, {"w": torch.ones(3), "v": torch.ones(2)}
    assert "not in the checkpoint: v" in resumed(tmp_path, before, after)


def test_a_module_that_the_program_lacks(tmp_path: Path) -> None:
    """Under `resume_strict` a stored module that nobody registers any more is named with the remedy."""
    before = {"w": torch.zeros(3), "m": nn.Linear(2, 2)}
    text = resumed(tmp_path, before, {"w": torch.ones(3)})
    assert "m is a module" in text and "job.blobs(m=" in text


def test_shapes_that_changed(tmp_path: Path) -> None:
    """All leaves that differ are listed at once with both shapes; nothing was changed."""
    before = {"w": torch.zeros(3), "m": nn.Linear(2, 2)}
    text = resumed(tmp_path, before, {"w": torch.ones(4), "m": nn.Linear(3, 2)})
    assert "w is float32[4] here, float32[3] in the checkpoint" in text
    assert "m.weight is float32[2, 3] here, float32[2, 2]" in text
    assert "m.bias" not in text


def optimizing(groups: int) -> dict[str, Any]:
    model = nn.Linear(2, 2)
    split = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.3}]
    optimizer = torch.optim.SGD(split if groups == 2 else model.parameters(), lr=0.1, momentum=0.9)
    return {"model": model, "optimizer": optimizer}


def test_parameter_groups_that_changed(tmp_path: Path) -> None:
    """Another division into parameter groups is told with both divisions."""
    text = resumed(tmp_path, optimizing(1), optimizing(2))
    assert "optimizer has groups of [1, 1] parameters here, of [2] in the checkpoint" in text


def test_parameter_groups_that_change_while_training(tmp_path: Path) -> None:
    """A group of parameters that no blob holds fails the save that follows, by name."""
    blobs = optimizing(1)

    def epoch(ctx: Any) -> None:
        if ctx.epoch == 1:
            blobs["optimizer"].add_param_group({"params": [nn.Parameter(torch.zeros(1))]})

    with pytest.warns(UserWarning, match="parameters"), pytest.raises(SaveFailedError):
        Trial(blobs, epochs=1, epoch=epoch).train(tmp_path / "run")


def test_a_start_that_fails_abandons_nothing(tmp_path: Path) -> None:
    """A rewind or fresh start whose setup raises, or whose objects do not fit, abandons no epoch."""
    run = tmp_path / "run"
    Trial(epochs=4).train(run)
    fails(Trial({"w": torch.zeros(9)}), run, BlobError, "does not fit", epoch=2)
    for options in ({"resume": "never"}, {"epoch": 1}):
        with pytest.raises(RelayError), noted():
            Trial(setup=lambda: 1 / 0).train(run, **options)
    after = Trial(epochs=5)
    assert after.train(run) == 5
    assert after.ran == ["setup", "epoch 5"]


def test_a_factory_that_raises(tmp_path: Path) -> None:
    """What a factory of the user's raises is the user's exception; the run is noted as failed."""

    def make(ctx: Any) -> Any:
        raise KeyError("no such layer")

    with pytest.raises(KeyError, match="no such layer"):
        Trial({"m": make}).train(tmp_path / "run")
    assert status(tmp_path / "run")["state"] == "FAILED"


# A second job


HOLDER = """
import sys, time
from torchrelay import Job, JobRunner, LocalSession, MultiNodeCheckpointManager, max_epochs
import torch
job = Job("trial", blobs=dict(w=torch.zeros(3)))
@job.epoch
def train():
    print("training", flush=True)
    sys.stdin.readline()
job.stop_when(max_epochs(1))
JobRunner(job, MultiNodeCheckpointManager(sys.argv[1])).train(LocalSession())
print("saved", flush=True)
"""


def test_a_second_job_on_one_directory(tmp_path: Path) -> None:
    """The second one watches and ends with code 4, naming host and pid; the first goes on."""
    prefix = tmp_path / "prefix"
    command = [sys.executable, "-c", HOLDER, str(prefix)]
    first = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=clean_environment()
    )
    with first:
        assert first.stdout is not None and first.stdin is not None
        assert first.stdout.readline() == "training\n"
        before = {name for name in tree(prefix) if "writer" not in name and ".tmp" not in name}
        trial = Trial()
        text = fails(
            trial, MultiNodeCheckpointManager(prefix, takeover_secs=4.0), DirectoryInUseError, str(prefix),
            f"pid {first.pid}", " on ", "stop that job",
        )  # fmt: skip
        assert DirectoryInUseError.exit_code == 4, text
        assert trial.ran == []
        assert {name for name in tree(prefix) if "writer" not in name and ".tmp" not in name} == before
        out, _ = first.communicate("\n", timeout=100)
    assert (out, first.returncode) == ("saved\n", 0)


def test_a_second_manager_in_the_process(tmp_path: Path) -> None:
    """Two managers of one process never write one directory at the same time."""
    refusals: list[str] = []

    def inner(ctx: Any) -> None:
        other = MultiNodeCheckpointManager(tmp_path / "prefix", takeover_secs=0.1)
        with pytest.raises(DirectoryInUseError) as caught, LocalSession() as session:
            other.engine.ledger.job_name = "trial"
            other.engine.ledger.open(session.peers)
        refusals.append(str(caught.value))

    assert Trial(epochs=1, epoch=inner).train(MultiNodeCheckpointManager(tmp_path / "prefix")) == 1
    assert len(refusals) == 1 and "another manager in this process" in refusals[0]
