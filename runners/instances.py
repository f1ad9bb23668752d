"""One task on one node: its hooks around its steps, in one or several parallel instances."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from torchrelay.jobs.blobs import Step, invoke
from torchrelay.jobs.task import Task
from torchrelay.runners.context import Context
from torchrelay.runners.siblings import Siblings, task_failed


def run_task(task: Task, ctx: Context, siblings: Siblings) -> Any:
    """Run a task; returns what its last step returned, for several instances a list of that.

    task_init, then per instance instance_init, steps, instance_exit, then task_exit. Raises what the
    first failing step became; the instances are joined before.
    """
    run_steps(task.task_init, ctx, siblings, task)
    result = _body(task, ctx, siblings) if task.num_instances == 1 else _bodies(task, ctx)
    run_steps(task.task_exit, ctx, siblings, task)
    return result


def _body(task: Task, ctx: Context, siblings: Siblings) -> Any:
    run_steps(task.instance_init, ctx, siblings, task)
    result = run_steps(task.steps, ctx, siblings, task)
    run_steps(task.instance_exit, ctx, siblings, task)
    return result


def _bodies(task: Task, ctx: Context) -> list[Any]:
    """Instances fail together, whatever else runs on the node: their siblings are their own."""
    instances = Siblings(ctx.siblings)
    results: list[Any] = [None] * task.num_instances

    def body(index: int) -> None:
        workspace = ctx.workspace.child()
        inside = replace(
            ctx, workspace=workspace, group=None, concurrent=True, instance=index, siblings=instances
        )
        inside.enter_thread()
        results[index] = _body(task, inside, instances)

    for index in range(task.num_instances):
        instances.start(f"{task.full_name}[{index}]", partial(body, index))
    instances.settle()
    return results


def run_steps(steps: Iterable[Step], ctx: Context, siblings: Siblings, task: Task | None = None) -> Any:
    """Run steps one after another and return what the last one returned; none runs after a failure."""
    result = None
    for step in steps:
        siblings.check()
        result = run_step(step, ctx, task)
    return result


def run_step(step: Step, ctx: Context, task: Task | None = None) -> Any:
    """Call a step with what it takes; what it raises becomes an error that names node, task and step."""
    try:
        return invoke(step, ctx.workspace, ctx)
    except Exception as error:
        failed = task_failed(ctx.place, task, step, error)
        if failed is error:
            raise
        try:
            raise failed from error
        finally:
            del failed  # its traceback refers to this frame
