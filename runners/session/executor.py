"""Run the tasks of one node: instances, hooks, report steps, and outputs for other nodes.

    local_init hooks
    tasks in the order of declaration, concurrent ones in threads   | report steps, and once afterwards
    local_exit hooks

The first failure wins: other steps of the node are ended, all threads joined, exit hooks skipped, and the
failure is raised. Random streams are not touched here.
"""

from __future__ import annotations

import base64
import ctypes
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torchrelay.checkpoint.format.values import decode, encode
from torchrelay.errors import BlobError, UsageError
from torchrelay.jobs import runtime
from torchrelay.jobs.blobs import Step, invoke
from torchrelay.jobs.cluster import selected
from torchrelay.jobs.job import NodeHook, Reporter, TaskGroup
from torchrelay.jobs.task import NotHere, Task, TaskOutput
from torchrelay.jobs.workspace import Origin, WorkspaceType
from torchrelay.records import Json, dataclass
from torchrelay.runners.session.context import Context
from torchrelay.runners.session.steps import Siblings, TaskRanks, task_failed
from torchrelay.runners.session.stop_requests import PREEMPT, Interrupted

if TYPE_CHECKING:
    from torch import Tensor


def run_task(task: Task, ctx: Context, siblings: Siblings) -> Any:
    """Run a task; returns the result of its last step, or a list of these for several instances.

    Order: task_init, per instance (instance_init, steps, instance_exit), task_exit. Instances run in threads;
    they fail together, and all are joined before the error of the first failing step is raised.
    """

    def body(ctx: Context, siblings: Siblings) -> Any:
        run_steps(task.instance_init, ctx, siblings, task)
        result = run_steps(task.steps, ctx, siblings, task)
        run_steps(task.instance_exit, ctx, siblings, task)
        return result

    def instance(index: int) -> None:
        workspace = ctx.workspace.child()
        inside = replace(
            ctx, workspace=workspace, group=None, concurrent=True, instance=index, siblings=instances
        )
        inside.enter_thread()
        results[index] = body(inside, instances)

    run_steps(task.task_init, ctx, siblings, task)
    if task.num_instances == 1:
        result = body(ctx, siblings)
    else:
        instances, results = Siblings(ctx.siblings), [None] * task.num_instances
        for index in range(task.num_instances):
            instances.start(f"{task.full_name}[{index}]", partial(instance, index))
        instances.settle()
        result = results
    run_steps(task.task_exit, ctx, siblings, task)
    return result


def run_steps(steps: Iterable[Step], ctx: Context, siblings: Siblings, task: Task | None = None) -> Any:
    """Run steps in order and return the result of the last; none runs after a failure."""
    result = None
    for step in steps:
        siblings.check()
        result = run_step(step, ctx, task)
    return result


def run_step(step: Step, ctx: Context, task: Task | None = None) -> Any:
    """Call a step with its arguments; an exception becomes an error naming node, task and step."""
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


