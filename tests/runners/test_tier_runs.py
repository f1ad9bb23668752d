"""Runs with a near place: saved near, replicated behind the training, resumed from whichever is newest."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from lifecycle_cases import run as run_case

import torchrelay
from torchrelay import (
    CheckpointManager,
    Job,
    JobRunner,
    LocalSession,
    MultiNodeCheckpointManager,
    Tier,
    max_epochs,
)
from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.log.tiered_storage import PATH
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.checkpoint.tiering.upload import TierUploader
from torchrelay.errors import StorageError, UsageError
from torchrelay.tools.cli.main import main


def job(epochs: int) -> Job:
    torchrelay.seed(0)
    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    made = Job("tiered", blobs={"model": model, "optimizer": optimizer})

    @made.epoch
    def train(ctx: torchrelay.Context) -> None:
        loss = model(torch.randn(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    made.stop_when(max_epochs(epochs))
    return made


def runner(epochs: int, run: Path, near: Path, **options: object) -> JobRunner:
    return JobRunner(job(epochs), run, tier=Tier(near), code=False, **options)  # type: ignore[arg-type]


def weights(run: Path, epoch: int) -> dict[str, torch.Tensor]:
    return dict(torchrelay.open_checkpoint(str(run), epoch=epoch).load_tensors("model.*"))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_run_goes_on_without_its_near_disk(tmp_path: Path, asynchronous: bool) -> None:
    """A run whose near directory is lost goes on from the far place, to the bits of an undisturbed run."""
    JobRunner(job(4), tmp_path / "whole", code=False).train()
    run, near = tmp_path / "run", tmp_path / "near"
    runner(2, run, near, asynchronous=asynchronous).train()
    shutil.rmtree(near)
    assert runner(4, run, near, asynchronous=asynchronous).train() == 4
    assert open_log(LocalStorage(run / "checkpoints")).epochs() == (0, 1, 2, 3, 4)
    undisturbed, ours = weights(tmp_path / "whole", 4), weights(run, 4)
    assert all(torch.equal(undisturbed[name], ours[name]) for name in undisturbed)
    generations = [int(path.name.split(".")[1]) for path in sorted(run.glob("events.*.jsonl"))]
    assert generations == sorted(set(generations)) and len(generations) == 2


def test_what_is_replicated_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Events and status of the run tell what is replicated; `ls` of the near directory tells it per epoch."""
    run, near = tmp_path / "run", tmp_path / "near"
    runner(2, run, near, keep_last=2).train()
    assert json.loads((run / "status.json").read_text())["replicated"] == "2"
    events = [
        json.loads(line) for path in run.glob("events.*.jsonl") for line in path.read_text().splitlines()
    ]
    assert [one["epoch"] for one in events if one["kind"] == "replicated"] == [0, 1, 2]
    assert main(["ls", str(near), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [(one["epoch"], one["states"][-1]) for one in shown["epochs"]] == [
        (1, "replicated"),
        (2, "replicated"),
    ]
    (near / PATH).unlink()
    main(["ls", str(near), "--json"])
    assert "replicated" not in capsys.readouterr().out


def test_a_finished_run_sends_its_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that ended before all of it was sent does so when it is started again, and trains nothing."""
    run, near = tmp_path / "run", tmp_path / "near"

    def away(*_: object) -> None:
        raise StorageError("away")

    with monkeypatch.context() as patched, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        patched.setattr(TierUploader, "_create", away)
        JobRunner(job(2), run, tier=Tier(near, lag=9, drain_secs=0.0), code=False).train()
    assert any("the next start with this directory" in str(one.message) for one in told)
    assert open_log(LocalStorage(run / "checkpoints")).epochs() == ()
    assert runner(2, run, near).train() == 2
    assert open_log(LocalStorage(run / "checkpoints")).epochs() == (0, 1, 2)
    assert runner(2, run, near).train() == 2


@pytest.mark.parametrize("single", [False, True])
def test_saves_by_hand_are_replicated(tmp_path: Path, single: bool) -> None:
    """A manager, of either kind, outside of a run sends what it saves before the group ends."""
    far, tier = tmp_path / "far", Tier(tmp_path / "near")
    many = MultiNodeCheckpointManager(far, tier=tier)
    manager = CheckpointManager(far, "trainer_0", tier=tier) if single else many
    with LocalSession(["trainer_0"]) as session:
        session.workspace().update(own=torch.full((3,), 4.0))
        session.run(manager.init(["trainer_0"]))
        session.run(manager.save(1))
    shutil.rmtree(tmp_path / "near")
    stored = torchrelay.open_checkpoint(str(tmp_path / "far"), epoch=1).load_tensors("own")
    assert torch.equal(stored["own"], torch.full((3,), 4.0))


def test_tier_is_a_key_of_the_configuration(tmp_path: Path) -> None:
    """`checkpoint.near` and `lag` are read; a run has a directory of its own there."""
    keys = [f"runner.train1.checkpoint.near={tmp_path}/nvme", "runner.train1.checkpoint.lag=1"]
    assert run_case(tmp_path, *keys, "runner.train1.epochs=1")["train1"] == 1
    (near,) = (tmp_path / "nvme").iterdir()
    assert near.name.startswith("train1-") and open_log(LocalStorage(near)).epochs() == (0, 1)
    assert json.loads((tmp_path / "run/status.json").read_text())["replicated"] == "1"


def test_a_near_directory_is_no_place_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Who looks at a near directory sees the far place behind it; nobody writes to it without that."""
    run, near = tmp_path / "run", tmp_path / "near"
    runner(1, run, near).train()
    shutil.rmtree(near)
    runner(2, run, near).train()
    assert len(list((near / "data").iterdir())) == 1
    assert main(["ckpt", "verify", str(near)]) == 0
    assert "3 of 3 epochs verified" in capsys.readouterr().out
    assert torchrelay.open_checkpoint(str(near), epoch=1).load_tensors("model.*")
    with pytest.raises(UsageError, match="is the local directory of"):
        JobRunner(job(3), MultiNodeCheckpointManager(near)).train(resume_from_epoch=2)


@pytest.mark.parametrize(
    "wrong",
    [{"near": "s3://bucket/x"}, {"near": ""}, {"lag": 0}, {"lag": True}, {"uploads": 0}, {"drain_secs": -1.0},
     {"patience_secs": float("inf")}],
)  # fmt: skip
def test_wrong_options_are_refused(wrong: dict[str, object]) -> None:
    """What a tier cannot be is refused where it is given."""
    with pytest.raises(UsageError):
        Tier(**{"near": "near", **wrong})  # type: ignore[arg-type]


def test_tier_is_an_object(tmp_path: Path) -> None:
    """A path where a Tier belongs is refused with the remedy."""
    with pytest.raises(UsageError, match=r"give torchrelay\.Tier"):
        JobRunner(job(1), tmp_path / "run", tier=str(tmp_path / "near"))  # type: ignore[arg-type]
