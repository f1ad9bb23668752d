"""What a phase consists of while its profile runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torchrelay.errors import UsageError
from torchrelay.jobs.config.schema import Phase
from torchrelay.records import dataclass
from torchrelay.runners.lifecycle.scope import PhaseScope
from torchrelay.runners.lifecycle.selection import LOADER, MODEL, OPTIMIZER, SCHEDULER

if TYPE_CHECKING:
    from torch import nn, optim

    from torchrelay.jobs.data.loader import EpochLoader


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

    def step_scheduler(self, *, epoch: bool) -> None:
        """Step its schedule where that counts epochs (or steps); raises UsageError where it is at its end."""
        if self.scheduler is None or self.scheduled_by_epoch is not epoch:
            return
        try:
            self.scheduler.step()
        except ValueError as error:
            from torch.optim.lr_scheduler import OneCycleLR

            if not isinstance(self.scheduler, OneCycleLR):  # it alone has an end
                raise
            kind, unit = type(self.scheduler).__name__, "epochs" if epoch else "steps"
            raise UsageError(
                f"phase.{self.name}: its {kind} refuses to step ({error}): "
                f"give it as many {unit} as are trained"
            ) from error

    def blobs(self) -> Mapping[str, Any]:
        """What a checkpoint has of it, by blob name."""
        found = {MODEL: self.model, LOADER: self.loader}
        if self.optimizer is not None:
            found[OPTIMIZER] = self.optimizer
        if self.scheduler is not None:
            found[SCHEDULER] = self.scheduler
        return {f"{self.name}.{part}": thing for part, thing in found.items()}
