"""Jobs and groups of tasks. A job does no I/O and starts no processes."""

from __future__ import annotations

import logging
import math
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, count
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, overload

from torchrelay.errors import NotAllowedNowError, UsageError
from torchrelay.jobs.blobs import BlobRegistry, Step, call_style
from torchrelay.jobs.cluster import Managed, Node, On, check_node_name, node_name
from torchrelay.jobs.session import Session
from torchrelay.jobs.task import Task
from torchrelay.jobs.workspace import WorkspaceType, workspace_type_of
from torchrelay.records import dataclass

if TYPE_CHECKING:
    from torchrelay.jobs.stop import StopCondition


F = TypeVar("F", bound=Step)
logger = logging.getLogger("torchrelay")


@dataclass(frozen=True)
class NodeHook:
    """A step that runs once per node and run, before or after its tasks; node None means every node."""

    step: Step
    node: str | None


@dataclass(frozen=True)
class Reporter(NodeHook):
    """A step that runs every `interval` seconds while a node's tasks run, and once after them."""

    interval: float


class TaskGroup(Managed):
    """Tasks that a session runs together: nodes in parallel, tasks of one node in order.

    A group can run several times, but cannot change after its first run.

    Args:
        workspace_type: "global" or "private"; by default that of the first task that has one, else private.
            All tasks must agree.
        name: The name in messages.

    Example:
        with TaskGroup(WorkspaceType.GLOBAL) as group:
            Task(step=load_data, outputs=["rows"])
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
        """Workspace type in which the tasks create names."""
        return self._type or WorkspaceType.PRIVATE

    def add(self, task: Task) -> Task:
        """Add a task and return it; a name that exists in the group gets a suffix `:1`, `:2`, ...

        A function that is defined again, as by rerunning a notebook cell, replaces the earlier one, also
        after a run. Raises NotAllowedNowError for other tasks after the first run, UsageError for another
        workspace type.
        """
        before = self._defined_before(task)
        if before is None:
            self._check_open(f"task {task.full_name!r}")
        if task.workspace_type is not None:
            if self._type not in (None, task.workspace_type):
                raise UsageError(
                    f"task {task.full_name!r} wants a {task.workspace_type.value} workspace, but group "
                    f"{self.name!r} is {self.workspace_type.value}: put it in another group"
                )
            self._type = task.workspace_type
        if before is not None:
            logger.warning("%s: %r is defined again and replaces the earlier one", self.name, task.name)
            task.full_name = before.full_name
            self._tasks[self._tasks.index(before)] = task
            return task
        names = chain([task.full_name], (f"{task.full_name}:{number}" for number in count(1)))
        task.full_name = next(name for name in names if name not in self._names)
        self._names.add(task.full_name)
        self._tasks.append(task)
        return task

    def tasks(self) -> tuple[Task, ...]:
        """Return the tasks in declaration order."""
        return tuple(self._tasks)

    def num_registered_tasks(self) -> int:
        """Return the number of tasks."""
        return len(self._tasks)

    def used_nodes(self) -> tuple[str, ...]:
        """Return the names of the nodes that have tasks, in the order of their first use."""
        return tuple(dict.fromkeys(task.node for task in self._tasks if task.node is not None))

    def tasks_by_node(self, nodes: Sequence[str]) -> dict[str, list[Task]]:
        """Return the tasks of each node in order: its own and those for every node.

        `on=` and `every=` are not evaluated. Raises UsageError for a task on a node not in `nodes`.
        """
        strange = [task for task in self._tasks if task.node is not None and task.node not in nodes]
        if strange:
            raise UsageError(
                f"task {strange[0].full_name!r} of {self.name!r} is placed on node {strange[0].node!r}, "
                f"expected one of {', '.join(nodes) or '(no nodes)'}"
            )
        return {node: [task for task in self._tasks if task.node in (None, node)] for node in nodes}

    def report_step(self, step: F, node: str | Node | None = None, interval: float = 1.0) -> F:
        """Run `step` every `interval` seconds while the tasks of `node` run, and once after the last.

        The first call is after one interval; the call after the last task is guaranteed.

        Args:
            step: What to call; it takes what steps take.
            node: The node; by default the current one, else every node.
            interval: Seconds between two calls.

        Returns:
            The step.

        Example:
            group.report_step(lambda ctx: print(ctx.step), interval=10.0)
        """
        self._check_open("a report step")
        call_style(step)
        if not (isinstance(interval, int | float) and math.isfinite(interval) and interval > 0):
            raise UsageError(f"invalid interval={interval!r}: expected seconds above 0")
        self.reporters.append(Reporter(step, node_name(node), float(interval)))
        return step

    def local_init(self, step: F, node: str | Node | None = None) -> F:
        """Run `step` once per node and run before all tasks of the node; also a decorator.

        Args:
            step: What to call; it takes what steps take.
            node: The node; by default the current one, else every node.

        Returns:
            The step.

        Example:
            @group.local_init
            def connect(ctx): ...
        """
        return self._add_hook(self.local_inits, step, node)

    def local_exit(self, step: F, node: str | Node | None = None) -> F:
        """Run `step` once per node and run after all tasks of the node; also a decorator.

        Args:
            step: What to call; it takes what steps take.
            node: The node; by default the current one, else every node.

        Returns:
            The step.

        Example:
            @group.local_exit
            def disconnect(ctx): ...
        """
        return self._add_hook(self.local_exits, step, node)

    def problems(self) -> list[str]:
        """Return the errors of the group as sentences; empty if there are none."""
        if any(task.node is None for task in self._tasks):
            return []
        used = self.used_nodes()
        hooks: list[NodeHook] = [*self.reporters, *self.local_inits, *self.local_exits]
        idle = dict.fromkeys(hook.node for hook in hooks if hook.node not in (None, *used))
        what = f"group {self.name!r} has a report step or hook on"
        return [f"{what} {node!r}, but no task there" for node in idle]

    def freeze(self) -> None:
        """Refuse further changes; called at the first run."""
        self.frozen = True
        for task in self._tasks:
            task.freeze()

    def _add_hook(self, hooks: list[NodeHook], step: F, node: str | Node | None) -> F:
        self._check_open("a hook")
        call_style(step)
        hooks.append(NodeHook(step, node_name(node)))
        return step

    def _check_open(self, what: str) -> None:
        if self.frozen:
            raise NotAllowedNowError(
                f"group {self.name!r} has already run, so {what} cannot be added: "
                "declare it before the job runs"
            )

    def _defined_before(self, task: Task) -> Task | None:
        """Return the task with an earlier definition of the same function, if any."""
        for one in self._tasks if len(task.steps) == 1 else ():
            if len(one.steps) == 1 and (one.name, one.node) == (task.name, task.node):
                old, new = (getattr(step, "__code__", None) for step in (one.steps[0], task.steps[0]))
                if old is None or new is None or old is new or "<locals>" in task.steps[0].__qualname__:
                    continue
                places = [(code.co_filename, code.co_firstlineno) for code in (old, new)]
                if self.frozen or places[0] == places[1] or places[0][0] != places[1][0]:
                    return one
        return None


@dataclass(frozen=True)
class SessionGroup:
    """A group that calls `action(session)` once in every process, such as a save or load."""

    name: str
    action: Callable[[Session], Any]


MAX_NAME_BYTES = 255
"""Longest job name in bytes of UTF-8."""


class GroupDecorator:
    """Decorator that adds a task to one group: `@job.epoch`, `@job.epoch(on="rank0", every=2)`."""

    def __init__(self, group: TaskGroup) -> None:
        self._group = group

    @overload
    def __call__(self, step: F, /) -> F: ...

    @overload
    def __call__(self, /, *, on: On = "all", every: int = 1) -> Callable[[F], F]: ...

    def __call__(self, step: Any = None, /, *, on: On = "all", every: int = 1) -> Any:
        """Add a task with this step, on the current Node if any; returns the function."""
        return self._declare(step, on=on, every=every)

    def _declare(self, step: Any, **options: Any) -> Any:
        def declare(function: F) -> F:
            Task(function, group=self._group, **options)
            return function

        return declare if step is None else declare(step)


class ExitDecorator(GroupDecorator):
    """Decorator of the exit group, whose tasks may also run after a failure."""

    @overload
    def __call__(self, step: F, /) -> F: ...

    @overload
    def __call__(
        self, /, *, on: On = "all", every: int = 1, on_failure: bool = False
    ) -> Callable[[F], F]: ...

    def __call__(
        self, step: Any = None, /, *, on: On = "all", every: int = 1, on_failure: bool = False
    ) -> Any:
        """Add a task; with `on_failure=True` it also runs after a failure (30 s, no collectives)."""
        return self._declare(step, on=on, every=every, on_failure=on_failure)


class Job(Managed):
    """A job: five groups of tasks, its state (blobs), and the conditions that end it.

        setup     at every launch                    init      at the first launch only, creates values
        epoch     looped                             download  once after the last epoch
        exit      once at the end

    `@job.epoch` adds a function as a task of that group, `@job.epoch(on="rank0", every=2)` only on some
    nodes and epochs; `job.setup`, `job.init`, `job.download` and `job.exit` do the same for their groups. The
    function takes `ctx` (a `Context`), `ws` or nothing.

    `with Job() as job:` makes the job and its epoch group current, so that tasks created inside join
    the epoch group; `with job.init_group:` and the others redirect. `job.blobs` is the registry of
    blobs: call it to add some, iterate over it to list them. `stop_conditions` are those of `stop_when`.

    Args:
        name: The name of the job; a run directory belongs to one name.
        blobs: What is saved, by name: modules, optimizers, loaders, tensors, values, or functions that make
            them in `setup`.
        setup_group: A group in place of a new one; likewise `init_group`, `epoch_group`, `download_group` and
            `exit_group`.
        nodes_to_checkpoint: The nodes to save; all by default. On a resume, other nodes get the replicated
            blobs, and begin everything else as in a new run: the init group runs on them (with ranks on all).
        stop_conditions: What `stop_when` takes.

    Raises:
        UsageError: The name or a blob is invalid; `check` finds everything else.

    Example:
        job = Job("hello", blobs=dict(model=model, optimizer=optimizer))
        job.stop_when(max_epochs(5))
    """

    def __init__(
        self,
        name: str | None = None,
        blobs: Mapping[str, Any] | None = None,
        *,
        setup_group: TaskGroup | None = None,
        init_group: TaskGroup | None = None,
        epoch_group: TaskGroup | None = None,
        download_group: TaskGroup | None = None,
        exit_group: TaskGroup | None = None,
        nodes_to_checkpoint: Iterable[str | Node] | None = None,
        stop_conditions: Iterable[Any] = (),
    ) -> None:
        self.name = _checked_name(name)
        self.setup_group = setup_group or TaskGroup(WorkspaceType.GLOBAL, "setup")
        self.init_group = init_group or TaskGroup(WorkspaceType.GLOBAL, "init")
        self.epoch_group = epoch_group or TaskGroup(name="epoch")
        self.download_group = download_group or TaskGroup(name="download")
        self.exit_group = exit_group or TaskGroup(name="exit")
        self.setup = GroupDecorator(self.setup_group)
        self.init = GroupDecorator(self.init_group)
        self.epoch = GroupDecorator(self.epoch_group)
        self.download = GroupDecorator(self.download_group)
        self.exit = ExitDecorator(self.exit_group)
        self.blobs = BlobRegistry()
        self.blobs.add(blobs)
        self.stop_conditions: list[StopCondition] = []
        self.compiled = False
        if isinstance(nodes_to_checkpoint, str):
            raise UsageError(
                f"nodes_to_checkpoint={nodes_to_checkpoint!r} is a str: expected a list of node names"
            )
        self._nodes_to_checkpoint: tuple[str, ...] | None = None
        if nodes_to_checkpoint is not None:
            names = (node.name if isinstance(node, Node) else node for node in nodes_to_checkpoint)
            self._nodes_to_checkpoint = tuple(map(check_node_name, names))
        self.stop_when(*stop_conditions)

    def __repr__(self) -> str:
        return f"Job({self.name!r})"

    def __enter__(self) -> Job:
        super().__enter__()
        self.epoch_group.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.epoch_group.__exit__(kind, error, trace)
        super().__exit__(kind, error, trace)

    @property
    def groups(self) -> dict[str, TaskGroup]:
        """The five groups by name, in the order of a new run."""
        names = ("setup", "init", "epoch", "download", "exit")
        return {name: getattr(self, f"{name}_group") for name in names}

    def stop_when(self, *conditions: Any) -> None:
        """Add stop conditions; the job ends when any of them is true after an epoch."""
        for condition in conditions:
            self.add_stop_condition(condition)

    def add_stop_condition(self, condition: Any) -> StopCondition:
        """Add a stop condition and return it.

        It may be a StopCondition, a callable, a tensor, a TaskOutput, the name of a blob, or an object
        with a `data_finished` output. After the job has run, a limit such as `max_epochs(9)` replaces the
        earlier one, as when a notebook cell is rerun. Raises UsageError for anything else,
        NotAllowedNowError once the job is compiled.
        """
        from torchrelay.jobs.stop import condition_of

        if self.compiled:
            raise NotAllowedNowError(f"{self} has already run: add stop conditions before it runs")
        names = [one.name for one in self.stop_conditions]
        if self.epoch_group.frozen and getattr(condition, "limit", False) and condition.name in names:
            self.stop_conditions[names.index(condition.name)] = condition
            return condition  # type: ignore[no-any-return]
        found = condition_of(condition, self)
        self.stop_conditions.append(found)
        return found

    def nodes(self) -> tuple[str, ...]:
        """Return the declared nodes in the order of their first use, beginning with the init group."""
        groups = (self.init_group, *self.groups.values())
        return tuple(dict.fromkeys(node for group in groups for node in group.used_nodes()))

    def nodes_to_checkpoint(self) -> tuple[str, ...]:
        """Return the given nodes, else those of the init group, else all declared nodes, as in Caffe2.

        A run saves only the given nodes, or every node of its session if none were given.
        """
        return self._nodes_to_checkpoint or self.init_group.used_nodes() or self.nodes()

    def saved_among(self, nodes: Iterable[str]) -> tuple[str, ...]:
        """Return the nodes of a session that a run saves: the given `nodes_to_checkpoint`, else all."""
        return self._nodes_to_checkpoint or tuple(nodes)

    def compile(self, session_class: type | None = None) -> Job:
        """Check the job, freeze its groups, and return it; repeated calls have no effect.

        `session_class` is accepted and ignored: a job runs in any session.
        """
        if not self.compiled:
            self.check()
            for group in self.groups.values():
                group.freeze()
            self.compiled = True
        return self

    def check(self) -> None:
        """Raise UsageError with all errors that keep this job from running."""
        problems = []
        if not self.epoch_group.num_registered_tasks():
            problems.append("the epoch group has no task: add one with @job.epoch")
        if not self.stop_conditions:
            problems.append(
                "it has no stop condition and would never end: add one such as job.stop_when(max_epochs(5))"
            )
        nodes = self._nodes_to_checkpoint
        if nodes is not None and not nodes:
            problems.append("nodes_to_checkpoint is empty: name at least one node")
        twice = dict.fromkeys(node for node in nodes or () if (nodes or ()).count(node) > 1)
        if twice:
            problems.append(f"nodes_to_checkpoint has {', '.join(twice)} more than once")
        problems += [problem for group in self.groups.values() for problem in group.problems()]
        if problems:
            numbered = "; ".join(f"({number}) {problem}" for number, problem in enumerate(problems, 1))
            raise UsageError(f"job {self.name or 'without a name'!r} cannot run: {numbered}")


def _checked_name(name: str | None) -> str | None:
    if name is None:
        return None
    printable = isinstance(name, str) and not any(unicodedata.category(c) in ("Cc", "Cs") for c in name)
    if printable and name.strip() and len(name.encode()) <= MAX_NAME_BYTES:
        return name
    raise UsageError(
        f"{name!r} cannot be the name of a job: use up to {MAX_NAME_BYTES} bytes of printable text"
    )
