"""Lightning trains through torchrelay: killed at any batch, the same command ends with the same bits."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torchrun import REPOSITORY, clean_environment, torchrun

import torchrelay
from torchrelay.errors import BlobError, UsageError

pl = pytest.importorskip("lightning.pytorch")

from lightning_training import EPOCHS, Net, loaders, train, trainer_of  # noqa: E402

from torchrelay.integrations.lightning import TorchrelayCheckpoint, TorchrelayCheckpointIO  # noqa: E402

pytestmark = [
    pytest.mark.timeout(300),  # importing Lightning takes seconds, in each process
    pytest.mark.filterwarnings("default"),  # its warnings are not ours to mend
]

PROGRAM = REPOSITORY / "tests" / "programs" / "lightning_program.py"
HELPERS = {"PYTHONPATH": str(REPOSITORY / "tests" / "helpers")}


def alone(*arguments: str) -> Any:
    """The program in one process."""
    return subprocess.run(
        [sys.executable, str(PROGRAM), *arguments], env=clean_environment(HELPERS), capture_output=True,
        text=True, timeout=100, check=False,
    )  # fmt: skip


def on_ranks(ranks: int, cwd: Path, *arguments: str) -> Any:
    """The program on ranks."""
    return torchrun(PROGRAM, *arguments, ranks=ranks, cwd=cwd, env=HELPERS)


def command(*words: str | Path) -> str:
    """What the command line of torchrelay prints, typed where Lightning cannot be imported."""
    code = (
        "import sys; sys.modules['lightning'] = None; from torchrelay.__main__ import main; sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)], env=clean_environment(), capture_output=True,
        text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done
    return done.stdout


ELSEWHERE = """
import sys, torch, torchrelay
sys.modules["lightning"] = None
class Plain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)
        )
model = Plain()
with torch.no_grad():
    for one in model.parameters():
        one.fill_(7.0)
torchrelay.open_checkpoint(sys.argv[1]).load({"model": model}, nodes="trainer_0")  # buffers may differ
print(float(model.net[0].weight.detach().abs().max()) < 7, int(model.net[1].num_batches_tracked))
"""


@pytest.mark.ranks
@pytest.mark.parametrize(
    "options",
    [[], ["every_n_steps=2", "asynchronous=1"], ["every_n_steps=2", "sharded=2"], ["manual=1"]],
    ids=["epochs", "steps", "sharded", "manual"],
)
def test_two_ranks_end_with_the_bits_of_an_undisturbed_run(options: list[str], tmp_path: Path) -> None:
    """A rank is killed within an epoch, the same command is given again, and the folder is read elsewhere."""
    whole = on_ranks(2, tmp_path, str(tmp_path / "whole"), *options)
    killed = on_ranks(2, tmp_path, str(tmp_path / "killed"), *options, "kill=1.5")
    assert killed.rc != 0 and "digest" not in killed.out
    again = on_ranks(2, tmp_path, str(tmp_path / "killed"), *options)
    assert whole.rc == again.rc == 0, (whole, again)
    digests = [
        [one.of_rank(rank).split("digest ")[1].split()[0] for rank in (0, 1)] for one in (whole, again)
    ]
    assert digests[0] == digests[1]
    assert command("ls", tmp_path / "killed").splitlines()[-1].startswith(str(EPOCHS))
    assert "epochs verified" in command("verify", tmp_path / "killed")
    differences = command("ckpt", "diff", tmp_path / "whole", tmp_path / "killed")
    assert "unchanged" in differences and "changed," not in differences.replace("unchanged", "")
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(tmp_path / "killed")], env=clean_environment(),
        capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["True", str(EPOCHS * 6)]


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["every_n_steps=5"],
        ["every_n_steps=5", "workers=2"],
        ["workers=2"],
        ["every_n_steps=3", "check=0.5"],
        ["every_n_steps=2", "accumulate=3"],
    ],
    ids=str,
)
def test_one_process_ends_with_the_bits_of_an_undisturbed_run(options: list[str], tmp_path: Path) -> None:
    """With workers that load, validation within epochs and accumulated gradients, too."""
    killed = alone(str(tmp_path / "killed"), *options, "kill=1.7")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    numbers = dict(one.split("=") for one in options)
    given: Any = {name: float(text) if "." in text else int(text) for name, text in numbers.items()}
    assert train(tmp_path / "killed", **given) == train(tmp_path / "whole", **given)


@pytest.mark.parametrize("kill", ["0.7", "1.3", "2.11"])
def test_any_batch(kill: str, tmp_path: Path) -> None:
    """In the first epoch, before its first save, and at the last batch of all."""
    alone(str(tmp_path), "every_n_steps=5", f"kill={kill}")
    assert train(tmp_path, every_n_steps=5) == train(tmp_path / "whole", every_n_steps=5)


def test_a_training_that_has_ended_trains_nothing(tmp_path: Path) -> None:
    """The same command again loads the last epoch, with its random states."""
    seen: list[int] = []
    first = train(tmp_path)
    assert train(tmp_path, lambda epoch, batch: seen.append(epoch)) == first
    assert not seen


def test_more_epochs_than_before(tmp_path: Path) -> None:
    """A training that has ended, given a higher max_epochs, equals one that had it from the beginning."""
    train(tmp_path / "more", epochs=2)
    assert train(tmp_path / "more", epochs=4) == train(tmp_path / "whole", epochs=4)


def test_an_epoch_that_is_asked_for(tmp_path: Path) -> None:
    """`resume_from_epoch` rewinds, and trains the same epochs once more."""
    first = train(tmp_path)
    assert train(tmp_path, resume_from_epoch=1) == first


@pytest.mark.ranks
def test_another_number_of_ranks(tmp_path: Path) -> None:
    """Whole epochs resume on any number of ranks; within an epoch that is refused, with the way out."""
    run = str(tmp_path / "run")
    on_ranks(2, tmp_path, run, "every_n_steps=4", "kill=1.5")
    refused = alone(run, "every_n_steps=4")
    assert "was saved by 2 ranks within epoch 2, which other numbers of ranks" in refused.stderr
    assert "resume_from_epoch=1" in refused.stderr
    done = alone(run, "resume_from_epoch=1")
    assert done.stdout.split(",")[1:3] == [str(EPOCHS), "30"], done.stderr


class Counted:
    """A loader with a state of its own, which is asked for it and never iterated to skip."""

    def __init__(self) -> None:
        self.generator, self.at, self.order = torch.Generator().manual_seed(3), 12, torch.zeros(0)
        self.data = loaders()[0].dataset

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Any:
        if self.at == 12:
            self.at, self.order = 0, torch.randperm(48, generator=self.generator)
        while self.at < 12:
            self.at += 1
            found = [self.data[int(one)] for one in self.order[self.at * 4 - 4 : self.at * 4]]
            yield torch.stack([x for x, _ in found]), torch.stack([y for _, y in found])

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "order": self.order, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.order = state["at"], state["order"]
        self.generator.set_state(state["generator"])


@pytest.mark.parametrize("every", [None, 5])
def test_callbacks_and_loaders_with_state(every: int | None, tmp_path: Path) -> None:
    """A loader of the user's, an average of weights and a schedule of accumulation resume within an epoch."""

    def fit_until(where: Path, batch: int | None) -> list[torch.Tensor]:
        def fail(*now: int) -> None:
            if now == (1, batch):
                raise ValueError("planned")

        pl.seed_everything(0, verbose=False)
        average = pl.callbacks.EMAWeightAveraging(decay=0.9)
        callbacks = [average, pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 2})]
        trainer = trainer_of(*callbacks, TorchrelayCheckpoint(where, every_n_steps=every))
        trainer.fit(Net(fail), Counted(), loaders()[1])
        return [*trainer.lightning_module.state_dict().values(), torch.rand(1)]

    whole = fit_until(tmp_path / "whole", None)
    with pytest.raises(ValueError, match="planned"):
        fit_until(tmp_path / "failed", 9)
    assert all(map(torch.equal, whole, fit_until(tmp_path / "failed", None)))


