"""Overridable steps of a program for batches, epochs and datasets, and the metrics of an epoch.

A reduction is `mean sum last min max`, `all` (the values themselves are the result), or a callable that maps
the list of all values of all ranks, in rank order, to a number.

The signature of a run describes the model's inputs for users and clients; only the batch size is dynamic in
it, and nothing is ever refused because of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from torchrelay.errors import RelayError, UsageError
from torchrelay.jobs.data.data_parallel import data_parallel
from torchrelay.jobs.data.loader import EpochLoader
from torchrelay.jobs.runtime import Signature, Size, TensorSpec
from torchrelay.jobs.session import Peers, Solo
from torchrelay.metadata.experiments import append_values
from torchrelay.metadata.fs import finite, write_json
from torchrelay.runners.config_runs.user_objects import on_device
from torchrelay.runners.session.base import SessionBase
from torchrelay.runners.session.context import Context
from torchrelay.runners.session.local import LocalSession, current_session
from torchrelay.runners.session.metrics import MetricLog, reduce_metrics

if TYPE_CHECKING:
    from torchrelay.jobs.config.config import Config


ALL = "all"
Reduction = str | Callable[[list[float]], Any]


class Collected:
    """All single values of the running epoch; part of the state, so that an epoch can be resumed."""

    def __init__(self) -> None:
        self.values: dict[str, list[Any]] = {}

    def add(self, name: str, value: Any) -> None:
        """Keep a number or a tensor of numbers, without waiting for the device."""
        self.values.setdefault(name, []).append(value.detach() if hasattr(value, "detach") else value)

    def drop(self, stream: str) -> None:
        """Discard the values of one stream."""
        self.values = {name: one for name, one in self.values.items() if not name.startswith(f"{stream}/")}

    def take(self, stream: str) -> dict[str, list[float]]:
        """Return the values of one stream as numbers and discard them."""
        found = {name: _flat(one) for name, one in self.values.items() if name.startswith(f"{stream}/")}
        self.drop(stream)
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the values so far."""
        return {"values": {name: [finite(one) for one in _flat(it)] for name, it in self.values.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the values."""
        self.values = {name: [float(one) for one in it] for name, it in state["values"].items()}


class Collector:
    """Distribute the measurements of steps according to their reductions."""

    def __init__(self, reductions: Mapping[str, Reduction], collected: Collected) -> None:
        self._reductions, self.collected = dict(reductions), collected

    @property
    def keeps(self) -> bool:
        """True if any reduction needs all single values."""
        return any(_keeps(one) for one in self._reductions.values())

    def add(self, log: Any, stream: str, values: Mapping[str, Any], weight: Any) -> None:
        """Add the measurements of a step; `weight` is for means. Raises UsageError unless a mapping."""
        if not isinstance(values, Mapping):
            raise UsageError(f"a step of {stream} returned {values!r:.60}: expected a dict of named numbers")
        for name, value in values.items():
            reduction = self._of(stream, name)
            if _keeps(reduction):
                self.collected.add(f"{stream}/{name}", value)
            else:
                log.log(f"{stream}/{name}", value, reduce=reduction, weight=weight)

    def finish(self, log: Any, stream: str, peers: Peers) -> dict[str, list[float]]:
        """Finish an epoch of a stream on all ranks; returns the values that are not reduced."""
        if not self.keeps:
            return {}
        own = {name: [finite(one) for one in it] for name, it in self.collected.take(stream).items()}
        gathered = peers.exchange(f"values of {stream}", own) if peers.size > 1 else [own]
        stays = {}
        for full in sorted({name for one in gathered for name in one}):
            values = [float(value) for one in gathered for value in one.get(full, ())]
            name = full.removeprefix(f"{stream}/")
            reduction = self._of(stream, name)
            if callable(reduction):
                log.log(full, reduction(values), reduce="last")
            else:
                stays[name] = values
        return stays

    def _of(self, stream: str, name: str) -> Reduction:
        """Return the reduction; `val/score` takes precedence over `score`."""
        return self._reductions.get(f"{stream}/{name}", self._reductions.get(name, "mean"))


def _keeps(reduction: Reduction) -> bool:
    return reduction == ALL or callable(reduction)


def _flat(values: list[Any]) -> list[float]:
    found: list[float] = []
    for one in values:
        found.extend(map(float, one.reshape(-1).tolist()) if hasattr(one, "reshape") else [float(one)])
    return found


FILE = "signature.json"
_BATCH = "batch"


class FirstCall:
    """Record the shapes of a module's first call, then remove the hook."""

    def __init__(self, module: nn.Module) -> None:
        self.signature: Signature | None = None
        self._handle = module.register_forward_hook(self._seen, with_kwargs=True)

    def _seen(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> None:
        self._handle.remove()
        named = [*zip(_names(module, len(args)), args, strict=True), *kwargs.items()]
        inputs = [spec for name, value in named for spec in _specs(name, value)]
        outputs = list(_specs("output", output))
        if inputs and outputs and all(spec.shape for spec in inputs):  # tensors with a first dimension
            self.signature = Signature(tuple(inputs), tuple(outputs))

    def write(self, run: Path) -> None:
        """Store the signature in the run, once; errors are ignored."""
        if self.signature is not None and not (run / FILE).exists():
            with suppress(RelayError):
                write_json(run / FILE, self.signature.to_json(), durable=False)


def _names(module: nn.Module, count: int) -> list[str]:
    """Return the names of `forward`'s first parameters."""
    try:
        known = [
            one.name
            for one in inspect.signature(module.forward).parameters.values()
            if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
        ]
    except (TypeError, ValueError):
        known = []
    return [known[at] if at < len(known) else f"input_{at}" for at in range(count)]


def _specs(name: str, value: Any) -> Iterator[TensorSpec]:
    if isinstance(value, torch.Tensor):
        rest = tuple(value.shape)[1:]
        shape: tuple[Size, ...] = (_BATCH, *rest) if value.ndim else ()
        yield TensorSpec(name, shape, str(value.dtype).removeprefix("torch."))
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _specs(str(key) if name == "output" else f"{name}.{key}", one)
    elif isinstance(value, (list, tuple)):
        for at, one in enumerate(value):
            yield from _specs(f"{name}_{at}", one)


class ProgramSteps:
    """Parts of a program, and training, validation and testing, from the inside out.

    `make_...` can be overridden; the properties hold what was made. `config` is the configuration of `-m
    FILE`, None without one; it is set before `__init__` runs.

    prepare(batch) -> inputs, targets       forward(inputs) -> output      loss(output, targets)
    backward(loss, batch)                   iteration(batch)               epoch(ctx)
    measure(output, targets) -> numbers     single_test(batch)             validate(ctx), test_on(data)
    """

    seed: int = 0
    batch_size: int = 32
    config: Config | None = None
    parts: ClassVar[tuple[str, ...]] = ("data", "model", "criterion", "optimizer", "scheduler")
    """The order in which a training creates the parts."""
    reductions: ClassVar[Mapping[str, Reduction]] = {}
    """Reduction of metrics over an epoch, by name (`score`, or `val/score` for one stream): `mean` (default),
    `sum last min max`, `all` (all values are kept), or a function of the list of all values."""
    validate_every: int = 1
    """Validate after every N epochs if there is a dataset `val`; 0: never."""

    # Parts

    def make_data(self) -> Mapping[str, Any]:
        """Return datasets by name: `train`, and optionally `val` and `test`. Must be overridden."""
        raise UsageError(
            f'{type(self).__name__} has no data: override make_data(self), which returns {{"train": ...}}'
        )

    def make_model(self) -> nn.Module:
        """Return the model; the caller moves it to the device. Must be overridden."""
        raise UsageError(
            f"{type(self).__name__} has no model: override make_model(self), which returns a module"
        )

    def make_criterion(self) -> Any:
        """Return the function of outputs and targets for the loss; default: cross entropy."""
        return nn.CrossEntropyLoss()

    def make_optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer; default: AdamW with a learning rate of 1e-3."""
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def make_scheduler(self) -> Any:
        """Return a scheduler that steps after every epoch; default: None."""
        return None

    def make_loader(self, data: Any, *, training: bool) -> Iterable[Any]:
        """Return batches of a dataset: an EpochLoader of `batch_size` samples over all ranks."""
        return EpochLoader(data, self.batch_size, shuffle=training)

    def more_state(self) -> Mapping[str, Any]:
        """Return further blobs for the checkpoint besides model, optimizer, scheduler and loader."""
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
            raise UsageError(f"make_model of {type(self).__name__} returned {model!r:.60}: expected a Module")
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
        """The training batches."""
        return self.make_loader(self.dataset("train"), training=True)

    @property
    def session(self) -> SessionBase | None:
        """The current session; None outside of one, as in a notebook."""
        return current_session()

    @cached_property
    def device(self) -> torch.device:
        """The device of this process: its GPU, else the CPU."""
        session = self.session
        return session.device if session is not None else LocalSession().device

    def dataset(self, name: str) -> Any:
        """Return a dataset; raises UsageError if `make_data` has none of this name."""
        if name not in self.data:
            there = ", ".join(self.data) or "nothing"
            raise UsageError(f"make_data of {type(self).__name__} has no {name!r}, it has {there}")
        return self.data[name]

    # With a batch

    def prepare(self, batch: Any) -> tuple[Any, Any]:
        """Return inputs and targets of a batch on the device: its two fields."""
        if len(batch) != 2 or isinstance(batch, Mapping):
            raise UsageError(
                f"a batch has {len(batch)} fields, expected inputs and targets: override prepare(self, batch)"
            )
        inputs, targets = batch
        return on_device(inputs, self.device), on_device(targets, self.device)

    def forward(self, inputs: Any) -> Any:
        """Compute the output; `network` is the model, wrapped if several ranks train."""
        return self.network(inputs)

    def loss(self, output: Any, targets: Any) -> torch.Tensor:
        """Compute the loss of a batch by the criterion."""
        return self.criterion(output, targets)  # type: ignore[no-any-return]

    def backward(self, loss: torch.Tensor, batch: Any) -> None:
        """Compute gradients, weighted so that uneven shares of ranks count as one batch."""
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
        """Return metrics of an output besides its loss: accuracy if targets are classes."""
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
        """Measure the dataset `val` if there is one."""
        if "val" in self.data:
            with self.evaluating():
                for batch in ctx.steps(self.make_loader(self.data["val"], training=False), count=False):
                    self.collect(ctx, "val", self.single_test(batch), batch)

    def after_epoch(self, ctx: Context) -> None:
        """Do nothing; called after every epoch and its validation, for your own code."""

    def every_n_epochs(self, n: int, function: Callable[[Context], Any]) -> None:
        """Call a function after every n-th epoch; register it before the training."""
        if type(n) is not int or n < 1:
            raise UsageError(f"invalid every_n_epochs({n!r}): expected an integer from 1")
        self._periodic.append((n, function))

    def collect(self, log: Any, stream: str, values: Mapping[str, Any], batch: Any = None) -> None:
        """Add a step's metrics to stream `train`, `val`, or one of your own."""
        self._collector.add(log, stream, values, getattr(batch, "count", 1) if batch is not None else 1)

    # With a dataset

    def test_on(self, data: Any) -> dict[str, Any]:
        """Measure a dataset on all ranks; returns numbers, and lists of unreduced values."""
        log, collector = MetricLog(), Collector(self.reductions, Collected())
        with self.evaluating():
            for batch in self.make_loader(data, training=False):
                collector.add(log, "test", self.single_test(batch), getattr(batch, "count", 1))
        stays = collector.finish(log, "test", self._peers)
        reduced = reduce_metrics(self._peers, [log])
        return {name.removeprefix("test/"): value for name, value in reduced.items()} | stays

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Switch to evaluation mode of the unwrapped model without gradients, and back."""
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

    # Internals

    @cached_property
    def network(self) -> torch.nn.Module:
        """The module that `forward` calls; on several ranks it synchronises gradients."""
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
        """Create everything that a training needs, in a fixed order."""
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
            kept = {name: [finite(one) for one in it] for name, it in stays.items()}
            append_values(Path(ctx.run_dir), ctx.epoch, stream, kept)
