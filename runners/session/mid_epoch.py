"""Position of a node in the tasks of an epoch, for saving and resuming in the middle of it.

The state at a step is exact only if all of it is in the checkpoint. So a node can be resumed between two
tasks, and in the first counted loop of a task (over a registered EpochLoader or a sequence) if that loop
trains: an evaluation may have swapped weights. Anything else is an obstacle with a reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, TypeGuard

from torchrelay.errors import DamagedError
from torchrelay.jobs.blobs import is_stateful
from torchrelay.jobs.random import RandomStreams
from torchrelay.jobs.task import Task
from torchrelay.jobs.workspace import Workspace
from torchrelay.records import Json, dataclass
from torchrelay.runners.session.metrics import Accumulator, joined_summaries
from torchrelay.runners.session.stop_requests import Interrupted

if TYPE_CHECKING:
    from torchrelay.checkpoint.state.restore.gradients import Gradients
    from torchrelay.jobs.data.loader import EpochLoader
    from torchrelay.runners.session.metrics import MetricLog


@dataclass(frozen=True)
class MidEpochPosition:
    """The finished tasks, and the interrupted loop of the next task.

    `task` is resumed in its counted loop after `taken` batches; if None, the next task starts at its
    beginning. `steps` are those of the epoch.
    """

    done: tuple[str, ...] = ()
    task: str | None = None
    taken: int = 0
    steps: int = 0
    metrics: Mapping[str, Accumulator] = field(default_factory=dict)

    def json(self) -> Json:
        """Encode for messages and manifests."""
        return {
            "done": list(self.done),
            "task": self.task,
            "taken": self.taken,
            "steps": self.steps,
            "metrics": {name: summary.encode() for name, summary in self.metrics.items()},
        }

    @classmethod
    def of(cls, json: Json) -> MidEpochPosition:
        """Decode what `json` returned; raises DamagedError otherwise."""
        try:
            return cls(
                tuple(map(str, json["done"])),
                None if json["task"] is None else str(json["task"]),
                int(json["taken"]),
                int(json["steps"]),
                {name: Accumulator.decode(one) for name, one in json["metrics"].items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamagedError(f"the mid-epoch position in the checkpoint is invalid: {error}") from None


def places_json(by_node: Mapping[str, MidEpochPosition]) -> Json:
    """Encode the positions of all nodes in rank order; equal parts are written once."""
    kinds: list[Json] = []
    nodes: dict[str, Json] = {}
    for node, place in by_node.items():
        cursor = replace(place, metrics={}).json()
        if cursor not in kinds:
            kinds.append(cursor)
        nodes[node] = [kinds.index(cursor), place.json()["metrics"]]
    return {"cursors": kinds, "nodes": nodes}


def places_for(nodes: Sequence[str], json: Json) -> dict[str, MidEpochPosition]:
    """Decode `places_json` into the position of each current node; raises DamagedError.

    If the nodes differ from the saved ones, all resume where the first of those was, and the first gets all
    that was logged.
    """
    try:
        cursors = json["cursors"]
        saved = {
            name: MidEpochPosition.of({**cursors[kind], "metrics": metrics})
            for name, (kind, metrics) in json["nodes"].items()
        }
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        raise DamagedError("the mid-epoch positions in the checkpoint are invalid") from None
    if set(saved) == set(nodes):
        return {node: saved[node] for node in nodes}
    if not saved:
        return {}
    first = next(iter(saved.values()))
    together = joined_summaries(place.metrics for place in saved.values())
    return {node: replace(first, metrics=together if node == nodes[0] else {}) for node in nodes}


_DRAWN = (
    "its sequence may have been drawn at random in the same task, so a resume would draw another: use "
    "EpochLoader, or draw it in an earlier task and register it as a blob"
)


@dataclass
class Loop:
    """One loop over a loader in the running task; `source` is the rest of it."""

    loader: Iterable[Any]
    counted: bool
    evaluates: bool = False
    taken: int = 0
    drawn: bool = False
    """True if its order may differ when the task is called again."""
    in_window: bool = False
    """True if it resumes with accumulated gradients."""

    @property
    def source(self) -> Iterable[Any]:
        """The loader without batches taken before a resume; an EpochLoader skips these itself."""
        own = is_epoch_loader(self.loader) or not self.taken
        return self.loader if own else islice(self.loader, self.taken, None)

    @property
    def exhausted(self) -> bool:
        """True if nothing is left, as far as this is known in advance."""
        return self.ends_at(self.taken)

    def ends_at(self, taken: int) -> bool:
        """Return True if nothing is left after `taken` batches, the last one of which may still be next."""
        if is_epoch_loader(self.loader):
            return self.loader.steps_left == 0
        return isinstance(self.loader, Sequence) and taken >= len(self.loader)


class Cursor:
    """Position of one node in one epoch. Mutable; not used by tasks in threads of their own."""

    def __init__(
        self,
        log: MetricLog,
        resumed: MidEpochPosition | None = None,
        streams: RandomStreams | None = None,
        gradients: Gradients | None = None,
    ) -> None:
        self._log = log
        self._resumed, self._streams, self._gradients = resumed, streams, gradients
        self._done: list[str] = []
        self._task: Task | None = None
        self._loops: list[Loop] = []
        self._streams_before: RandomStreams | None = None
        self._obstacle: str | None = None
        self._is_left = False
        if resumed is not None:
            log.restore(resumed.metrics)
            if resumed.task is None:
                self.install_gradients()

    # Tasks

    def skips(self, task: Task) -> bool:
        """Return True if the task was finished before the interruption."""
        if self._resumed is None or task.full_name not in self._resumed.done:
            return False
        self._done.append(task.full_name)
        return True

    def begin(self, task: Task, workspace: Workspace, streams: RandomStreams) -> None:
        """Begin a task in `workspace`; `streams` are the node's random states."""
        if task.concurrent or task.num_instances > 1:
            self._obstacle = f"{task.full_name!r} runs in threads, whose positions are not tracked"
        self._task, self._loops = task, []
        self._streams_before = streams
        if workspace.parent is not None and workspace.own_names():
            names = ", ".join(workspace.own_names())
            self._obstacle = f"{names} of earlier tasks would be lost: register it"

    def end(self, result: object) -> None:
        """Finish the task. Raises Interrupted if a loop did and the program caught it."""
        if self._is_left:
            self.refuse("the program caught the exception that ends run.steps")
            raise Interrupted
        if self._task is not None:
            self._done.append(self._task.full_name)
            if result is not None:
                self._obstacle = f"{self._task.full_name!r} returned a value, which is not saved"
        self._task, self._loops = None, []

    # Loops

    def comes_back(self, *, counted: bool) -> bool:
        """Return True if the loop that begins now is the interrupted one."""
        if self._task is None or self._resumed is None:
            return False
        return counted and self._resumed.task == self._task.full_name

    def enter(self, loader: Iterable[Any], *, counted: bool, evaluates: bool = False) -> Loop:
        """Begin a loop of the running task; the interrupted one gets its logs and states back."""
        resumed = self._resumed if self.comes_back(counted=counted) else None
        taken = resumed.taken if resumed is not None else 0
        loop = Loop(loader, counted=counted, evaluates=evaluates, taken=taken)
        before = self._streams_before
        if counted and before is not None and isinstance(loader, Sequence) and not isinstance(loader, range):
            # a sequence may depend on random numbers that the task drew before its loop
            now = RandomStreams.capture()
            numpy = before.numpy is not None and before.numpy != now.numpy
            cuda = bool(before.cuda) and before.cuda != now.cuda
            loop.drawn = numpy or cuda or (before.python, before.torch) != (now.python, now.torch)
        if resumed is not None:
            self._log.restore(resumed.metrics)
            if self._streams is not None:
                self._streams.restore()
            loop.in_window = self._gradients is not None and self._gradients.any
            self.install_gradients()
            self._resumed = MidEpochPosition(resumed.done)
        self._loops.append(loop)
        return loop

    @property
    def everywhere(self) -> bool:
        """True if the running task runs on all nodes, which can then agree in its loops."""
        return self._task is not None and self._task.node is None and self._task.on == "all"

    # Interruption

    def leave(self) -> None:
        """Raise Interrupted in the running loop; `end` raises it again if the program catches it."""
        self._is_left = True
        raise Interrupted

    def refuse(self, reason: str) -> None:
        """Record a reason why the node cannot be resumed here."""
        self._obstacle = reason

    def obstacle(self, workspace: Workspace) -> str | None:
        """Return why the node cannot be resumed here; None if it can."""
        if self._obstacle is not None or self._task is None or not self._loops:
            return self._obstacle
        counted, last = [loop for loop in self._loops if loop.counted], self._loops[-1]
        if last.evaluates:
            return f"{self._task.full_name!r} was evaluating, possibly with other weights"
        if len(counted) > 1 or not last.counted:
            return f"{self._task.full_name!r} was beyond its first loop: give every loop a task of its own"
        if is_epoch_loader(last.loader):
            held = any(one is last.loader for one in blobs_of(workspace))
            return None if held else "its EpochLoader is not registered as a blob"
        if isinstance(last.loader, Sequence):
            return _DRAWN if last.drawn else None
        return f"a {type(last.loader).__name__} cannot be resumed mid-epoch: use EpochLoader"

    def place(self, steps: int) -> MidEpochPosition:
        """Return the position of the node, `steps` into the epoch."""
        if self._waits and self._resumed is not None:
            return self._resumed
        counted = next((loop for loop in self._loops if loop.counted), None)
        metrics = self._log.snapshot()
        if counted is None or self._task is None:
            return MidEpochPosition(tuple(self._done), steps=steps, metrics=metrics)
        return MidEpochPosition(tuple(self._done), self._task.full_name, counted.taken, steps, metrics)

    @property
    def streams(self) -> RandomStreams | None:
        """The random states to resume with, if they differ from the current ones."""
        return self._streams if self._waits else None

    def install_gradients(self) -> None:
        """Restore the gradients of the resumed position, once."""
        if self._gradients is not None:
            self._gradients.install()
            self._gradients = None

    @property
    def _waits(self) -> bool:
        """True until the node has reached the interrupted loop."""
        return self._resumed is not None and self._resumed.task is not None


def blobs_of(workspace: Workspace) -> list[Any]:
    """Return the registered objects."""
    return [one.value for one in workspace.entries().values() if one.blob is not None]


def unsaved_part(loader: object, workspace: Workspace) -> object:
    """Return what holds a loader's state if no registered object is it, or has it as an attribute, else None.

    It is the loader, or the generator that a DataLoader or its sampler draws from.
    """
    import torch

    blobs = blobs_of(workspace)
    inside = (vars(one).values() for one in blobs if hasattr(one, "__dict__"))
    saved = set(map(id, chain(blobs, *inside)))
    inner = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    drawing = (loader, getattr(loader, "sampler", None), inner)
    drawn = (getattr(one, "generator", None) for one in drawing)
    parts = [loader] if is_stateful(loader) else [one for one in drawn if isinstance(one, torch.Generator)]
    return next((one for one in parts if id(one) not in saved), None)


def is_epoch_loader(loader: object) -> TypeGuard[EpochLoader]:
    """Return True for an EpochLoader: equal steps on all processes, and it keeps its position."""
    from torchrelay.jobs.data.loader import EpochLoader

    return isinstance(loader, EpochLoader)