class Adding(Net):
    """Steps one optimizer after each batch, and another after three, whose gradients it adds up."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.05) for part in (self.net[:1], self.net[1:])]

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.manual_backward(super().training_step(batch, batch_idx))
        for optimizer in self.optimizers()[: 2 if batch_idx % 3 == 2 else 1]:
            optimizer.step()
            optimizer.zero_grad()


class Stream(torch.utils.data.IterableDataset[Any]):
    """Samples without a length, with random parts."""

    def __iter__(self) -> Any:
        for number in torch.randperm(48).tolist():
            yield torch.randn(6) + number, torch.ones(1)


class CountedStream(Counted):
    """A loader with a state of its own, but no length."""

    __len__ = None


class Thawing(Net):
    """Its first layers are trained later."""

    @property
    def backbone(self) -> torch.nn.Module:
        return self.net[:2]

    def configure_optimizers(self) -> Any:
        parameters = [one for one in self.parameters() if one.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def shuffled_by(generator: torch.Generator) -> Any:
    """The samples in an order that a generator of the user draws."""
    return torch.utils.data.DataLoader(loaders()[0].dataset, 4, shuffle=True, generator=generator)


PARTS: dict[str, tuple[Any, Any, Any]] = {
    "gradients": (Adding, list, lambda: loaders()[0]),
    "generator": (Net, list, lambda: shuffled_by(torch.Generator().manual_seed(5))),
    "stream": (Net, list, lambda: torch.utils.data.DataLoader(Stream(), 4)),
    "stateful": (Net, list, CountedStream),
    "groups": (Thawing, lambda: [pl.callbacks.BackboneFinetuning(1)], lambda: loaders()[0]),
}


@pytest.mark.parametrize("part", PARTS)
def test_what_lightning_does_not_restore(part: str, tmp_path: Path) -> None:
    """Gradients of an open window, the user's generator, batches without a length, and new groups resume."""

    def fit_until(where: Path, stop: tuple[int, int] | None) -> list[torch.Tensor]:
        def fail(*now: int) -> None:
            if now == stop:
                raise ValueError("planned")

        pl.seed_everything(0, verbose=False)
        kind, callbacks, loader = PARTS[part]
        trainer = trainer_of(*callbacks(), TorchrelayCheckpoint(where, every_n_steps=1))
        trainer.fit(kind(fail), loader(), loaders()[1])
        rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
        return [*trainer.lightning_module.state_dict().values(), torch.tensor(rates), torch.rand(1)]

    whole = fit_until(tmp_path / "whole", None)
    for stop in ((0, 7), (1, 8)):
        with pytest.raises(ValueError, match="planned"):
            fit_until(tmp_path / "failed", stop)
    assert all(map(torch.equal, whole, fit_until(tmp_path / "failed", None)))