@contextmanager
def reporting(
    reporters: Iterable[Reporter], siblings: Siblings, call: Callable[[Step], object]
) -> Iterator[None]:
    """Run each reporter in a thread while the block runs.

    The block must end after everything that is reported on, including threads. Then each reporter is called
    once more, also after a failure, and joined. A reporter that fails is not called again.
    """
    ended = threading.Event()

    def report(reporter: Reporter) -> None:
        while not ended.wait(reporter.interval):
            call(reporter.step)
        call(reporter.step)  # the last call always begins after the end of the block

    threads = [
        threading.Thread(target=siblings.guarded, args=(partial(report, one),), daemon=True)
        for one in reporters
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def run_node(
    group: TaskGroup, tasks: Sequence[Task], ctx: Context, ranks: Mapping[Task, TaskRanks] | None = None
) -> dict[TaskOutput, Any]:
    """Run the group's `tasks` on one node; `ctx` has its GLOBAL workspace, `ranks` the ranks of each task.

    Returns the outputs. Raises the error of the first failing step (TaskFailedError, or torchrelay's own
    error), and UsageError if a declared output is missing at the end.
    """
    if not tasks:
        return {}
    siblings = Siblings()
    private = group.workspace_type is WorkspaceType.PRIVATE
    workspace = ctx.workspace.child() if private else ctx.workspace
    run = _NodeRun(group, tasks, replace(ctx, workspace=workspace, siblings=siblings), siblings, ranks or {})
    siblings.guarded(run.run)
    siblings.settle()
    found: dict[TaskOutput, Any] = {}
    for task in tasks:
        found[task.result] = run.results.get(task)
        for output in task.outputs:
            if str(output.name) not in workspace:
                raise UsageError(
                    f"{output} does not exist on {workspace.node} at the end of the run: no step set it"
                )
            found[output] = workspace[str(output.name)]
    return found


def chosen(tasks: Iterable[Task], ctx: Context, *, after_failure: bool = False) -> list[Task]:
    """Return the tasks that run now and here, by `on=`, `every=` (in epochs) and `on_failure=`."""
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
        """Run hooks and tasks; raises the first failure of this thread, siblings hold others."""
        with self._creating(self.tasks):
            self._hooks(self.group.local_inits)
            here = [one for one in self.group.reporters if one.node in (None, self.ctx.node)]
            with reporting(here, self.siblings, self._report):
                self.siblings.guarded(self._run_tasks)
                self.siblings.join()
            self._hooks(self.group.local_exits)

    def _run_tasks(self) -> None:
        session, node = self.ctx.session, self.ctx.node
        state = session.run_state
        cursor = state.cursor_of(node, self.group)
        for task in self.tasks:
            self.siblings.check()
            if cursor is not None:
                if cursor.skips(task):
                    continue
                # a single process stops between two tasks, several at their next step
                if session.peers.size == 1 and state.step_of(node) > 0 and state.urgency() == PREEMPT:
                    raise Interrupted
                cursor.begin(task, self.ctx.workspace, session.streams(node))
            runtime.begin_now()
            if task.concurrent:

                def run(task: Task = task) -> None:
                    self.ctx.enter_thread()
                    ctx = replace(self.ctx, concurrent=True, group=None)
                    self.results[task] = run_task(task, ctx, self.siblings)

                self.siblings.start(task.full_name, run)
            else:
                with self._creating([task]):
                    ranks = self.ranks.get(task, TaskRanks())
                    ctx = replace(self.ctx, group=ranks.group, ranks=ranks)
                    self.results[task] = run_task(task, ctx, self.siblings)
            if cursor is not None:
                cursor.end(self.results.get(task))

    def _hooks(self, hooks: Iterable[NodeHook]) -> None:
        here = [hook for hook in hooks if hook.node in (None, self.ctx.node)]
        if here:
            runtime.begin_now()
        for hook in here:
            every = hook.node is None or self.ctx.session.peers.size == 1
            run_steps(
                [hook.step], replace(self.ctx, ranks=TaskRanks(every=every, counting=every)), self.siblings
            )

    def _report(self, step: Any) -> None:
        self.ctx.enter_thread()
        run_step(step, replace(self.ctx, concurrent=True, group=None))

    def _creating(self, tasks: Sequence[Task]) -> AbstractContextManager[None]:
        """Mark names that these tasks create before the first epoch as state of their node, or of all."""
        outer = len(tasks) == len(self.tasks)
        shared = any(task.concurrent for task in self.tasks)
        if self.ctx.epoch or self.ctx.workspace.parent is not None or (shared and not outer):
            return nullcontext()
        placed = all(task.node is not None or task.on != "all" for task in tasks)
        return self.ctx.workspace.creating(Origin.INIT_PLACED if placed else Origin.INIT_ALL)


LIMIT_BYTES = 1 << 20
"""Largest JSON size of an output that is sent to all processes."""
ByNode = dict[str, dict[TaskOutput, Any]]


def outputs_of(tasks: Sequence[Task]) -> Iterator[TaskOutput]:
    """Yield all outputs of a group's tasks, in the same order on every process."""
    for task in tasks:
        yield task.result
        yield from task.outputs


def encode_outputs(tasks: Sequence[Task], own: ByNode) -> Json:
    """Encode the outputs of this process's nodes as JSON, by node and number of the output."""
    numbers = {output: str(number) for number, output in enumerate(outputs_of(tasks))}
    return {
        node: {numbers[output]: encode_output(output, value, node) for output, value in values.items()}
        for node, values in own.items()
    }


def decode_outputs(tasks: Sequence[Task], encoded: Sequence[Json]) -> ByNode:
    """Decode the outputs of all nodes from all processes, in rank order."""
    outputs = list(outputs_of(tasks))
    return {
        node: {outputs[int(number)]: decode_output(json) for number, json in values.items()}
        for process in encoded
        for node, values in process.items()
    }


def bind(tasks: Sequence[Task], by_node: Mapping[str, Mapping[TaskOutput, Any]]) -> None:
    """Set the values of all outputs of the tasks at the end of this run."""
    for output in outputs_of(tasks):
        output.bind({node: values[output] for node, values in by_node.items() if output in values})


def encode_output(output: TaskOutput, value: Any, node: str) -> Json:
    """Encode a value, a tensor, or the reason why it stays on its node."""
    try:
        content = encode(value, str(output), tensor=_tensor_json)
    except BlobError as error:
        return {"stays": f"{output} stays on {node}: {error}"}
    if len(json.dumps(content)) > LIMIT_BYTES:
        return {"stays": f"{output} stays on {node}: outputs above {LIMIT_BYTES} bytes are not sent"}
    return {"value": content}


def decode_output(encoded: Json) -> Any:
    """Return the value, or NotHere with the reason."""
    return NotHere(encoded["stays"]) if "stays" in encoded else decode(encoded["value"], tensor=_tensor_of)


def _tensor_json(path: str, tensor: Tensor) -> Json:
    import torch

    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        raise BlobError(f"{path} is a {type(tensor).__name__}: only plain dense tensors are sent")
    if tensor.nbytes > LIMIT_BYTES:
        raise BlobError(f"{path} has {tensor.nbytes} bytes: outputs above {LIMIT_BYTES} bytes are not sent")
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    data = ctypes.string_at(plain.data_ptr(), plain.nbytes) if plain.nbytes else b""
    dtype = str(plain.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": list(plain.shape), "data": base64.b64encode(data).decode()}


def _tensor_of(encoded: Json) -> Tensor:
    import torch

    dtype, data = getattr(torch, encoded["dtype"]), bytearray(base64.b64decode(encoded["data"]))
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(encoded["shape"])
