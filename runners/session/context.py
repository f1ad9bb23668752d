"""`ctx`: the position of a step in the run, and the functions that it may call."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from os import PathLike
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from torchrelay.errors import UsageError
from torchrelay.jobs.cluster import NodePlace
from torchrelay.jobs.workspace import Workspace
from torchrelay.runners.distributed.loops import ALL
from torchrelay.runners.session.mid_epoch import is_epoch_loader, unsaved_part
from torchrelay.runners.session.run_state import RunState, check_interval
from torchrelay.runners.session.steps import Siblings, StepLoop, TaskRanks

if TYPE_CHECKING:
    import torch

    from torchrelay.checkpoint.load.renaming import LoadResult
    from torchrelay.runners.session.base import SessionBase

logger = logging.getLogger("torchrelay")


def full_state_dict(module: torch.nn.Module) -> dict[str, Any]:
    """Clone a module's state to the CPU; DTensors are gathered, so all ranks must call it together.

    Prefixes of DistributedDataParallel, torch.compile and activation checkpointing are removed from the
    names; a submodule that is itself named `module` keeps its name. Extra states that are not tensors are
    returned unchanged.
    """
    from torchrelay.models.archive.api import entries_of

    return {entry.name: _on_cpu(entry.value) for entry in entries_of(module)}


def _on_cpu(value: Any) -> Any:
    """Copy a tensor to the CPU, gathering DTensors; other values are unchanged."""
    import torch

    if not isinstance(value, torch.Tensor):
        return value
    if hasattr(value, "full_tensor"):
        value = value.full_tensor()
    return value.detach().to("cpu", copy=True)


Reduction = Literal["mean", "sum", "last", "min", "max"]


@dataclass(frozen=True)
class Context:
    """The argument of steps, factories, hooks and stop conditions; valid while they run.

    `ctx["name"]` and `"name" in ctx` read the workspace, `ctx["name"] = value` writes it.

    Args:
        workspace: The GLOBAL workspace of the node, or a child of it for PRIVATE runs and instances.
        place: Location of the node: name, rank, host.
        session: The session that runs the step.
        group: The process group of the task's ranks; None for a single process, and in concurrent tasks,
            which must not communicate.
        siblings: The other threads of this node.
        concurrent: True in concurrent tasks and instances.
        instance: Index of the instance of a task with `num_instances`.
        ranks: The ranks of the task.

    Example:
        def train(ctx):
            for x, y in ctx.steps(ctx["loader"]):
                ctx.log("train/loss", step(ctx["model"], x, y))
    """

    workspace: Workspace
    place: NodePlace
    session: SessionBase = field(repr=False)
    group: Any = None
    siblings: Siblings = field(default_factory=Siblings, repr=False)
    concurrent: bool = False
    instance: int = 0
    ranks: TaskRanks = field(default_factory=TaskRanks, repr=False)

    def __getitem__(self, name: str) -> Any:
        """Return the value of a blob or another name of the workspace."""
        return self.workspace[name]

    def __setitem__(self, name: str, value: Any) -> None:
        """Set a name of the workspace."""
        self.workspace[name] = value

    def __contains__(self, name: object) -> bool:
        """Return True if the workspace has the name."""
        return name in self.workspace

    # Where

    @property
    def node(self) -> str:
        """The node's name, for example `trainer_3`."""
        return self.place.name

    @property
    def rank(self) -> int:
        """The node's rank among all nodes of the job."""
        return self.place.rank

    @property
    def world_size(self) -> int:
        """Number of nodes of the job."""
        return self.place.world_size

    @property
    def local_rank(self) -> int:
        """The rank among the processes of this host."""
        return self.place.local_rank

    @property
    def host(self) -> str:
        """The machine's name."""
        return self.place.host

    @property
    def device(self) -> torch.device:
        """The device of this node: its GPU, else the CPU."""
        return self.session.device

    # When

    @property
    def _state(self) -> RunState:
        return self.session.run_state

    @property
    def epoch(self) -> int:
        """The current epoch, from 1; 0 in `setup` and `init`."""
        return self._state.epoch

    @property
    def step(self) -> int:
        """The current step within the epoch, from 1; after the loop the number of steps."""
        return self._state.step_of(self.node)

    @property
    def total_steps(self) -> int:
        """Number of steps in all epochs and attempts."""
        return self._state.total_steps_of(self.node)

    @property
    def elapsed_secs(self) -> float:
        """Seconds of running time over all attempts."""
        return self._state.elapsed_secs

    @property
    def run_dir(self) -> str | None:
        """The run directory or its URL; None without one."""
        return self._state.run_dir

    @property
    def seed(self) -> int | None:
        """The seed of the run; None if none was set."""
        return self._state.seed

    @property
    def exit_code(self) -> int | None:
        """The exit code of the process, in tasks that run after a failure; else None."""
        return self._state.exit_code

    @property
    def attempt(self) -> int:
        """Number of earlier launches of the run: 0 the first time. Epochs run at least once."""
        return self._state.attempt

    @property
    def window_end(self) -> bool:
        """True in the last step of an accumulation window, in which to call `optimizer.step()`.

        Always True except in loops over `ctx.steps(loader, accumulate=n)`.
        """
        return self._state.window_ends.get(self.node, True)

    # Metrics

    def log(
        self,
        name: str,
        value: Any,
        reduce: Reduction = "mean",
        weight: Any = 1,
        *,
        every: int | None = None,
    ) -> None:
        """Log a number or a tensor of one element, reduced over steps and ranks at the end of the epoch.

        Tensors are detached and accumulated on their device without synchronisation.

        Args:
            name: Name of the metric, for example `train/loss`.
            value: A number, or a tensor of one element.
            reduce: `mean` is weighted by `weight`, `sum` adds value times weight, `last` is the last value of
                the highest rank, `min` and `max` the extreme value.
            weight: For example the batch size. Values of weight 0 are ignored, even NaN.
            every: Also pass a point to trackers and the report every so many steps of `ctx.steps`: the values
                of rank 0 since the previous point, reduced in the same way, within seconds.

        Raises:
            UsageError: The name or value is invalid, a name has two reductions or intervals, or `every` is
                set outside of counted steps.

        Example:
            ctx.log("train/loss", loss, weight=len(batch), every=50)
        """
        state, also = self._state, None
        if every is not None:
            check_interval(every, self.total_steps)
            if self.rank == 0:
                also = partial(state.points.add, self.epoch, self.total_steps, name, reduce, every)
        state.log_of(self.node).log(name, value, reduce, weight, also)

    def metric(self, name: str) -> float:
        """Return the last reduced value of a metric; does not communicate, so any rank may call it alone.

        Raises MissingMetricError for a name that no finished epoch has logged; a stop condition that raises
        it waits.
        """
        return self._state.metrics[name]

    @property
    def metrics(self) -> Mapping[str, float]:
        """The last reduced values of all metrics, from any epoch; read-only."""
        return MappingProxyType(self._state.metrics)

    @property
    def measured(self) -> Mapping[str, float]:
        """The metrics of the finished epoch; empty while one runs. For stop conditions."""
        return MappingProxyType(self._state.measured)

    # Steps

    def steps(self, loader: Iterable[Any], *, count: bool = True, accumulate: int = 1) -> Iterator[Any]:
        """Iterate over a loader's batches; all ranks begin and end together.

        - Counts steps. When a limit (`max_steps`, `max_time`) is reached or a process was asked to stop, the
          epoch ends early at the same step on all ranks.
        - Loaders of uneven length end with the shortest; dropped batches are reported once. `set_epoch` of a
          `DistributedSampler` is called.
        - All ranks must run the same loops, and leave them with `break` at the same step or not at all. A
          rank that diverges is found within seconds, and all ranks raise UsageError naming it.
        - Emulated nodes of one process run one after another and cannot wait for each other.
        - On a preemption (SIGTERM, a time limit) the loop raises an exception that passes `except Exception`;
          the next launch resumes at this step.

        With `count=False`, for evaluation, batches do not count as steps and the loop does not end early. A
        preemption waits for the end of an evaluation, and of a loop under `no_grad`, if there is time.
        Concurrent tasks, parallel instances and tasks of some ranks (`on="rank0"`, a node's own task) need
        `count=False`. Tasks of all nodes with one function may count.

        Args:
            loader: The iterable of batches.
            count: True to count the batches as steps; False for evaluations.
            accumulate: Batches per accumulation window. `ctx.window_end` is True in the last one of each
                window and of the loader. Requests to stop or save wait for it unless the time is too short;
                then the gradients of the open window are saved too.

        Returns:
            An iterator over the batches of this rank.

        Raises:
            UsageError: Steps cannot be counted here, or `accumulate` is invalid.

        Example:
            for x, y in ctx.steps(loader, accumulate=4):
                (F.mse_loss(model(x), y) / 4).backward()
                if ctx.window_end:
                    optimizer.step()
                    optimizer.zero_grad()
        """
        alone = self.concurrent or self.session.peers.size == 1
        self._check_steps(count, accumulate, alone=alone)
        set_epoch(loader, max(self.epoch, 1))
        if count and self._state.requests is not None and self._state.comes_again(loader):
            self._warn_if_unsaved(loader)
        if len(self.session.local_nodes) > 1 and is_epoch_loader(loader):
            loader.placed(self.place.rank, self.place.world_size)  # torch.distributed does not know it there
        every = not self.concurrent and (count or self.ranks.every)
        agreeing = None if alone else self.session if every else self.ranks.agreeing
        cursor = None if self.concurrent else self._state.cursor_of(self.node)
        among = ALL if every else self.ranks.among
        rest = (self.siblings, every, cursor, accumulate, self.session.loops, among)
        return iter(StepLoop(self._state, self.node, loader, count, agreeing, *rest))

    def _warn_if_unsaved(self, loader: Iterable[Any]) -> None:
        unsaved = unsaved_part(loader, self.session.workspace(self.node))
        if unsaved is not None and self._state.first_time(f"loader of {self.node}"):
            logger.warning(
                "the %s of the training loop is not a blob: its state is not saved, and a resumed run begins "
                "without it. Register it: blobs=dict(..., %s)",
                type(unsaved).__name__,
                "loader=loader" if unsaved is loader else "generator=generator",
            )

    def _check_steps(self, count: bool, accumulate: int, *, alone: bool) -> None:
        if type(accumulate) is not int or accumulate < 1 or (accumulate > 1 and not count):
            raise UsageError(
                f"invalid accumulate={accumulate!r:.80}: expected the number of batches per optimizer step, "
                "from 1, in loops without count=False"
            )
        if count and self.concurrent:
            raise UsageError(
                "steps cannot be counted in concurrent tasks and instances: "
                "use ctx.steps(loader, count=False) there"
            )
        if count and not alone and not self.ranks.counting:
            raise UsageError(
                f"steps are counted on all ranks together, but this task of {self.node} runs on some ranks: "
                "use ctx.steps(loader, count=False) in it, or run it on all ranks"
            )

    # State

    def load_blobs(
        self, where: str | PathLike[str], names: str | Iterable[str] = "*", **options: Any
    ) -> LoadResult:
        """Load blobs of any checkpoint, or of a file of `save_blobs`, into this workspace, for warm starts.

        Objects are loaded in place, verified, all or nothing. Missing tensors and values are created; other
        names must exist.

        Args:
            where: A run directory, a checkpoint directory or a file.
            names: Names or patterns of blobs.
            options: `epoch` (a number, "last" or "best"), and `rename`, `strict`, `nodes`, `exclude`, `dtype`
                of `open_checkpoint(...).load`.

        Returns:
            The missing and unexpected names.

        Raises:
            KeyError: The workspace lacks a name that is neither a tensor nor a value.

        Example:
            ctx.load_blobs("runs/pretrained", "model", epoch="best")
        """
        from torchrelay.checkpoint.files.load_into import load_blobs_into

        self.before_mutation()
        return load_blobs_into(self.workspace, where, names, **options)

    def full_state_dict(self, module: torch.nn.Module) -> dict[str, Any]:
        """Return a CPU copy of a module's whole state, under the names of the unwrapped module.

        Prefixes of DDP and torch.compile are removed, DTensors are gathered (then all ranks must call this).
        """
        return full_state_dict(module)

    def before_mutation(self) -> None:
        """Wait until a save that is still copying no longer needs the registered tensors.

        Optimizer steps and all writes of torchrelay do this themselves. Call it before your own writes that
        bypass them (`.data`, numpy views, custom kernels).
        """
        gate = self.session.workspace(self.node).gate
        if gate is not None:
            gate()

    # Concurrency

    @property
    def cancelled(self) -> bool:
        """True if a task, instance or report step in parallel to this one failed: return soon.

        `steps` checks this itself; check it in your own long loops, such as those waiting at a queue.
        """
        return self.siblings.cancelled

    def enter_thread(self) -> None:
        """Set the node's device in a new thread; CUDA's current device is per thread."""
        device = self.device
        if device.type == "cuda":
            import torch

            torch.cuda.set_device(device)


def set_epoch(loader: Any, epoch: int) -> None:
    """Set the epoch (from 0) in samplers and datasets that shuffle by it, at any depth."""
    if is_epoch_loader(loader):
        return
    found: list[Any] = []
    todo = [loader]
    while todo:
        part = todo.pop()
        if part is None or any(part is one for one in found):
            continue
        found.append(part)
        if callable(set_epoch := getattr(part, "set_epoch", None)):
            set_epoch(epoch - 1)
        todo += [getattr(part, name, None) for name in ("sampler", "batch_sampler", "dataset")]