def test_the_users_model_checkpoint_stays_the_trainers(tmp_path: Path) -> None:
    """`ckpt_path="best"` and `trainer.checkpoint_callback` mean it, in whatever order callbacks are given."""
    saving = pl.callbacks.ModelCheckpoint(tmp_path / "theirs", monitor="val")
    trainer = trainer_of(TorchrelayCheckpoint(tmp_path / "ours"), saving, epochs=1)
    trainer.fit(Net(), *loaders())
    assert trainer.checkpoint_callback is saving and Path(saving.best_model_path).exists()


def test_state_that_cannot_be_stored_is_refused_before_the_first_step(tmp_path: Path) -> None:
    """An object among the hyper-parameters is named, with what to do."""
    model = Net(odd=SimpleNamespace(a=1))
    with pytest.raises(BlobError, match=r"trainer\.hyper_parameters\.odd.*save_hyperparameters\(ignore"):
        trainer_of(TorchrelayCheckpoint(tmp_path)).fit(model, *loaders())
    assert not (tmp_path / "commits").exists()


def test_ranks_that_lightning_starts_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have no RANK: each would take itself for the only one."""
    callback = TorchrelayCheckpoint(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UsageError, match="torchrun --nproc-per-node=2"):
        callback.on_fit_start(SimpleNamespace(world_size=2, fast_dev_run=0), None)


# The plugin


def fit(where: Path, epochs: int, **options: Any) -> Any:
    """Train with ModelCheckpoint and the plugin; the trainer."""
    pl.seed_everything(0, verbose=False)
    saving = pl.callbacks.ModelCheckpoint(where, save_last=True, save_top_k=-1, monitor="val")
    trainer = trainer_of(saving, epochs=epochs, plugins=[TorchrelayCheckpointIO()])
    trainer.fit(Net(**options.pop("hyper", {})), *loaders(), **options)
    return trainer


def test_model_checkpoint_writes_no_pickle(tmp_path: Path) -> None:
    """Its files are safetensors with Lightning's entries, and give back the dict that Lightning made."""
    trainer = fit(tmp_path, 2)
    files = sorted(tmp_path.glob("*.ckpt"))
    assert [one.name for one in files] == ["epoch=0-step=12.ckpt", "epoch=1-step=24.ckpt", "last.ckpt"]
    assert not any(b"PK\x03\x04" in one.read_bytes() for one in files)
    found = TorchrelayCheckpointIO().load_checkpoint(tmp_path / "last.ckpt")
    assert (found["epoch"], found["global_step"], found["hyper_parameters"]) == (1, 24, {"hidden": 8})
    made = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    assert found.keys() == made.keys()
    for name, tensor in made["state_dict"].items():
        assert torch.equal(found["state_dict"][name], tensor)
    weights = torchrelay.load_blobs(tmp_path / "last.ckpt", "state_dict")["state_dict"]
    assert weights.keys() == found["state_dict"].keys()


def test_lightning_resumes_from_its_file(tmp_path: Path) -> None:
    """`ckpt_path` restores model, optimizer, schedules, loops and callbacks, and trains what is left."""
    fit(tmp_path, 2)
    trainer = fit(tmp_path, 3, ckpt_path=str(tmp_path / "last.ckpt"))
    assert (trainer.current_epoch, trainer.global_step) == (3, 36)
    assert len(trainer.checkpoint_callback.best_k_models) == 3


def test_the_plugin_refuses_what_needs_pickle(tmp_path: Path) -> None:
    """An object is named with the file and the remedy; a file of torch.save is no such file."""
    with pytest.raises(BlobError, match=r"\.ckpt was not written: hyper_parameters\.odd.*ignore="):
        fit(tmp_path, 1, hyper={"odd": SimpleNamespace(a=1)})
    assert not list(tmp_path.glob("*.ckpt"))
    torch.save({"state_dict": {}}, tmp_path / "theirs.ckpt")
    with pytest.raises(UsageError, match=r"was written by torch\.save"):
        TorchrelayCheckpointIO().load_checkpoint(tmp_path / "theirs.ckpt")
    with pytest.raises(UsageError, match="storage_options"):
        TorchrelayCheckpointIO().save_checkpoint({}, tmp_path / "x.ckpt", storage_options={})
