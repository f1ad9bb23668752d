"""Runs the tasks of one node of a group.

    local_init hooks
    tasks in the order of their declaration, concurrent ones in threads   | report steps, and once after
    local_exit hooks

The first failure wins: the node's other steps end, every thread is joined, no exit hook runs, and the
failure is raised. Random streams are left to the steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import field, replace
from functools import partial
from typing import Any

from torchrelay.errors import UsageError
from torchrelay.jobs import runtime
from torchrelay.jobs.cluster import selected
from torchrelay.jobs.job import NodeHook, Reporter, TaskGroup
from torchrelay.jobs.task import Task, TaskOutput
from torchrelay.jobs.workspace import Origin, Workspace, WorkspaceType
from torchrelay.records import dataclass
from torchrelay.runners.context import Context
from torchrelay.runners.ending.cursor import Cursor
from torchrelay.runners.ending.interruption import Interrupted
from torchrelay.runners.ending.requests import PREEMPT
from torchrelay.runners.instances import run_step, run_steps, run_task
from torchrelay.runners.reporters import reporting
from torchrelay.runners.siblings import Siblings
from torchrelay.runners.steps import TaskRanks

Outputs = dict[TaskOutput, Any]
"""The values of the outputs of the tasks that ran on one node, as of the end of the run."""


def run_node(
    group: TaskGroup, tasks: Sequence[Task], ctx: Context, ranks: Mapping[Task, TaskRanks] | None = None
) -> Outputs:
    """Run the group's `tasks` on one node; `ctx` has its GLOBAL workspace.

    `ranks` has the ranks that run each task.

    Raises what the first failing step became (a TaskFailedError, or the error of torchrelay that it
    raised), and UsageError when the workspace lacks a declared output at the end.
    """
    if not tasks:
        return {}
    siblings = Siblings()
    private = group.workspace_type is WorkspaceType.PRIVATE
    workspace = ctx.workspace.child() if private else ctx.workspace
    run = _NodeRun(group, tasks, replace(ctx, workspace=workspace, siblings=siblings), siblings, ranks or {})
    siblings.guarded(run.run)
    siblings.settle()
    return run.outputs()


def chosen(tasks: Iterable[Task], ctx: Context, *, after_failure: bool = False) -> list[Task]:
    """The tasks that run now at this place: by `on=`, by `every=` (in epochs), by `on_failure=`."""
    return [
        task
        for task in tasks
        if selected(task.on, ctx.place)
        and (ctx.epoch == 0 or ctx.epoch % task.every == 0)
        and (task.on_failure or not after_failure)
    ]


@dataclass
class _NodeRun:
    """One run of one node."""

    group: TaskGroup
    tasks: Sequence[Task]
    ctx: Context
    siblings: Siblings
    ranks: Mapping[Task, TaskRanks]
    results: dict[Task, Any] = field(default_factory=dict)

    def run(self) -> None:
        """Hooks around tasks; raises the first failure of this thread, others are with the siblings."""
        with self._creating(self.tasks):
            self._hooks(self.group.local_inits)
            with reporting(self._reporters(), self.siblings, self._report):
                self.siblings.guarded(self._run_tasks)
                self.siblings.join()
            self._hooks(self.group.local_exits)

    def outputs(self) -> Outputs:
        """The results of the tasks and their named outputs, read now."""
        found: Outputs = {}
        for task in self.tasks:
            found[task.result] = self.results.get(task)
            for output in task.outputs:
                found[output] = _read(output, str(output.name), self.ctx.workspace)
        return found

    def _run_tasks(self) -> None:
        cursor = self._cursor
        for task in self.tasks:
            self.siblings.check()
            if cursor is not None and cursor.skips(task):
                continue
            self._may_begin()
            if cursor is not None:
                cursor.begin(task, self.ctx.workspace, self.ctx.session.streams(self.ctx.node))
            runtime.begin_now()
            if task.concurrent:
                self.siblings.start(task.full_name, partial(self._run_concurrent, task))
            else:
                with self._creating([task]):
                    ranks = self.ranks.get(task, TaskRanks())
                    ctx = replace(self.ctx, group=ranks.group, ranks=ranks)
                    self.results[task] = run_task(task, ctx, self.siblings)
            if cursor is not None:
                cursor.end(self.results.get(task))

    @property
    def _cursor(self) -> Cursor | None:
        """What follows this node where the group is an epoch's."""
        return self.ctx.session.run_state.cursor_of(self.ctx.node, self.group)

    def _may_begin(self) -> None:
        """Between two tasks a process that is alone may leave; several come to their next step together."""
        state = self.ctx.session.run_state
        inside = self._cursor is not None and state.step_of(self.ctx.node) > 0
        if inside and self.ctx.session.peers.size == 1 and state.urgency() == PREEMPT:
            raise Interrupted

    def _run_concurrent(self, task: Task) -> None:
        self.ctx.enter_thread()
        self.results[task] = run_task(task, replace(self.ctx, concurrent=True, group=None), self.siblings)

    def _hooks(self, hooks: Iterable[NodeHook]) -> None:
        here = [hook for hook in hooks if hook.node in (None, self.ctx.node)]
        if here:
            runtime.begin_now()
        for hook in here:
            every = hook.node is None or self.ctx.session.peers.size == 1
            run_steps(
                [hook.step], replace(self.ctx, ranks=TaskRanks(every=every, counting=every)), self.siblings
            )

    def _reporters(self) -> Iterator[Reporter]:
        return (reporter for reporter in self.group.reporters if reporter.node in (None, self.ctx.node))

    def _report(self, step: Any) -> None:
        self.ctx.enter_thread()
        run_step(step, replace(self.ctx, concurrent=True, group=None))

    def _creating(self, tasks: Sequence[Task]) -> AbstractContextManager[None]:
        """Mark the names that these tasks create before the first epoch as state of the job.

        The mark belongs to the workspace, not to a thread: among concurrent tasks it is one for all.
        """
        outer = len(tasks) == len(self.tasks)
        shared = any(task.concurrent for task in self.tasks)
        if self.ctx.epoch or self.ctx.workspace.parent is not None or (shared and not outer):
            return nullcontext()
        return self.ctx.workspace.creating(origin_of(tasks))


def origin_of(tasks: Iterable[Task]) -> Origin:
    """What names that `tasks` create at the start belong to: their node alone, or all nodes alike."""
    placed = all(task.node is not None or task.on != "all" for task in tasks)
    return Origin.INIT_PLACED if placed else Origin.INIT_ALL


def _read(output: TaskOutput, name: str, workspace: Workspace) -> Any:
    if name not in workspace:
        raise UsageError(
            f"{output} does not exist on {workspace.node} at the end of the run: no step made it"
        )
    return workspace[name]
