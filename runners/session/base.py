"""Common base of all sessions: place nodes, hold their workspaces, run task groups.

run(group)

1. Every process runs the group's tasks on the nodes that it hosts.
2. All processes meet and report the outcome: a failure on one is raised on all.
3. Outputs of tasks are bound to their current values, identical on all processes.
"""

from __future__ import annotations

import logging
import os
import threading
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torchrelay.errors import NotAllowedNowError, RelayError, UsageError, exit_code_of
from torchrelay.jobs import runtime
from torchrelay.jobs.cluster import Managed, NodePlace, selected
from torchrelay.jobs.job import SessionGroup, TaskGroup
from torchrelay.jobs.random import RandomStreams, current_seed
from torchrelay.jobs.runtime import phase
from torchrelay.jobs.session import Peers, Wire, is_agreed, together
from torchrelay.jobs.task import Task
from torchrelay.jobs.workspace import Workspace, WorkspaceType
from torchrelay.runners.distributed.loops import ALL, Loops, first_contradiction
from torchrelay.runners.session.context import Context
from torchrelay.runners.session.executor import ByNode, bind, chosen, decode_outputs, encode_outputs, run_node
from torchrelay.runners.session.metrics import reduce_metrics
from torchrelay.runners.session.run_state import LastMetrics, RunState
from torchrelay.runners.session.steps import Agreeing, FlagsHandle, TaskRanks, naming, task_failed
from torchrelay.runners.session.stop_requests import Interrupted

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("torchrelay")
GROUP_SECS = 7 * 24 * 3600.0
"""Longest wait of idle ranks for working ones in a group; the watcher finds lost ranks within seconds."""
FAILURE_SECS = 30.0
"""Time limit of tasks that run after a failure."""


