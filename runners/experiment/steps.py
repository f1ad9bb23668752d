"""What a program does with a batch, with an epoch, with a dataset; every step can be overridden alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch

from torchrelay.errors import UsageError
from torchrelay.jobs.data.data_parallel import data_parallel
from torchrelay.jobs.session import Peers, Solo
from torchrelay.metadata.experiments import append_values
from torchrelay.runners.experiment.collecting import Collected, Collector, Reduction, told_values
from torchrelay.runners.experiment.noted_signature import FirstCall
from torchrelay.runners.experiment.parts import Parts
from torchrelay.runners.session.context import Context
from torchrelay.runners.session.metrics import MetricLog, reduce_metrics


class Steps(Parts):
    """Training, validation and testing, from the inside out.

    prepare(batch) -> inputs, targets       forward(inputs) -> output      loss(output, targets)
    backward(loss, batch)                   iteration(batch)               epoch(ctx)
    measure(output, targets) -> numbers     single_test(batch)             validate(ctx), test_on(data)
    """

    reductions: ClassVar[Mapping[str, Reduction]] = {}
    """How a number becomes that of an epoch, by name (`score`, or `val/score` for one stream): `mean` unless
    said here, `sum last min max`, `all` (kept one by one), or a function of the list of all values."""
    validate_every: int = 1
    """Validate after every so many epochs; 0: never. Without a dataset `val` there is nothing to do."""

    # With a batch

    def prepare(self, batch: Any) -> tuple[Any, Any]:
        """Inputs and targets of a batch, on the device: its two fields."""
        if len(batch) != 2 or isinstance(batch, Mapping):
            raise UsageError(
                f"a batch has {len(batch)} fields, not inputs and targets: write prepare(self, batch)"
            )
        inputs, targets = batch
        return moved(inputs, self.device), moved(targets, self.device)

    def forward(self, inputs: Any) -> Any:
        """What the model makes of inputs; `network` is the model, wrapped for several ranks in training."""
        return self.network(inputs)

    def loss(self, output: Any, targets: Any) -> torch.Tensor:
        """The loss of a batch: what the criterion says."""
        return self.criterion(output, targets)  # type: ignore[no-any-return]

    def backward(self, loss: torch.Tensor, batch: Any) -> None:
        """Gradients of a loss, weighted so that uneven shares of several ranks count as one batch."""
        (loss * getattr(batch, "weight", 1.0)).backward()

    def iteration(self, batch: Any) -> Mapping[str, Any]:
        """One training step; returns named numbers."""
        inputs, targets = self.prepare(batch)
        loss = self.loss(self.forward(inputs), targets)
        self.optimizer.zero_grad()
        self.backward(loss, batch)
        self.optimizer.step()
        return {"loss": loss}

    def measure(self, output: Any, targets: Any) -> Mapping[str, Any]:
        """What to know of an output beside its loss: the accuracy, where targets are classes."""
        is_class = isinstance(targets, torch.Tensor) and not targets.is_floating_point() and targets.ndim == 1
        if is_class and isinstance(output, torch.Tensor) and output.ndim == 2:
            return {"accuracy": (output.argmax(1) == targets).float().mean()}
        return {}

    def single_test(self, batch: Any) -> Mapping[str, Any]:
        """Measure one batch, in validation and in tests; returns named numbers."""
        inputs, targets = self.prepare(batch)
        output = self.forward(inputs)
        return {"loss": self.loss(output, targets), **self.measure(output, targets)}

    # With an epoch

    def epoch(self, ctx: Context) -> None:
        """Train for an epoch."""
        self.network.train()
        for batch in ctx.steps(self.loader):
            self.collect(ctx, "train", self.iteration(batch), batch)
        if self.scheduler is not None:
            self.scheduler.step()

    def validate(self, ctx: Context) -> None:
        """Measure the dataset `val`, if there is one."""
        if "val" in self.data:
            with self.evaluating():
                for batch in ctx.steps(self.make_loader(self.data["val"], training=False), count=False):
                    self.collect(ctx, "val", self.single_test(batch), batch)

    def after_epoch(self, ctx: Context) -> None:
        """Called after every epoch, behind the validation: for your own."""

    def every_n_epochs(self, n: int, function: Callable[[Context], Any]) -> None:
        """Have a function called after every n-th epoch; to be said before the training, as in `__init__`."""
        if type(n) is not int or n < 1:
            raise UsageError(f"every_n_epochs({n!r}): give a whole number from 1")
        self._periodic.append((n, function))

    def collect(self, log: Any, stream: str, values: Mapping[str, Any], batch: Any = None) -> None:
        """Take the named numbers of a step into `train`, `val`, or a stream of your own."""
        self._collector.add(log, stream, values, getattr(batch, "count", 1) if batch is not None else 1)

    # With a dataset

    def test_on(self, data: Any) -> dict[str, Any]:
        """Measure a dataset, on all ranks together; returns numbers, and lists of what is kept one by one."""
        log, collector = MetricLog(), Collector(self.reductions, Collected())
        with self.evaluating():
            for batch in self.make_loader(data, training=False):
                collector.add(log, "test", self.single_test(batch), getattr(batch, "count", 1))
        stays = collector.finish(log, "test", self._peers)
        reduced = reduce_metrics(self._peers, [log])
        return {name.removeprefix("test/"): value for name, value in reduced.items()} | stays

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluation mode, no gradients, the bare model; as before at the end."""
        before, trained = self.model.training, self.__dict__.get("network")
        self.network = self.model
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.model.train(before)
            if trained is not None:
                self.network = trained

    # What these stand on

    @cached_property
    def network(self) -> torch.nn.Module:
        """The model as `forward` calls it: in a training of several ranks it adds gradients up."""
        return self.model

    @cached_property
    def _periodic(self) -> list[tuple[int, Callable[[Context], Any]]]:
        return []

    @cached_property
    def _collector(self) -> Collector:
        return Collector(self.reductions, Collected())

    @property
    def _peers(self) -> Peers:
        session = self.session
        return session.peers if session is not None else Solo()

    def _build(self) -> None:
        """Make everything that a training needs, in one order."""
        for name in self.parts:
            getattr(self, name)
        self._first_call = FirstCall(self.model)
        self.network = data_parallel(self.model)

    def _train_task(self, ctx: Context) -> None:
        self._collector.collected.drop("train")
        self.epoch(ctx)
        self._finish(ctx, "train")
        if ctx.rank == 0 and ctx.run_dir is not None:
            self._first_call.write(Path(ctx.run_dir))

    def _after_task(self, ctx: Context) -> None:
        self._collector.collected.drop("val")
        if self.validate_every and ctx.epoch % self.validate_every == 0:
            self.validate(ctx)
            self._finish(ctx, "val")
        for n, function in self._periodic:
            if ctx.epoch % n == 0:
                function(ctx)
        self.after_epoch(ctx)

    def _finish(self, ctx: Context, stream: str) -> None:
        stays = self._collector.finish(ctx, stream, ctx.session.peers)
        if stays and ctx.rank == 0 and ctx.run_dir is not None:
            append_values(Path(ctx.run_dir), ctx.epoch, stream, told_values(stays))


def moved(value: Any, device: torch.device) -> Any:
    """A tensor, or tensors in lists, tuples and dicts, on a device; anything else as it is."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {name: moved(one, device) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        found = [moved(one, device) for one in value]
        return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)
    return value
