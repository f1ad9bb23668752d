"""A transformers Trainer is saved, killed and resumed to the bits of an undisturbed one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrun import Finished, clean_environment, torchrun

from torchrelay.errors import NotAllowedNowError
from torchrelay.tools.cli.main import main

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments, set_seed

from torchrelay.integrations.transformers import RelayCallback

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("default")]

PROGRAM = Path(__file__).parents[1] / "programs" / "transformers_trainer.py"


def training(folder: Path, *options: str, ranks: int = 2) -> Finished:
    """Run the program to its end."""
    folder.mkdir(exist_ok=True)
    return torchrun(PROGRAM, str(folder / "ckpt"), *options, ranks=ranks, cwd=folder, warm=True)


def lines(done: Finished, word: str) -> list[str]:
    """What the ranks printed behind a word, sorted."""
    assert done.rc == 0, done
    return sorted(re.findall(rf"{word} (.+)$", done.out + done.err, re.MULTILINE))


def batches(done: Finished, rank: int = 0) -> list[str]:
    """The samples of each batch that a rank was trained on."""
    return re.findall(r"batch (.+)", done.of_rank(rank))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """An undisturbed training of two ranks."""
    return training(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("options", [[], ["--every", "5"], ["--every", "5", "--sharded"]])
def test_a_killed_trainer_is_resumed_exactly(options: list[str], tmp_path: Path, whole: Finished) -> None:
    """Killed by SIGKILL, it resumes at an epoch or within one: same bits, batches and logs as undisturbed."""
    if "--sharded" in options:
        whole = training(tmp_path / "whole", *options)
    killed = training(tmp_path, "--kill", "7", *options)
    assert killed.rc != 0 and "digest" not in killed.out
    resumed = training(tmp_path, *options)
    assert lines(resumed, "digest") == lines(whole, "digest")
    assert lines(resumed, "state") == lines(whole, "state")
    for rank in (0, 1):
        seen, all_of_them = (batches(one, rank) for one in (resumed, whole))
        assert seen and seen == all_of_them[-len(seen) :]


def test_a_trainer_resumes_on_another_number_of_ranks(tmp_path: Path, whole: Finished) -> None:
    """One rank with twice the batch goes on within the epoch, on the samples that two ranks have together."""
    assert training(tmp_path, "--kill", "8", "--every", "3").rc != 0
    resumed = training(tmp_path, "--batch", "4", ranks=1)
    assert lines(resumed, "state")[0].split()[0] == "12"
    found, expected = batches(resumed), zip(batches(whole, 0), batches(whole, 1), strict=True)
    together = [f"{one} {other}" for one, other in expected]
    full = [place for place in range(-len(found), 0) if len(found[place].split()) == 4]
    assert len(full) == 2 + 6  # the last batch of an epoch is filled up on two ranks
    assert [found[place] for place in full] == [together[place] for place in full]


class Net(torch.nn.Module):
    """A model of the Trainer in this process."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layer(x)[:, 0] - labels).square().mean()}


def trainer_with(
    relay: RelayCallback, folder: Path, *callbacks: Any, epochs: int = 2, kind: Any = Trainer, **options: Any
) -> Trainer:
    """A Trainer of eight samples."""
    arguments = TrainingArguments(
        output_dir=str(folder), use_cpu=True, per_device_train_batch_size=4, num_train_epochs=epochs,
        eval_strategy="epoch", metric_for_best_model="eval_loss", greater_is_better=False,
        save_strategy="no", report_to=[], disable_tqdm=True, **options,
    )  # fmt: skip
    data = [{"x": torch.full((4,), float(one)), "labels": float(one)} for one in range(8)]
    return kind(Net(), arguments, train_dataset=data, eval_dataset=data, callbacks=[*callbacks, relay])