class SessionBase(Managed):
    """Execute task groups; `with session:` makes it the current one and closes it at the end.

    A subclass defines the nodes, the hosted ones, their device, and how processes agree (`peers`,
    `agree_flags`, `group_of_ranks`). `run_state` is the position of the run that tasks see in `ctx`.
    """

    peers: Peers

    def __init__(self) -> None:
        self.run_state = RunState(seed=current_seed())
        self.loops = Loops()
        self.closed = False
        self.process = os.getpid()
        self._training = False
        self._workspaces: dict[str, Workspace] = {}

    # Defined by subclasses

    @property
    @abstractmethod
    def nodes(self) -> tuple[NodePlace, ...]:
        """All nodes of the job in rank order."""

    @property
    @abstractmethod
    def local_nodes(self) -> tuple[NodePlace, ...]:
        """The nodes that this process hosts."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device of the hosted nodes."""

    @abstractmethod
    def place(self, node_names: Sequence[str]) -> None:
        """Place the declared nodes of a job; raises UsageError if that is impossible."""

    @abstractmethod
    def agree_flags(self, flags: tuple[int, ...]) -> FlagsHandle:
        """Post small numbers without blocking; `wait` returns the maximum over all processes."""

    def agreement_of(self, ranks: Sequence[int]) -> Agreeing | None:
        """Return the agreement of some ranks, None for one; all processes call this in order."""
        return None

    def group_of_ranks(self, ranks: Sequence[int]) -> Any:
        """Return the process group of some ranks, None if there is none; called by all."""
        return None

    def wire(self) -> Wire | None:
        """Return the transport of bytes between processes, None for one; all call this in order."""
        return None

    def task_failed(self, what: str, error: BaseException) -> None:
        """Hook before the processes meet, so that none waits for one whose task has failed."""

    def _all_failed(self) -> None:
        """Hook after all processes know that a group has failed, before they raise."""

    def code_of(self, error: BaseException) -> int:
        """Return the exit code for an error, or that of another rank's failure if it caused it."""
        return exit_code_of(error)

    def prepare(self, group: TaskGroup) -> None:
        """Hook before a group runs."""

    def after_setup(self) -> None:
        """Hook after all blobs of hosted nodes exist, before loading and training."""

    # Nodes

    def workspace(self, node: str | None = None) -> Workspace:
        """Return the GLOBAL workspace of a hosted node (default: the only or first one).

        Raises UsageError for a node that this process does not host.
        """
        self._check_open()
        name = self._local(node).name
        return self._workspaces.setdefault(name, Workspace(name))

    def context(self, node: str | None = None) -> Context:
        """Return a `ctx` of a hosted node outside of tasks, with its GLOBAL workspace."""
        place = self._local(node)
        return Context(self.workspace(place.name), place, self, self.group_of_ranks(range(len(self.nodes))))

    def blob(self, name: str) -> Any:
        """Return the value of a blob on a hosted node: `total`, or `trainer_1:total` to select the node.

        A value of another process's node is available after it was loaded by that address. Raises UsageError
        for an unknown node or name, or if several hosted nodes have the name.
        """
        node, _, blob = name.rpartition(":")  # a blob's name has no colon, a node's may have
        if node:
            hosted = [place.name for place in self.local_nodes]
            loaded = [self.workspace(one) for one in hosted if name in self.workspace(one)]
            if node not in hosted and loaded:
                return loaded[0][name]
            return self.workspace(node)[blob]
        holders = [place.name for place in self.local_nodes if blob in self.workspace(place.name)]
        if len(holders) > 1:
            raise UsageError(
                f"{blob!r} exists on {', '.join(holders)}: select one, e.g. '{holders[0]}:{blob}'"
            )
        return self.workspace(holders[0] if holders else None)[blob]

    def _local(self, node: str | None) -> NodePlace:
        if node is None:
            return self.local_nodes[0]
        for place in self.local_nodes:
            if place.name == node:
                return place
        hosted = ", ".join(place.name for place in self.local_nodes)
        raise UsageError(f"node {node!r} is not in this process, which hosts {hosted}")

    # Random streams

    def streams(self, node: str) -> RandomStreams:
        """Return the current random streams of a hosted node."""
        self._local(node)
        return RandomStreams.capture()

    def set_streams(self, node: str, streams: RandomStreams) -> None:
        """Set the random streams of a hosted node."""
        self._local(node)
        streams.restore()

    @contextmanager
    def on_node(self, node: str) -> Iterator[None]:
        """Run the block with the random streams of `node`."""
        self._local(node)
        yield

    # Running

    def run(self, work: Any) -> Any:
        """Run a TaskGroup, Task, SessionGroup or callable on the nodes it names; blocks until done.

        A Task, or a callable as the step of one, runs alone in the GLOBAL workspaces and returns the handle
        of its result (`.fetch()`). A SessionGroup returns the result of its action, a TaskGroup None. Raises
        TaskFailedError if a step failed on any process, NotAllowedNowError after `close`.
        """
        self._check_open()
        if isinstance(work, SessionGroup):
            with phase.during(f"group {work.name}"):
                return work.action(self)
        if isinstance(work, TaskGroup):
            self._run_group(work)
            return None
        if not isinstance(work, Task):
            if not callable(work):
                raise UsageError(
                    f"a session cannot run {work!r}: expected a TaskGroup, a Task, "
                    "or a function that takes nothing, ws or ctx"
                )
            work = Task(work, group=TaskGroup(WorkspaceType.GLOBAL))
        # a group of its own: the task may run again later in another one
        alone = TaskGroup(work.workspace_type or WorkspaceType.GLOBAL, name=work.full_name)
        alone.add(work)
        self._run_group(alone)
        return work.result

    def run_on(self, group: TaskGroup, nodes: Collection[str]) -> None:
        """Run the tasks of a group on these nodes; all processes call this together."""
        self._run_group(group, nodes)

    @contextmanager
    def block(self, group: TaskGroup, task: Task) -> Iterator[Context]:
        """Run the block as the only task of a group: the body of a user's own loop.

        Exceptions become task failures on all processes. Raises UsageError in a process with several nodes,
        because the block cannot run once for each.
        """
        self._check_open()
        group.freeze()
        if len(self.local_nodes) > 1:
            raise UsageError(
                f"this process has {len(self.local_nodes)} nodes, but your own loop runs only once: "
                "use a Job with tasks, or a session of one node"
            )
        place = self.local_nodes[0]
        ranks = self._task_ranks(self._placed(group.name, [task]))[task]
        ctx = replace(self.context(place.name), group=ranks.group, ranks=ranks)
        cursor = self.run_state.cursor_of(place.name, group)
        if cursor is not None:
            cursor.begin(task, ctx.workspace, self.streams(place.name))
        runtime.begin_now()
        failures: list[BaseException] = []

        def end() -> Any:
            for failure in failures:
                if isinstance(failure, RelayError) or not isinstance(failure, (Exception, Interrupted)):
                    raise failure
                if isinstance(failure, Exception):
                    raise task_failed(place, task, task.steps[0], failure) from failure
            return self.loops.note(over=True) if self.peers.size > 1 else None

        with self._in_group(group):
            try:
                yield ctx
                if cursor is not None:
                    cursor.end(None)
            except BaseException as failure:
                failures.append(failure)
            self._check_loops(self._met(group, end))
        if failures:
            raise Interrupted

    @contextmanager
    def _in_group(self, group: TaskGroup) -> Iterator[None]:
        with phase.during(f"group {group.name} of epoch {self.run_state.epoch}"), self.loops.of_group():
            yield

    def _check_loops(self, notes: Sequence[Any]) -> None:
        """Raise UsageError on all processes if some ran other loops than others."""
        if self.peers.size > 1 and (found := first_contradiction(notes)) is not None:
            self._all_failed()
            raise UsageError(found)

    def _run_group(self, group: TaskGroup, nodes: Collection[str] | None = None) -> None:
        """Run a group on the hosted nodes, meet the other processes, bind the outputs."""
        group.freeze()
        self.prepare(group)
        tasks = group.tasks()
        by_node = group.tasks_by_node([place.name for place in self.nodes])
        ranks = self._task_ranks(self._placed(group.name, tasks))
        own: ByNode = {}
        interrupted: list[str] = []

        def work() -> Any:
            for place in self.local_nodes:
                if nodes is not None and place.name not in nodes:
                    continue
                try:
                    with self.on_node(place.name):
                        ctx = self.context(place.name)
                        own[place.name] = run_node(group, chosen(by_node[place.name], ctx), ctx, ranks)
                except Interrupted:  # so are all processes, at the same step: they meet as usual
                    interrupted.append(place.name)
            return [encode_outputs(tasks, own), self.loops.note(over=True)] if self.peers.size > 1 else None

        with self._in_group(group):
            results = self._met(group, work)
        if self.peers.size > 1:
            outputs, notes = zip(*results, strict=True)
            self._check_loops(notes)
            own = {**decode_outputs(tasks, outputs), **own}
        if interrupted:
            raise Interrupted
        bind(tasks, own)

    def _met(self, group: TaskGroup, work: Callable[[], Any]) -> list[Any]:
        """Work and meet the other processes; a failure is announced before, and brings all in step."""
        name = f"group {group.name}"

        def announced() -> Any:
            try:
                with self.loops.of_tasks():
                    return work()
            except BaseException as error:
                if self.run_state.crashed is not None:
                    self.run_state.crashed(error)
                self.task_failed(name, error)
                raise

        try:
            return together(self.peers, name, announced, deadline_secs=GROUP_SECS)
        except Exception as error:
            if is_agreed(error):
                self._all_failed()
            raise

    def _placed(self, name: str, tasks: Sequence[Task]) -> dict[Task, list[int]]:
        """Return the ranks of each task. User functions are called on all ranks, and must agree."""

        def place() -> list[list[int]]:
            found = []
            for task in tasks:
                with naming(f"on= of task {task.full_name!r}", self.local_nodes[0]):
                    places = [one for one in self.nodes if task.node in (None, one.name)]
                    found.append([one.rank for one in places if selected(task.on, one)])
            return found

        if self.peers.size == 1 or not any(callable(task.on) for task in tasks):
            return dict(zip(tasks, place(), strict=True))
        choices = together(self.peers, f"places of group {name}", place)
        for rank, other in enumerate(choices):
            for task, here, there in zip(tasks, choices[0], other, strict=True):
                if here != there:
                    raise UsageError(
                        f"on= of task {task.full_name!r} returned ranks {here} on rank 0, but {there} on "
                        f"rank {rank}: it must return the same on all ranks, from its argument only"
                    )
        return dict(zip(tasks, choices[0], strict=True))

    def _task_ranks(self, placed: Mapping[Task, list[int]]) -> dict[Task, TaskRanks]:
        """Return the roles of the ranks of each task, for communication inside of it."""
        placed = {task: ranks for task, ranks in placed.items() if not task.concurrent}
        everyone = len(self.nodes)
        # Tasks of single nodes with the same steps have a common counted loop.
        alike: dict[Any, set[int]] = {}
        keys: dict[Task, Any] = {}
        stretch = 0
        for task, ranks in placed.items():
            stretch += len(ranks) == everyone  # all ranks pass this task before later ones
            steps, turn = tuple(getattr(step, "__code__", id(step)) for step in task.steps), 0
            while not alike.setdefault(key := (stretch, steps, turn), set()).isdisjoint(ranks):
                turn += 1  # these ranks already run such a task: this is their next one
            keys[task] = key
            alike[key].update(ranks)
        found: dict[Task, TaskRanks] = {}
        for task, ranks in placed.items():
            if ranks:
                every = self.peers.size == 1 or len(ranks) == everyone
                found[task] = TaskRanks(
                    self.group_of_ranks(ranks),
                    None if every else self.agreement_of(ranks),
                    every=every,
                    counting=every or len(alike[keys[task]]) == everyone,
                    among=ALL if every else ",".join(map(str, ranks)),
                )
        return found

    def run_on_failure(self, group: TaskGroup, exit_code: int) -> None:
        """Run the tasks of `group` that run after a failure, 30 s at most, without other processes.

        Their errors are logged: the earlier failure counts.
        """

        def run() -> None:
            by_node = group.tasks_by_node([place.name for place in self.nodes])
            for place in self.local_nodes:
                try:
                    with self.on_node(place.name):
                        ctx = Context(self.workspace(place.name), place, self, concurrent=True)
                        run_node(group, chosen(by_node[place.name], ctx, after_failure=True), ctx)
                except Exception as error:
                    logger.warning("a task after the failure failed too: %s", error)

        self.run_state.exit_code = exit_code
        thread = threading.Thread(target=run, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is shutting down
            logger.warning("tasks of %s after the failure did not run: the program has ended", group.name)
            return
        thread.join(FAILURE_SECS)
        if thread.is_alive():
            logger.warning("tasks of %s after the failure did not finish in %g s", group.name, FAILURE_SECS)

    # The run

    def begin(self, state: RunState) -> None:
        """Start a run, whose `state` is seen in `ctx`. Raises NotAllowedNowError during another run."""
        self._check_open()
        check_process(self)
        if self._training:
            raise NotAllowedNowError("this session is already training: wait for the other train call")
        self._training, self.run_state = True, state

    def end(self) -> None:
        """End the run; the session may be used again."""
        self._training = False

    def reduce_metrics(self) -> dict[str, float]:
        """Reduce what all nodes logged since the last call; all processes call this together."""
        state = self.run_state
        state.measured = reduce_metrics(self.peers, [state.log_of(place.name) for place in self.local_nodes])
        state.metrics = LastMetrics({**state.metrics, **state.measured})  # others keep their last value
        return state.measured

    # The end

    def close(self) -> None:
        """Release all workspaces; later calls do nothing, other methods raise NotAllowedNowError."""
        self.closed = True
        self._workspaces.clear()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            super().__exit__(kind, error, trace)
        finally:
            self.close()

    def _check_open(self) -> None:
        if self.closed:
            raise NotAllowedNowError(f"this {type(self).__name__} is closed: create a new one")


def is_forked(session: SessionBase) -> bool:
    """Return True if this process was forked off the session's process."""
    return session.process != os.getpid()


def check_process(session: SessionBase) -> None:
    """Raise NotAllowedNowError in a forked process, which must not write or wait for its parent."""
    if is_forked(session):
        raise NotAllowedNowError(
            f"this session belongs to process {session.process}, which forked this one: "
            "end a forked process with os._exit"
        )


@contextmanager
def holding(session: SessionBase, workspaces: dict[str, Workspace]) -> Iterator[None]:
    """Give the hosted nodes these workspaces while the block runs."""
    before, session._workspaces = session._workspaces, workspaces
    try:
        yield
    finally:
        session._workspaces = before
