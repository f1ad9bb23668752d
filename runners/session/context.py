"""`ctx`: what a step knows about where it runs, and what it may ask for."""

from __future__ import annotations

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
from torchrelay.runners.session.mid_epoch import is_epoch_loader
from torchrelay.runners.session.run_state import RunState, check_interval
from torchrelay.runners.session.steps import Siblings, StepLoop, TaskRanks

if TYPE_CHECKING:
    import torch

    from torchrelay.checkpoint.load.renaming import LoadResult
    from torchrelay.runners.session.base import SessionBase


def full_state_dict(module: torch.nn.Module) -> dict[str, Any]:
    """Clone a module's state to the CPU; DTensors are gathered, which all ranks must do together.

    Names are those of the bare module: what torch's wrappers (DistributedDataParallel, torch.compile,
    activation checkpointing) put before or between them is taken off; a submodule that is itself called
    `module` keeps its name. Extra states that are no tensors are handed out as they are.
    """
    from torchrelay.models.archive.states import entries_of

    return {entry.name: _on_cpu(entry.value) for entry in entries_of(module)}


def _on_cpu(value: Any) -> Any:
    import torch

    if not isinstance(value, torch.Tensor):
        return value
    if hasattr(value, "full_tensor"):
        value = value.full_tensor()
    return value.detach().to("cpu", copy=True)


Reduction = Literal["mean", "sum", "last", "min", "max"]


