"""Tasks: the steps that run on a node, their outputs, and a counter that can be a blob."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from torchrelay.errors import NotAllowedNowError, UsageError
from torchrelay.jobs.blobs import Step, call_style, step_name
from torchrelay.jobs.cluster import Managed, Node, On, check_blob_name, check_on, node_name
from torchrelay.jobs.workspace import WorkspaceType, workspace_type_of
from torchrelay.records import dataclass

if TYPE_CHECKING:
    from torchrelay.jobs.job import TaskGroup


@dataclass(frozen=True)
class NotHere:
    """Placeholder for a value that stayed in the process that produced it, with the reason."""

    reason: str


class TaskOutput:
    """Output of a task at the end of a run: a name of its workspace, or the result of its last step.

    Only a later run replaces the value, not a change of the workspace.

    Args:
        name: The name in the workspace; None means the result.
        task: The task.

    Example:
        loss = Task(step=train, outputs=["loss"]).outputs[0].fetch()
    """

    def __init__(self, name: str | None, task: Task) -> None:
        self.name = None if name is None else check_blob_name(name)
        self._task, self._of = weakref.ref(task), task.full_name
        self._values: dict[str, Any] | None = None

    def __repr__(self) -> str:
        return f"TaskOutput({self})"

    @property
    def task(self) -> Task | None:
        """The task, if it is still referenced elsewhere."""
        return self._task()

    def __str__(self) -> str:
        what = "the result of the last step" if self.name is None else repr(self.name)
        return f"{what} of task {self._of!r}"

    def bind(self, values: Mapping[str, Any]) -> None:
        """Set the values by node; called by the session at the end of a run. Copies tensors."""
        self._values = {node: _copied(value) for node, value in values.items()}

    def fetch(self, node: str | Node | None = None) -> Any:
        """Return the value on `node`, by default on the only node that ran the task.

        Raises NotAllowedNowError before a run and for a value that is too big to leave its process,
        UsageError for a missing or unknown node.
        """
        values = self._bound()
        if node is None and len(values) > 1:
            raise UsageError(f"{self} exists on {_listed(values)}: use fetch(node) or fetch_all()")
        if node is None and not values:
            raise NotAllowedNowError(f"{self} is not set: the last run selected no node for it")
        name = next(iter(values)) if node is None else str(node)
        if name not in values:
            raise UsageError(f"{self} exists on {_listed(values)}, not on {name!r}")
        if isinstance(value := values[name], NotHere):
            raise NotAllowedNowError(f"{value.reason}; fetch it there, or make it a blob")
        return value

    def fetch_all(self) -> dict[str, Any]:
        """Return the values by node name; raises NotAllowedNowError before a run.

        A value that is too big to leave its process is a `NotHere` in other processes.
        """
        return dict(self._bound())

    def _bound(self) -> dict[str, Any]:
        if self._values is None:
            raise NotAllowedNowError(f"{self} is not set yet: run its group or task in a session first")
        return self._values


def final_output(name: str) -> TaskOutput:
    """Return a handle to the value of `name` after the last task of the group on the node.

    It becomes an output of the current Task, else of a new Task without steps.
    """
    task = Task.current(required=False)
    return (Task(name="final_output") if task is None else task).add_output(name)


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(item) for item in value)
    return value


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(values) or "no node"


F = TypeVar("F", bound=Step)
Steps = Step | Iterable[Step] | None


class TaskOutputs(list[TaskOutput]):
    """The outputs of a task, in order; callable for compatibility with Caffe2's `task.outputs()`."""

    def __call__(self) -> TaskOutputs:
        """Return the outputs."""
        return self


