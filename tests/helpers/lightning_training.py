"""A small training by Lightning in which the order of data, random streams and schedules count."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset

from torchrelay.integrations.lightning import TorchrelayCheckpoint

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
EPOCHS = 3
Event = Callable[[int, int], None]
"""Called with epoch and batch, counted from 0, before each step."""


class Noisy(Dataset[Any]):
    """Each sample has a random part of its own."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x, self.y = (
            torch.randn(count, 6, generator=generator),
            torch.randn(count, 1, generator=generator),
        )

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index] + 0.1 * torch.randn(6), self.y[index]


class Net(pl.LightningModule):
    """Dropout, batch norm, a schedule by steps and one by the loss of validation."""

    def __init__(self, event: Event = lambda epoch, batch: None, **hyper: Any) -> None:
        super().__init__()
        self.save_hyperparameters({"hidden": 8, **hyper})
        self.event = event
        self.net = torch.nn.Sequential(
            torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)
        )

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy) and not isinstance(self.net, FSDPModule):
            for one in (self.net[0], self.net[3], self.net):
                fully_shard(one, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.event(self.current_epoch, batch_idx)
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val", torch.nn.functional.mse_loss(self.net(x), y), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        steps = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
        return [optimizer], [
            {"scheduler": steps, "interval": "step"},
            {"scheduler": plateau, "interval": "epoch", "monitor": "val"},
        ]


class Manual(Net):
    """Steps its optimizer itself, so that Lightning has DDP exchange no buffers between steps."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def trainer_of(*callbacks: Any, epochs: int = EPOCHS, **options: Any) -> Any:
    """A quiet trainer on the CPU, for all ranks of torchrun."""
    return pl.Trainer(
        accelerator="cpu", devices=int(os.environ.get("WORLD_SIZE", "1")), max_epochs=epochs, logger=False,
        callbacks=list(callbacks), enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip


def loaders(workers: int = 0) -> tuple[Any, Any]:
    """Those of training and of validation."""
    training = DataLoader(Noisy(48), batch_size=4, shuffle=True, num_workers=workers)
    return training, DataLoader(Noisy(16), batch_size=4)


def train(
    where: Path,
    event: Event = lambda epoch, batch: None,
    *,
    workers: int = 0,
    epochs: int = EPOCHS,
    accumulate: int = 1,
    check: float = 1.0,
    sharded: int = 0,
    manual: int = 0,
    **options: Any,
) -> str:
    """Train to the end, by FSDP 2 on `sharded` ranks; the digest of all that is left, and the counts."""
    pl.seed_everything(0, verbose=False)
    model, stopping = (Manual if manual else Net)(event), pl.callbacks.EarlyStopping("val", patience=50)
    trainer = trainer_of(
        stopping, TorchrelayCheckpoint(where, **options), epochs=epochs,
        accumulate_grad_batches=accumulate, val_check_interval=check,
        strategy=ModelParallelStrategy(sharded, 1) if sharded else "auto",
    )  # fmt: skip
    trainer.fit(model, *loaders(workers))
    return digest(trainer, stopping)


def digest(trainer: Any, stopping: Any) -> str:
    """Of parameters, buffers, moments, schedules, the callback's best score and the next random number."""
    model, state = trainer.lightning_module, trainer.optimizers[0].state
    parts = [*model.state_dict().values(), stopping.best_score, torch.rand(1)]
    parts += [state[one][key] for one in model.parameters() for key in ("exp_avg", "exp_avg_sq", "step")]
    parts += [torch.tensor(one.scheduler.get_last_lr()) for one in trainer.lr_scheduler_configs]
    parts = [one.full_tensor() if isinstance(one, DTensor) else one for one in parts]
    data = b"".join(one.detach().numpy().tobytes() for one in parts)
    bad = trainer.lr_scheduler_configs[1].scheduler.num_bad_epochs
    return f"{hashlib.sha256(data).hexdigest()},{trainer.current_epoch},{trainer.global_step},{bad}"
