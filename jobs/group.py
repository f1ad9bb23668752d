"""Groups of tasks: what runs together and ends together."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torchrelay.errors import NotAllowedNowError, UsageError
from torchrelay.jobs.cluster import Node, node_name
from torchrelay.jobs.context import Managed
from torchrelay.jobs.session import Session
from torchrelay.jobs.step import Step, call_style
from torchrelay.jobs.task import Task
from torchrelay.jobs.workspace import WorkspaceType, workspace_type_of
from torchrelay.records import dataclass

F = TypeVar("F", bound=Step)
logger = logging.getLogger("torchrelay")


@dataclass(frozen=True)
class NodeHook:
    """A step that runs once per node and run, before or after all its tasks; node None means every node."""

    step: Step
    node: str | None


@dataclass(frozen=True)
class Reporter(NodeHook):
    """A step that runs every `interval` seconds while a node's tasks run, and once after them."""

    interval: float


class TaskGroup(Managed):
    """Tasks that a session runs together: nodes at the same time, tasks of one node in their order.

    The type of workspace is the group's own, else that of its first task that has one, else PRIVATE;
    two types in one group are an error. A group can be run again, but not changed, once it has run.
    """

    def __init__(self, workspace_type: WorkspaceType | str | None = None, name: str | None = None) -> None:
        self.name = name or "group"
        self.frozen = False
        self.reporters: list[Reporter] = []
        self.local_inits: list[NodeHook] = []
        self.local_exits: list[NodeHook] = []
        self._type = workspace_type_of(workspace_type)
        self._tasks: list[Task] = []
        self._names: set[str] = set()

    def __repr__(self) -> str:
        return f"TaskGroup({self.name!r}, {len(self._tasks)} tasks)"

    @property
    def workspace_type(self) -> WorkspaceType:
        """Where the tasks put the names that they create."""
        return self._type or WorkspaceType.PRIVATE

    def add(self, task: Task) -> Task:
        """Add a task and return it; its full name gets `:1`, `:2`, ... where the group has it already.

        A function that is defined once more, as by running a cell of a notebook again, takes the place of the
        one before, also after a run. Raises NotAllowedNowError for other tasks after the first run,
        UsageError for another type of workspace.
        """
        before = self._defined_before(task)
        if before is None:
            self._check_open(f"task {task.full_name!r}")
        self._adopt_type(task)
        if before is not None:
            logger.warning(
                "%s: %r is defined again, and takes the place of the one before", self.name, task.name
            )
            task.full_name = before.full_name
            self._tasks[self._tasks.index(before)] = task
            return task
        task.full_name = self._unused(task.full_name)
        self._names.add(task.full_name)
        self._tasks.append(task)
        return task

    def tasks(self) -> tuple[Task, ...]:
        """Return the tasks in the order of their declaration."""
        return tuple(self._tasks)

    def num_registered_tasks(self) -> int:
        """Return how many tasks there are."""
        return len(self._tasks)

    def used_nodes(self) -> tuple[str, ...]:
        """Return the names of the nodes that tasks were placed on, in the order of their first use."""
        return tuple(dict.fromkeys(task.node for task in self._tasks if task.node is not None))

    def tasks_by_node(self, nodes: Sequence[str]) -> dict[str, list[Task]]:
        """Return for each node its tasks in order: those placed on it and those for every node.

        What `on=` and `every=` say is not asked here. Raises UsageError for a task on another node.
        """
        strange = [task for task in self._tasks if task.node is not None and task.node not in nodes]
        if strange:
            raise UsageError(
                f"task {strange[0].full_name!r} of {self.name!r} is placed on node {strange[0].node!r}, "
                f"which is none of {', '.join(nodes) or '(no nodes)'}"
            )
        return {node: [task for task in self._tasks if task.node in (None, node)] for node in nodes}

    def report_step(self, step: F, node: str | Node | None = None, interval: float = 1.0) -> F:
        """Run `step` every `interval` seconds while the tasks of `node` run, and once after the last.

        The first call comes after one interval; the call after the last task is guaranteed. Without
        a node it is the current one, else every node.
        """
        self._check_open("a report step")
        call_style(step)
        if not (isinstance(interval, int | float) and math.isfinite(interval) and interval > 0):
            raise UsageError(f"interval={interval!r} cannot be: give seconds above 0")
        self.reporters.append(Reporter(step, node_name(node), float(interval)))
        return step

    def local_init(self, step: F, node: str | Node | None = None) -> F:
        """Run `step` once per node and run before all tasks of the node; also a decorator."""
        self._add_hook(self.local_inits, step, node)
        return step

    def local_exit(self, step: F, node: str | Node | None = None) -> F:
        """Run `step` once per node and run after all tasks of the node; also a decorator."""
        self._add_hook(self.local_exits, step, node)
        return step

    def problems(self) -> list[str]:
        """Return what is wrong with the group as a whole, as sentences; empty if nothing is."""
        if any(task.node is None for task in self._tasks):
            return []
        used = self.used_nodes()
        hooks: list[NodeHook] = [*self.reporters, *self.local_inits, *self.local_exits]
        idle = dict.fromkeys(hook.node for hook in hooks if hook.node is not None and hook.node not in used)
        return [
            f"group {self.name!r} has a report step or hook on {node!r}, but no task there" for node in idle
        ]

    def freeze(self) -> None:
        """Allow no change from now on; called at the first run."""
        self.frozen = True
        for task in self._tasks:
            task.freeze()

    def _add_hook(self, hooks: list[NodeHook], step: Step, node: str | Node | None) -> None:
        self._check_open("a hook")
        call_style(step)
        hooks.append(NodeHook(step, node_name(node)))

    def _check_open(self, what: str) -> None:
        if self.frozen:
            raise NotAllowedNowError(
                f"group {self.name!r} was already used, so {what} cannot join: declare it before the job runs"
            )

    def _defined_before(self, task: Task) -> Task | None:
        """The task whose function was defined at the same place, in another cell, or before a run."""
        for one in self._tasks if len(task.steps) == 1 else ():
            if len(one.steps) == 1 and (one.name, one.node) == (task.name, task.node):
                old, new = (getattr(step, "__code__", None) for step in (one.steps[0], task.steps[0]))
                if old is None or new is None or old is new or "<locals>" in task.steps[0].__qualname__:
                    continue
                places = [(code.co_filename, code.co_firstlineno) for code in (old, new)]
                if self.frozen or places[0] == places[1] or places[0][0] != places[1][0]:
                    return one
        return None

    def _adopt_type(self, task: Task) -> None:
        if task.workspace_type is None:
            return
        if self._type not in (None, task.workspace_type):
            raise UsageError(
                f"task {task.full_name!r} wants a {task.workspace_type.value} workspace, but group "
                f"{self.name!r} is {self.workspace_type.value}: put it into a group of its own"
            )
        self._type = task.workspace_type

    def _unused(self, name: str) -> str:
        candidate, number = name, 0
        while candidate in self._names:
            number += 1
            candidate = f"{name}:{number}"
        return candidate


@dataclass(frozen=True)
class SessionGroup:
    """A group whose work is one call of `action(session)` in every process: saves and loads are such."""

    name: str
    action: Callable[[Session], Any]