def test_the_folder_is_read_without_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The verbs read it, and a process that never imports transformers loads the model by its own names."""
    where = str(tmp_path / "ckpt")
    relay = RelayCallback(where)
    relay.train(trainer_with(relay, tmp_path))
    capsys.readouterr()
    for verb in (["ls", where], ["verify", where], ["ckpt", "diff", where, where]):
        assert main(verb) == 0
    assert "2 of 2 epochs verified" in capsys.readouterr().out
    code = (
        "import sys, torch, torchrelay; model = torch.nn.ModuleDict({'layer': torch.nn.Linear(4, 1)}); "
        "ckpt = torchrelay.open_checkpoint(sys.argv[1]); ckpt.load({'model': model}); "
        "assert ckpt.metrics['eval_loss'] and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, where], env=clean_environment(), timeout=100, check=True)


def test_callbacks_get_their_state_back(tmp_path: Path) -> None:
    """The patience that early stopping has lost is that of the checkpoint, without an option."""
    stopping = EarlyStoppingCallback(9)
    relay = RelayCallback(tmp_path / "ckpt")
    trainer = trainer_with(relay, tmp_path, stopping, epochs=1)
    stopping.early_stopping_patience_counter = 4
    stopping.check_metric_value = lambda *_: None
    relay.train(trainer)
    again, relay = EarlyStoppingCallback(9), RelayCallback(tmp_path / "ckpt")
    relay.train(trainer_with(relay, tmp_path, again, epochs=1))
    assert again.early_stopping_patience_counter == 4


def test_a_damaged_position_is_replaced_by_the_one_before(tmp_path: Path) -> None:
    """Bytes of the newest epoch are damaged: the Trainer begins at the epoch before, and trains it again."""
    relay = RelayCallback(tmp_path / "ckpt")
    relay.train(trainer_with(relay, tmp_path))
    shard = next(tmp_path.glob("ckpt/data/e00000002*/*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-20] ^= 1
    shard.write_bytes(content)
    relay = RelayCallback(tmp_path / "ckpt")
    trainer = trainer_with(relay, tmp_path)
    with pytest.warns(UserWarning, match="damaged"):
        relay.train(trainer)
    assert trainer.state.global_step == 4
    assert [one["epoch"] for one in trainer.state.log_history if "eval_loss" in one] == [1.0, 2.0]


def test_a_rewind_trains_the_later_epochs_again(tmp_path: Path) -> None:
    """`relay.train(trainer, epoch=1)` begins there."""
    relay = RelayCallback(tmp_path / "ckpt")
    relay.train(trainer_with(relay, tmp_path))
    relay = RelayCallback(tmp_path / "ckpt")
    trainer = trainer_with(relay, tmp_path, epochs=3)
    relay.train(trainer, epoch=1)
    assert trainer.state.global_step == 6


class Fail(TrainerCallback):
    """Ends the training at a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise ValueError("planned")


class Stream(torch.utils.data.IterableDataset[Any]):
    """Samples without a length, other ones in each epoch."""

    epoch = 0

    def __iter__(self) -> Any:
        return iter([{"x": torch.randn(4) + one + self.epoch, "labels": float(one)} for one in range(12)])

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def weighted() -> Any:
    """Samples in an order that random numbers of the process decide."""
    data = [{"x": torch.full((4,), float(one)), "labels": float(one)} for one in range(12)]
    return torch.utils.data.DataLoader(
        data, 2, sampler=torch.utils.data.WeightedRandomSampler(torch.arange(12.0), 12)
    )


@pytest.mark.parametrize("loader", [weighted, lambda: torch.utils.data.DataLoader(Stream(), 2)])
def test_orders_that_no_seed_decides_resume(
    loader: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sampler of random weights and a stream without a length go on at the same samples, by one start."""

    class Own(Trainer):
        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(loader())

    def train_until(folder: Path, step: int) -> list[torch.Tensor]:
        set_seed(3)
        relay = RelayCallback(folder / "ckpt", every=2)
        trainer = trainer_with(relay, folder, Fail(step), kind=Own, max_steps=15)
        relay.train(trainer)
        return [*trainer.model.state_dict().values(), torch.rand(1)]

    whole = train_until(tmp_path / "whole", -1)
    for step in (4, 9):
        with pytest.raises(ValueError, match="planned"):
            train_until(tmp_path / "failed", step)
    starts: list[Any] = []
    begin = Trainer.train
    monkeypatch.setattr(Trainer, "train", lambda self, **given: starts.append(given) or begin(self, **given))
    assert all(map(torch.equal, whole, train_until(tmp_path / "failed", -1)))
    assert len(starts) == 1


def test_a_checkpoint_of_the_trainer_is_only_for_the_first_start(tmp_path: Path) -> None:
    """`resume_from_checkpoint=` is used until the folder has a position of its own."""
    first = RelayCallback(tmp_path / "first")
    trainer = trainer_with(first, tmp_path, epochs=1)
    first.train(trainer)
    trainer.save_state()
    trainer.save_model()
    trainer._save_optimizer_and_scheduler(str(tmp_path))
    counts = []
    for epochs in (2, 3):
        relay = RelayCallback(tmp_path / "second")
        trainer = trainer_with(relay, tmp_path, epochs=epochs)
        relay.train(trainer, resume_from_checkpoint=str(tmp_path))
        counts.append((trainer._initial_global_step, trainer.state.global_step))
    assert counts == [(2, 4), (4, 6)]


def test_misuse_is_said(tmp_path: Path) -> None:
    """A Trainer without the callback, and trainer.train() itself, name the remedy."""
    relay, other = RelayCallback(tmp_path / "ckpt"), RelayCallback(tmp_path / "ckpt")
    trainer = trainer_with(relay, tmp_path)
    with pytest.raises(NotAllowedNowError, match="callbacks="):
        other.train(trainer)
    with pytest.raises(NotAllowedNowError, match=r"relay\.train"):
        trainer.train()
