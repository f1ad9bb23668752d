"""Tasks: steps that run on a node."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeVar

from torchrelay.errors import NotAllowedNowError, UsageError
from torchrelay.jobs.cluster import Node, node_name
from torchrelay.jobs.context import Managed
from torchrelay.jobs.output import TaskOutput
from torchrelay.jobs.placement import On, check_on
from torchrelay.jobs.step import Step, call_style, invoke, step_name
from torchrelay.jobs.workspace import WorkspaceType, workspace_type_of

if TYPE_CHECKING:
    from torchrelay.jobs.group import TaskGroup

__all__ = ["Step", "Task", "call_style", "invoke"]

F = TypeVar("F", bound=Step)
Steps = Step | Iterable[Step] | None


class TaskOutputs(list[TaskOutput]):
    """The outputs of a task, in order; they may be called, as Caffe2's `task.outputs()`."""

    def __call__(self) -> TaskOutputs:
        return self


class Task(Managed):
    """One or more steps that run one after another on a node, or on every node.

    It joins `group`, else the current TaskGroup, if any, and runs on `node`, else on the current
    Node, else on every node that `on` selects; with `every=n` only in each n-th epoch. With
    `num_instances=k` the steps run in k threads, each in a child workspace of the task's:

        task_init, once            instance_init, once per instance, after all of task_init
        the steps                  in every instance
        instance_exit, per instance             task_exit, once, after all instances

    The hooks take what steps take. `concurrent` lets the task overlap with others of its node in a
    thread; such a task gets no process group. `on_failure` lets a task of the exit group also run
    after a failure. A task is fixed by its first run.
    Raises UsageError for arguments that cannot be.
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
        self._join(group)

    def __repr__(self) -> str:
        return f"Task({self.full_name!r})"

    def step(self, function: F) -> F:
        """Add a step, also as a decorator; the same function twice runs twice."""
        self._check_open()
        self.steps += _steps(function)
        return function

    def add_output(self, name: str) -> TaskOutput:
        """Add a name of the workspace to the outputs and return its handle."""
        self._check_open()
        output = TaskOutput(name, self)
        self.outputs.append(output)
        return output

    def add_outputs(self, names: Iterable[str]) -> list[TaskOutput]:
        """Add several names to the outputs and return their handles."""
        return [self.add_output(name) for name in names]

    def freeze(self) -> None:
        """Allow no change from now on; called at the first use."""
        self.frozen = True

    def _check_open(self) -> None:
        if self.frozen:
            raise NotAllowedNowError(
                f"task {self.full_name!r} was already used and cannot change: make a new one"
            )

    def _join(self, group: TaskGroup | None) -> None:
        from torchrelay.jobs.group import TaskGroup

        group = TaskGroup.current(group, required=False)
        if group is not None:
            group.add(self)


def _steps(given: Steps) -> list[Step]:
    if given is None:
        return []
    steps = list(given) if isinstance(given, Iterable) and not callable(given) else [given]
    for step in steps:
        call_style(step)
    return steps


def _positive(what: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{what}={value!r} cannot be: give an integer from 1 on")
    return value