@dataclass(frozen=True)
class Context:
    """Handed to steps, factories, hooks and stop conditions; valid while they run.

    `workspace` is the node's state as the step sees it: the GLOBAL workspace, or the child of a
    PRIVATE run or of one instance. `ctx["name"]` and `"name" in ctx` read it, `ctx["name"] = value`
    writes it. `place` says where the node runs, `group` is the process group of the ranks that run the
    task (None where this process trains alone, and in concurrent tasks, which must not communicate).
    `instance` counts the parallel bodies of a task with `num_instances`; `ranks` are those of the task.
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
        """The value of a blob or of another name of the workspace."""
        return self.workspace[name]

    def __setitem__(self, name: str, value: Any) -> None:
        """Give a name of the workspace a value."""
        self.workspace[name] = value

    def __contains__(self, name: object) -> bool:
        """Whether the workspace has the name."""
        return name in self.workspace

    # Where

    @property
    def node(self) -> str:
        """The node's name, `trainer_3`."""
        return self.place.name

    @property
    def rank(self) -> int:
        """The node's rank among all nodes of the job."""
        return self.place.rank

    @property
    def world_size(self) -> int:
        """How many nodes the job has."""
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
        """Where this node computes: its GPU, else the CPU."""
        return self.session.device

    # When

    @property
    def _state(self) -> RunState:
        return self.session.run_state

    @property
    def epoch(self) -> int:
        """The epoch being run, from 1; 0 in `setup` and `init`."""
        return self._state.epoch

    @property
    def step(self) -> int:
        """The step being run within the epoch, from 1; after the loop the number of steps taken."""
        return self._state.step_of(self.node)

    @property
    def total_steps(self) -> int:
        """Steps of all epochs and attempts up to here."""
        return self._state.total_steps_of(self.node)

    @property
    def elapsed_secs(self) -> float:
        """Seconds that the run has taken, over all attempts."""
        return self._state.elapsed_secs

    @property
    def run_dir(self) -> str | None:
        """The run directory or its URL; None where the run has none."""
        return self._state.run_dir

    @property
    def seed(self) -> int | None:
        """The seed of the run; None where none was set."""
        return self._state.seed

    @property
    def exit_code(self) -> int | None:
        """What the process is going to end with, in tasks that run after a failure; else None."""
        return self._state.exit_code

    @property
    def attempt(self) -> int:
        """How often the run was started before: 0 the first time. Epochs run at least once."""
        return self._state.attempt

    @property
    def window_end(self) -> bool:
        """Whether the step being run is the last of its window: the one to call `optimizer.step()` in.

        Always True but in loops over `ctx.steps(loader, accumulate=n)`.
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
        """Log a number or a tensor of one element; reduced over steps and ranks when the epoch ends.

        Tensors are detached and accumulated on their device, nothing is waited for. `mean` is weighted
        by `weight` (say, the batch's size), `sum` adds value times weight, `last` is the last value of
        the highest rank. A value of weight 0 is ignored, even NaN.

        With `every=50`, trackers and the report also get a point every 50 steps of `ctx.steps`: what rank 0
        has logged since the point before, reduced in the same way. It comes there within seconds, and no
        device is waited for.

        Raises UsageError for a bad name or value, when one name comes with two reductions or intervals, and
        for an interval where no step is counted.
        """
        state, also = self._state, None
        if every is not None:
            check_interval(every, self.total_steps)
            if self.rank == 0:
                also = partial(state.points.add, self.epoch, self.total_steps, name, reduce, every)
        state.log_of(self.node).log(name, value, reduce, weight, also)

    def metric(self, name: str) -> float:
        """The last reduced value of a metric; never communicates, so any rank may ask alone.

        Raises MissingMetricError for a name that no finished epoch has logged; a stop condition that asks for
        one waits.
        """
        return self._state.metrics[name]

    @property
    def metrics(self) -> Mapping[str, float]:
        """All metrics with their last reduced values, of whatever epoch; read-only."""
        return MappingProxyType(self._state.metrics)

    @property
    def measured(self) -> Mapping[str, float]:
        """The metrics that the epoch which is over has logged; empty while one runs. For stop conditions."""
        return MappingProxyType(self._state.measured)

    # Steps

    def steps(self, loader: Iterable[Any], *, count: bool = True, accumulate: int = 1) -> Iterator[Any]:
        """Iterate over a loader's batches; all ranks begin and end together.

        Counts steps and ends the epoch early when a limit (`max_steps`, `max_time`) is reached or any
        process was asked to stop, at the same step everywhere. Loaders of uneven length end with the
        shortest; that surplus batches are dropped is said once. A `DistributedSampler` is told the
        epoch. All ranks make the same loops, and leave them with `break` at the same step or not
        at all: a rank that does otherwise is found within seconds, and all raise UsageError, which names it.
        Emulated nodes of one process run one after another and cannot wait for each other.

        When all leave at once, to be continued (SIGTERM, a time limit), the loop does not end: it raises an
        exception that passes by `except Exception`, and the next start goes on from this very step.

        With `count=False`, for evaluation, batches neither count as steps nor end early. A request to leave
        waits for the end of an evaluation, which may have swapped weights, and of a loop under `no_grad`,
        if there is time. Concurrent tasks and parallel instances have only that form, and so have tasks of
        some ranks (`on="rank0"`, a node's own task). Tasks of all nodes with one function may count.

        Args:
            loader: What gives the batches.
            count: Whether they count as steps; False for evaluations.
            accumulate: Batches of one accumulation window. `ctx.window_end` is True in the last one of
                each, and in the last one of the loader. Requests to stop or to save wait for it, unless the
                time that is left is too short; then, and without `accumulate`, the gradients of the open
                window are saved too.

        Raises:
            UsageError: For counted steps where there are none, and for windows that are no number of them.

        Example:
            for x, y in ctx.steps(loader, accumulate=4):
                (F.mse_loss(model(x), y) / 4).backward()
                if ctx.window_end:
                    optimizer.step()
                    optimizer.zero_grad()
        """
        alone = self.concurrent or self.session.peers.size == 1
        self._check_steps(count, accumulate, alone=alone)
        tell_epoch(loader, max(self.epoch, 1))
        if len(self.session.local_nodes) > 1 and is_epoch_loader(loader):
            loader.placed(self.place.rank, self.place.world_size)  # torch.distributed cannot tell it there
        every = not self.concurrent and (count or self.ranks.every)
        agreeing = None if alone else self.session if every else self.ranks.agreeing
        cursor = None if self.concurrent else self._state.cursor_of(self.node)
        among = ALL if every else self.ranks.among
        rest = (self.siblings, every, cursor, accumulate, self.session.loops, among)
        return iter(StepLoop(self._state, self.node, loader, count, agreeing, *rest))

    def _check_steps(self, count: bool, accumulate: int, *, alone: bool) -> None:
        if type(accumulate) is not int or accumulate < 1 or (accumulate > 1 and not count):
            raise UsageError(
                f"accumulate is {accumulate!r:.80}; it is the number of counted batches between two steps of "
                "the optimizer, from 1, in loops without count=False"
            )
        if count and self.concurrent:
            raise UsageError(
                "steps are counted by one loop in the task's own thread: "
                "use ctx.steps(loader, count=False) in concurrent tasks and in instances"
            )
        if count and not alone and not self.ranks.counting:
            raise UsageError(
                f"all ranks count steps together, and this task of {self.node} runs on some ranks: "
                "use ctx.steps(loader, count=False) in it, or run it on all ranks"
            )

    # State

    def load_blobs(
        self, where: str | PathLike[str], names: str | Iterable[str] = "*", **options: Any
    ) -> LoadResult:
        """Load blobs of any checkpoint, or of a file of `save_blobs`, into this workspace.

        For warm starts: `where` is a run directory, a prefix or a file; `epoch` a number, "last" or "best";
        `rename`, `strict`, `nodes`, `exclude` and `dtype` are those of `open_checkpoint(...).load`. Objects
        are loaded in place, verified, all or nothing; tensors and values that the workspace lacks are made,
        other names must be there (KeyError). Returns what is missing and unexpected.
        """
        from torchrelay.checkpoint.files.load_into import load_blobs_into

        self.before_mutation()
        return load_blobs_into(self.workspace, where, names, **options)

    def full_state_dict(self, module: torch.nn.Module) -> dict[str, Any]:
        """A copy on the CPU of a module's whole state, under the names of the bare module.

        The prefixes of DDP and torch.compile are taken off, DTensors are gathered (then all ranks must
        call this).
        """
        return full_state_dict(module)

    def before_mutation(self) -> None:
        """Wait until a save that is still copying no longer needs the registered tensors.

        Optimizer steps and all writes of torchrelay do this by themselves; call it before your own
        writes to registered tensors behind their back (`.data`, numpy views, custom kernels).
        """
        gate = self.session.workspace(self.node).gate
        if gate is not None:
            gate()

    # Beside others

    @property
    def cancelled(self) -> bool:
        """Whether a task, instance or report step beside this one failed: end soon, nothing counts now.

        `steps` asks this by itself; ask it in your own long loops, such as those that wait at a queue.
        """
        return self.siblings.cancelled

    def enter_thread(self) -> None:
        """Make a new thread compute where this node computes; CUDA's device belongs to a thread."""
        device = self.device
        if device.type == "cuda":
            import torch

            torch.cuda.set_device(device)


def tell_epoch(loader: Any, epoch: int) -> None:
    """Let samplers (a DistributedSampler, say) and datasets shuffle for this epoch (counted from 0 there).

    They are found at any depth: a batch sampler around a sampler, a dataset around another one.
    """
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