class Task(Managed):
    """One or more steps that run in sequence on a node, or on every node.

    With `num_instances=k` the steps run in k threads, each in a child of the task's workspace:

        task_init, once            instance_init, once per instance, after all of task_init
        the steps                  in every instance
        instance_exit, per instance             task_exit, once, after all instances

    A task cannot change after its first run.

    Args:
        step: A function, or several; each takes nothing, `ws` or `ctx`.
        outputs: Names of the workspace whose values are kept at the end of a run.
        name: The name in messages; by default that of the first step.
        node: The node; by default the current one, else every node that `on` selects.
        group: The group to join; by default the current one, if any.
        on: The nodes that run it: "all", "rank0", ranks, "host:1", "role:x" or a callable.
        every: Run it only in every n-th epoch.
        num_instances: Number of threads.
        task_init: Steps before all instances; the hooks take what steps take.
        task_exit: Steps after all instances.
        instance_init: Steps of each instance before its own.
        instance_exit: Steps of each instance after its own.
        concurrent: Run it in a thread beside others of its node; it gets no process group.
        workspace_type: "global" or "private"; all tasks of a group must agree.
        on_failure: Run it in the exit group also after a failure.

    Raises:
        UsageError: An argument is invalid.

    Example:
        Task(step=load_data, outputs=["rows"], node="reader_0", num_instances=4)
    """

    def __init__(
        self,
        step: Steps = None,
        outputs: str | Iterable[str] = (),
        name: str | None = None,
        node: str | Node | None = None,
        *,
        group: TaskGroup | None = None,
        on: On = "all",
        every: int = 1,
        num_instances: int = 1,
        task_init: Steps = None,
        task_exit: Steps = None,
        instance_init: Steps = None,
        instance_exit: Steps = None,
        concurrent: bool = False,
        workspace_type: WorkspaceType | str | None = None,
        on_failure: bool = False,
    ) -> None:
        check_on(on)
        self.steps = _steps(step)
        self.task_init, self.task_exit = _steps(task_init), _steps(task_exit)
        self.instance_init, self.instance_exit = _steps(instance_init), _steps(instance_exit)
        self.name = name or next(filter(None, map(step_name, self.steps)), "task")
        self.node = node_name(node)
        self.full_name = self.name if self.node is None else f"{self.node}/{self.name}"
        self.on = on
        self.every = _positive("every", every)
        self.num_instances = _positive("num_instances", num_instances)
        self.concurrent = concurrent
        self.on_failure = on_failure
        self.workspace_type = workspace_type_of(workspace_type)
        self.frozen = False
        self.outputs = TaskOutputs()
        self.result = TaskOutput(None, self)
        self.add_outputs([outputs] if isinstance(outputs, str) else outputs)
        from torchrelay.jobs.job import TaskGroup

        joined = TaskGroup.current(group, required=False)
        if joined is not None:
            joined.add(self)

    def __repr__(self) -> str:
        return f"Task({self.full_name!r})"

    def step(self, function: F) -> F:
        """Add a step, also as a decorator; a function that is added twice runs twice."""
        self._check_open()
        self.steps += _steps(function)
        return function

    def add_output(self, name: str) -> TaskOutput:
        """Add a workspace name to the outputs and return its handle."""
        self._check_open()
        output = TaskOutput(name, self)
        self.outputs.append(output)
        return output

    def add_outputs(self, names: Iterable[str]) -> list[TaskOutput]:
        """Add several workspace names to the outputs and return their handles."""
        return [self.add_output(name) for name in names]

    def freeze(self) -> None:
        """Refuse further changes; called at the first use."""
        self.frozen = True

    def _check_open(self) -> None:
        if self.frozen:
            raise NotAllowedNowError(
                f"task {self.full_name!r} has already run and cannot change: create a new one"
            )


def _steps(given: Steps) -> list[Step]:
    if given is None:
        return []
    steps = list(given) if isinstance(given, Iterable) and not callable(given) else [given]
    for step in steps:
        call_style(step)
    return steps


def _positive(what: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{what}={value!r} is invalid: expected an integer, at least 1")
    return value


class Counter:
    """A thread-safe integer that counts down to 0; saved and loaded like any stateful blob.

    Args:
        start: The first value, at least 0.
        name: Its name in messages.

    Raises:
        UsageError: `start` is invalid.

    Example:
        Job("hello", blobs=dict(left=Counter(100)))
    """

    def __init__(self, start: int = 0, name: str | None = None) -> None:
        if isinstance(start, bool) or not isinstance(start, int) or start < 0:
            raise UsageError(f"invalid start of a counter: expected an integer, at least 0, not {start!r}")
        self.name = name
        self._start = start
        self._value = start
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Counter({self.name or ''}={self._value})"

    @property
    def value(self) -> int:
        """Current value; negative after more count-downs than `start`."""
        return self._value

    def count_down(self) -> bool:
        """Decrement; returns True if the value was already 0 or less."""
        with self._lock:
            self._value -= 1
            return self._value < 0

    def count_up(self) -> int:
        """Increment; returns the previous value."""
        with self._lock:
            self._value += 1
            return self._value - 1

    def reset(self, value: int | None = None) -> int:
        """Set to `value`, or to the start; returns the previous value."""
        with self._lock:
            before, self._value = self._value, self._start if value is None else value
            return before

    def state_dict(self) -> dict[str, int]:
        """Return the state of the blob."""
        return {"value": self._value}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Load the value from a state; raises KeyError if it is missing."""
        with self._lock:
            self._value = int(state["value"])
