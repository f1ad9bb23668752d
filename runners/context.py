"""`ctx`: what a step knows about where it runs, and what it may ask for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from os import PathLike
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from torchrelay.errors import UsageError
from torchrelay.jobs.places import NodePlace
from torchrelay.jobs.workspace import Workspace
from torchrelay.runners.full_state import full_state_dict
from torchrelay.runners.run_state import RunState
from torchrelay.runners.siblings import Siblings
from torchrelay.runners.steps import Steps

if TYPE_CHECKING:
    import torch

    from torchrelay.checkpoint.reading.load_result import LoadResult
    from torchrelay.runners.session_base import SessionBase

Reduction = Literal["mean", "sum", "last", "min", "max"]


@dataclass(frozen=True)
class Context:
    """Handed to steps, factories, hooks and stop conditions; valid while they run.

    `workspace` is the node's state as the step sees it: the GLOBAL workspace, or the child of a
    PRIVATE run or of one instance. `ctx["name"]` and `"name" in ctx` read it, `ctx["name"] = value`
    writes it. `place` says where the node runs, `group` is the process group of the ranks that run the
    task (None where this process trains alone, and in concurrent tasks, which must not communicate).
    `instance` counts the parallel bodies of a task with `num_instances`.
    """

    workspace: Workspace
    place: NodePlace
    session: SessionBase = field(repr=False)
    group: Any = None
    siblings: Siblings = field(default_factory=Siblings, repr=False)
    concurrent: bool = False
    instance: int = 0

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

    # Metrics

    def log(self, name: str, value: Any, reduce: Reduction = "mean", weight: Any = 1) -> None:
        """Log a number or a tensor of one element; reduced over steps and ranks when the epoch ends.

        Tensors are detached and accumulated on their device, nothing is waited for. `mean` is weighted
        by `weight` (say, the batch's size), `sum` adds value times weight, `last` is the last value of
        the highest rank. A value of weight 0 is ignored, even NaN. Raises UsageError for a bad name or
        value, and when one name comes with two reductions.
        """
        self._state.log_of(self.node).log(name, value, reduce, weight)

    def metric(self, name: str) -> float:
        """The last reduced value of a metric; never communicates, so any rank may ask alone.

        Raises UsageError for a name that no finished epoch has logged.
        """
        try:
            return self._state.metrics[name]
        except KeyError:
            known = (
                ", ".join(sorted(self._state.metrics)) or "none, because they are reduced when an epoch ends"
            )
            raise UsageError(f"no metric {name!r} was reduced yet; there are: {known}") from None

    @property
    def metrics(self) -> Mapping[str, float]:
        """All metrics as last reduced (when the previous epoch ended); read-only."""
        return MappingProxyType(self._state.metrics)

    # Steps

    def steps(self, loader: Iterable[Any], *, count: bool = True) -> Iterator[Any]:
        """Iterate over a loader's batches; all ranks begin and end together.

        Counts steps and ends the epoch early when a limit (`max_steps`, `max_time`) is reached or any
        process was asked to stop, at the same step everywhere. Loaders of uneven length end with the
        shortest; that surplus batches are dropped is said once. A `DistributedSampler` is told the
        epoch. All ranks must make the same loops, and leave them with `break` at the same step or not
        at all; emulated nodes of one process run one after another and cannot wait for each other.

        When all leave at once, to be continued (SIGTERM, a time limit), the loop does not end: it raises an
        exception that passes by `except Exception`, and the next start goes on from this very step.

        With `count=False`, for evaluation, batches neither count as steps nor end early, unless all leave;
        then the evaluation begins anew at the next start. Concurrent
        tasks and parallel instances have only that form, and it then is a plain loop.
        """
        alone = self.concurrent or self.session.peers.size == 1
        if count and self.concurrent:
            raise UsageError(
                "steps are counted by one loop in the task's own thread: "
                "use ctx.steps(loader, count=False) in concurrent tasks and in instances"
            )
        tell_epoch(loader, max(self.epoch, 1))
        if len(self.session.local_nodes) > 1:
            place_loader(loader, self.place)
        agreeing = None if alone else self.session
        cursor = None if self.concurrent else self._state.cursor_of(self.node)
        polled = not self.concurrent
        return iter(Steps(self._state, self.node, loader, count, agreeing, self.siblings, polled, cursor))

    # State

    def load_blobs(
        self, where: str | PathLike[str], names: str | Iterable[str] = "*", **options: Any
    ) -> LoadResult:
        """Load blobs of any checkpoint, or of a file of `save_blobs`, into this workspace.

        For warm starts: `where` is a run directory, a prefix or a file; `epoch` a number, "last" or "best";
        `rename`, `strict` and `nodes` are those of `open_checkpoint(...).load`. Objects are loaded in place,
        verified, all or nothing; tensors and values that the workspace lacks are made, other names must be
        there (KeyError). Returns what is missing and unexpected.
        """
        from torchrelay.checkpoint.load_into import load_blobs_into

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


def place_loader(loader: Any, place: NodePlace) -> None:
    """Give an EpochLoader its share where torch.distributed cannot tell it: on emulated nodes."""
    from torchrelay.jobs.epoch_loader import EpochLoader

    if isinstance(loader, EpochLoader):
        loader.placed(place.rank, place.world_size)


def tell_epoch(loader: Any, epoch: int) -> None:
    """Let a loader's sampler (a DistributedSampler, say) shuffle for this epoch (counted from 0 there)."""
    for part in (getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
        set_epoch = getattr(part, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch - 1)
