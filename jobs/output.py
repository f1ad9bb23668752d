"""Outputs of tasks: handles that can be fetched after a run."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from torchrelay.errors import NotAllowedNowError, UsageError
from torchrelay.jobs.cluster import Node
from torchrelay.jobs.names import check_blob_name
from torchrelay.records import dataclass

if TYPE_CHECKING:
    from torchrelay.jobs.task import Task


@dataclass(frozen=True)
class NotHere:
    """Stands for a value that stayed in the process that produced it, and says why."""

    reason: str


class TaskOutput:
    """A value of a task as of the end of the run: a name of its workspace, or what its last step returned.

    A later run replaces the value; nothing else does, whatever happens to the workspace.
    """

    def __init__(self, name: str | None, task: Task) -> None:
        self.name = None if name is None else check_blob_name(name)
        self._task, self._of = weakref.ref(task), task.full_name
        self._values: dict[str, Any] | None = None

    def __repr__(self) -> str:
        return f"TaskOutput({self})"

    @property
    def task(self) -> Task | None:
        """The task, while anybody else has it."""
        return self._task()

    def __str__(self) -> str:
        what = "what the last step returns" if self.name is None else repr(self.name)
        return f"{what} of task {self._of!r}"

    def bind(self, values: Mapping[str, Any]) -> None:
        """Take the values by node; for the session, at the end of a run. Tensors are copied."""
        self._values = {node: _copied(value) for node, value in values.items()}

    def fetch(self, node: str | Node | None = None) -> Any:
        """Return the value on `node`, by default on the only node that ran the task.

        Raises NotAllowedNowError before a run and for a value that is too big to leave the process
        of its node, UsageError where the node is missing or unknown.
        """
        value = self._chosen(node)
        if isinstance(value, NotHere):
            raise NotAllowedNowError(f"{value.reason}; fetch it there, or make it a blob")
        return value

    def _chosen(self, node: str | Node | None) -> Any:
        values = self._bound()
        if node is None:
            return self._only(values)
        if str(node) in values:
            return values[str(node)]
        raise UsageError(f"{self} exists on {_listed(values)}, not on {str(node)!r}")

    def fetch_all(self) -> dict[str, Any]:
        """Return the values by the name of the node; raises NotAllowedNowError before a run.

        A value that is too big to leave the process of its node is a `NotHere` elsewhere.
        """
        return dict(self._bound())

    def _bound(self) -> dict[str, Any]:
        if self._values is None:
            raise NotAllowedNowError(f"{self} is not set yet: run its group or task in a session first")
        return self._values

    def _only(self, values: Mapping[str, Any]) -> Any:
        if len(values) == 1:
            return next(iter(values.values()))
        if not values:
            raise NotAllowedNowError(f"{self} is not set: the last run selected no node for it")
        raise UsageError(
            f"{self} exists on {_listed(values)}: say which with fetch(node), or use fetch_all()"
        )


def final_output(name: str) -> TaskOutput:
    """Return a handle to `name` as it is when the last task of the group has ended on the node.

    It becomes an output of the current Task, else of a new Task without a step.
    """
    from torchrelay.jobs.task import Task

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
