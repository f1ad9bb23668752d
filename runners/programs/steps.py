"""What a program does with a batch, an epoch, a dataset: each can be overridden; numbers of an epoch.

A reduction is one of `mean sum last min max` (done by the log that it is given to), `all` (the values
themselves are the result), or a callable that makes a number of the list of all values of all ranks, in the
order of the ranks.

For people and for clients of the server. Of the sizes only the first, that of the batch, is known to differ;
nothing is ever refused because of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

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


class Log(Protocol):
    """What takes numbers: `ctx`, or a log of its own."""

    def log(self, name: str, value: Any, reduce: Any = "mean", weight: Any = 1) -> None:
        """Take one."""


class Collected:
    """Values of the running epoch kept one by one; state, so that it can go on in its middle."""

    def __init__(self) -> None:
        self.values: dict[str, list[Any]] = {}

    def add(self, name: str, value: Any) -> None:
        """Keep a number, or a tensor of numbers; where it is, nothing is waited for."""
        self.values.setdefault(name, []).append(value.detach() if hasattr(value, "detach") else value)

    def drop(self, stream: str) -> None:
        """Forget what one stream has."""
        self.values = {name: one for name, one in self.values.items() if not name.startswith(f"{stream}/")}

    def take(self, stream: str) -> dict[str, list[float]]:
        """Hand out what one stream has, as plain numbers, and forget it."""
        found = {name: _flat(one) for name, one in self.values.items() if name.startswith(f"{stream}/")}
        self.drop(stream)
        return found

    def state_dict(self) -> dict[str, Any]:
        """The values up to now."""
        return {"values": {name: [finite(one) for one in _flat(it)] for name, it in self.values.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.values = {name: [float(one) for one in it] for name, it in state["values"].items()}


class Collector:
    """Sends what steps measured where its reduction says."""

    def __init__(self, reductions: Mapping[str, Reduction], collected: Collected) -> None:
        self._reductions, self.collected = dict(reductions), collected

    @property
    def keeps(self) -> bool:
        """Whether any reduction needs the values one by one."""
        return any(_keeps(one) for one in self._reductions.values())

    def add(self, log: Log, stream: str, values: Mapping[str, Any], weight: Any) -> None:
        """Take what one step measured; `weight` is for means. Raises UsageError for what is no mapping."""
        if not isinstance(values, Mapping):
            raise UsageError(f"a step of {stream} returned {values!r:.60}; return a dict of named numbers")
        for name, value in values.items():
            reduction = self._of(stream, name)
            if _keeps(reduction):
                self.collected.add(f"{stream}/{name}", value)
            else:
                log.log(f"{stream}/{name}", value, reduce=reduction, weight=weight)

    def finish(self, log: Log, stream: str, peers: Peers) -> dict[str, list[float]]:
        """End an epoch of a stream: reduce what was kept, on all ranks; returns what stays one by one."""
        if not self.keeps:
            return {}
        own = {name: [finite(one) for one in it] for name, it in self.collected.take(stream).items()}
        told = peers.exchange(f"values of {stream}", own) if peers.size > 1 else [own]
        stays = {}
        for full in sorted({name for one in told for name in one}):
            values = [float(value) for one in told for value in one.get(full, ())]
            name = full.removeprefix(f"{stream}/")
            reduction = self._of(stream, name)
            if callable(reduction):
                log.log(full, reduction(values), reduce="last")
            else:
                stays[name] = values
        return stays

    def _of(self, stream: str, name: str) -> Reduction:
        """What is said of `val/score` counts before what is said of `score`."""
        return self._reductions.get(f"{stream}/{name}", self._reductions.get(name, "mean"))


def _keeps(reduction: Reduction) -> bool:
    return reduction == ALL or callable(reduction)


def _flat(values: list[Any]) -> list[float]:
    found: list[float] = []
    for one in values:
        found.extend(map(float, one.reshape(-1).tolist()) if hasattr(one, "reshape") else [float(one)])
    return found


class ProgramParts:
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


FILE = "signature.json"
_BATCH = "batch"


class FirstCall:
    """Notes the shapes of a module's first call, then takes its hook out."""

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
        """Store it in the run, once; a run that cannot take it goes on without."""
        if self.signature is not None and not (run / FILE).exists():
            with suppress(RelayError):
                write_json(run / FILE, self.signature.to_json(), durable=False)


def _names(module: nn.Module, count: int) -> list[str]:
    """The names of `forward`'s first parameters."""
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


class ProgramSteps(ProgramParts):
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
        return on_device(inputs, self.device), on_device(targets, self.device)

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
            told = {name: [finite(one) for one in it] for name, it in stays.items()}
            append_values(Path(ctx.run_dir), ctx.epoch, stream, told)
