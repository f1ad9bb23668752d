"""What a program consists of: data, model, criterion, optimizer, each made once, when first asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from torchrelay.errors import UsageError
from torchrelay.jobs.data.loader import EpochLoader
from torchrelay.runners.session.base import SessionBase
from torchrelay.runners.session.local import LocalSession, current_session

if TYPE_CHECKING:
    from torchrelay.jobs.config.config import Config


class Parts:
    """The parts, and how they are made; `make_...` are to be overridden, the properties are what was made.

    `config` is the configuration of `-m FILE`, None without one; it is there before `__init__` runs.
    """

    seed: int = 0
    batch_size: int = 32
    config: Config | None = None
    parts: ClassVar[tuple[str, ...]] = ("data", "model", "criterion", "optimizer", "scheduler")
    """The order in which a training makes them."""

    def make_data(self) -> Mapping[str, Any]:
        """Datasets by name: `train`, and where there are such, `val` and `test`. To be written."""
        raise UsageError(
            f'{type(self).__name__} has no data: write make_data(self), which returns {{"train": ...}}'
        )

    def make_model(self) -> nn.Module:
        """The model. To be written; it is moved to the device by the caller."""
        raise UsageError(
            f"{type(self).__name__} has no model: write make_model(self), which returns a module"
        )

    def make_criterion(self) -> Any:
        """What makes a loss of outputs and targets: cross entropy."""
        return nn.CrossEntropyLoss()

    def make_optimizer(self) -> torch.optim.Optimizer:
        """What changes the model: AdamW with a learning rate of 1e-3."""
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def make_scheduler(self) -> Any:
        """What changes the learning rate after every epoch; None: nothing."""
        return None

    def make_loader(self, data: Any, *, training: bool) -> Iterable[Any]:
        """Batches of a dataset: an EpochLoader of `batch_size` samples, of all ranks together."""
        return EpochLoader(data, self.batch_size, shuffle=training)

    def more_state(self) -> Mapping[str, Any]:
        """Blobs of your own, which checkpoints hold beside model, optimizer, scheduler and loader."""
        return {}

    @cached_property
    def data(self) -> Mapping[str, Any]:
        """The datasets."""
        return self.make_data()

    @cached_property
    def model(self) -> nn.Module:
        """The model, on the device."""
        model = self.make_model()
        if not isinstance(model, nn.Module):
            raise UsageError(f"make_model of {type(self).__name__} returned {model!r:.60}, no torch module")
        return model.to(self.device)

    @cached_property
    def criterion(self) -> Any:
        """The criterion, on the device if it is a module."""
        criterion = self.make_criterion()
        return criterion.to(self.device) if isinstance(criterion, nn.Module) else criterion

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer."""
        return self.make_optimizer()

    @cached_property
    def scheduler(self) -> Any:
        """The scheduler, or None."""
        return self.make_scheduler()

    @cached_property
    def loader(self) -> Iterable[Any]:
        """The batches to train on."""
        return self.make_loader(self.dataset("train"), training=True)

    @property
    def session(self) -> SessionBase | None:
        """The current session; None outside of one, as in a notebook."""
        return current_session()

    @cached_property
    def device(self) -> torch.device:
        """Where this process computes: its GPU, else the CPU."""
        session = self.session
        return session.device if session is not None else LocalSession().device

    def dataset(self, name: str) -> Any:
        """One of the datasets; raises UsageError where `make_data` made none of this name."""
        if name not in self.data:
            there = ", ".join(self.data) or "nothing"
            raise UsageError(f"make_data of {type(self).__name__} has no {name!r}, it has {there}")
        return self.data[name]
