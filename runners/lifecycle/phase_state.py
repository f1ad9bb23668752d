"""What a phase consists of while its profile runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torchrelay.jobs.config.data_keys import Phase
from torchrelay.records import dataclass
from torchrelay.runners.lifecycle.scope import PhaseScope
from torchrelay.runners.lifecycle.selection import LOADER, MODEL, OPTIMIZER, SCHEDULER

if TYPE_CHECKING:
    from torch import nn, optim

    from torchrelay.jobs.epoch_loader import EpochLoader


@dataclass
class PhaseState:
    """A model with its data. `trained` is the model as it is called: wrapped where there are several ranks.

    `scope` is its part of the workspace. `prefix` stands before the names of its metrics: empty where the
    profile has one phase. `optimizer` is None where nothing is trained; `scheduler` is stepped behind each of
    its steps, or behind each epoch, where there is one. `validation` is the same model with the data that it
    is measured on while it trains.
    """

    name: str
    keys: Phase
    model: nn.Module
    trained: nn.Module
    loader: EpochLoader
    scope: PhaseScope
    prefix: str
    optimizer: optim.Optimizer | None = None
    scheduler: Any = None
    scheduled_by_epoch: bool = False
    validation: PhaseState | None = None
    metrics: tuple[str, ...] | None = None
    """Which metrics an evaluation logs; all if it is None."""

    def logs(self, metric: str) -> bool:
        """Whether an evaluation logs this metric."""
        return self.metrics is None or metric in self.metrics

    def weight(self, count: int, ranks: int) -> float:
        """What `count` samples of this process weigh: less where several ranks read the same ones."""
        return count * self.loader.world / ranks

    def blobs(self) -> Mapping[str, Any]:
        """What a checkpoint has of it, by blob name."""
        found = {MODEL: self.model, LOADER: self.loader}
        if self.optimizer is not None:
            found[OPTIMIZER] = self.optimizer
        if self.scheduler is not None:
            found[SCHEDULER] = self.scheduler
        return {f"{self.name}.{part}": thing for part, thing in found.items()}
