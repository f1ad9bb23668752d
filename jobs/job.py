"""Jobs: what to run. A job does no input or output and starts no processes."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, overload

from torchrelay.errors import NotAllowedNowError, UsageError
from torchrelay.jobs.blobs import BlobRegistry
from torchrelay.jobs.cluster import Node
from torchrelay.jobs.context import Managed
from torchrelay.jobs.group import TaskGroup
from torchrelay.jobs.names import check_node_name
from torchrelay.jobs.placement import On
from torchrelay.jobs.task import Step, Task
from torchrelay.jobs.workspace import WorkspaceType

if TYPE_CHECKING:
    from torchrelay.jobs.stop import StopCondition

F = TypeVar("F", bound=Step)

MAX_NAME_BYTES = 255
"""Bytes of UTF-8 that the name of a job may have."""


class GroupDecorator:
    """Makes functions tasks of one group: `@job.epoch`, or `@job.epoch(on="rank0", every=2)`."""

    def __init__(self, group: TaskGroup) -> None:
        self._group = group

    @overload
    def __call__(self, step: F, /) -> F: ...

    @overload
    def __call__(self, /, *, on: On = "all", every: int = 1) -> Callable[[F], F]: ...

    def __call__(self, step: Any = None, /, *, on: On = "all", every: int = 1) -> Any:
        """Add a task with this step, on the current Node if there is one; returns the function."""
        return self._declare(step, on=on, every=every)

    def _declare(self, step: Any, **options: Any) -> Any:
        def declare(function: F) -> F:
            Task(function, group=self._group, **options)
            return function

        return declare if step is None else declare(step)


class ExitDecorator(GroupDecorator):
    """The decorator of the exit group, whose tasks may also run after a failure."""

    @overload
    def __call__(self, step: F, /) -> F: ...

    @overload
    def __call__(
        self, /, *, on: On = "all", every: int = 1, on_failure: bool = False
    ) -> Callable[[F], F]: ...

    def __call__(
        self, step: Any = None, /, *, on: On = "all", every: int = 1, on_failure: bool = False
    ) -> Any:
        """Add a task; with `on_failure=True` it runs after a failure too (30 s, no collectives)."""
        return self._declare(step, on=on, every=every, on_failure=on_failure)


class Job(Managed):
    """Five groups of tasks, the blobs that are its state, and the conditions that end it.

        setup     at every start                     init      at the first start only, creates values
        epoch     looped                             download  once after the last epoch
        exit      once at the very end

    `@job.epoch` makes a function a task of that group, `@job.epoch(on="rank0", every=2)` one of some nodes
    and epochs; `job.setup`, `job.init`, `job.download` and `job.exit` do the same for theirs. The function
    takes `ctx` (a `Context`), `ws` or nothing.

    `with Job() as job:` makes the job and its epoch group current, so that plain tasks inside join
    the epoch group; `with job.init_group:` and its siblings redirect. `job.blobs` is the registry of
    the blobs: call it to add some, iterate it to see them. `stop_conditions` are what `stop_when` takes.
    Of the other nodes than `nodes_to_checkpoint` nothing is saved. A resume runs init there (of ranks on
    all, as its tasks may communicate) and gives them the registered blobs that are replicated; all else,
    random streams too, begins as in a new run.
    Raises UsageError for a bad name; everything else is checked by `check`.
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
        self._nodes_to_checkpoint = _node_names(nodes_to_checkpoint)
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
        """The five groups by name, in the order in which a fresh run comes to them."""
        return {
            "setup": self.setup_group,
            "init": self.init_group,
            "epoch": self.epoch_group,
            "download": self.download_group,
            "exit": self.exit_group,
        }

    def stop_when(self, *conditions: Any) -> None:
        """Add stop conditions; the job ends when any of them says so after an epoch."""
        for condition in conditions:
            self.add_stop_condition(condition)

    def add_stop_condition(self, condition: Any) -> StopCondition:
        """Add a stop condition and return it.

        It may be a StopCondition, a callable, a tensor, a TaskOutput, the name of a blob, or an object
        with a `data_finished` output. Once the job has run, a limit such as `max_epochs(9)` takes the place
        of the one before: a cell of a notebook was run again. Raises UsageError for anything else,
        NotAllowedNowError once the job is compiled.
        """
        from torchrelay.jobs.stop_forms import condition_of

        if self.compiled:
            raise NotAllowedNowError(f"{self} was already used: add stop conditions before it runs")
        names = [one.name for one in self.stop_conditions]
        if self.epoch_group.frozen and getattr(condition, "limit", False) and condition.name in names:
            self.stop_conditions[names.index(condition.name)] = condition
            return condition  # type: ignore[no-any-return]
        found = condition_of(condition, self)
        self.stop_conditions.append(found)
        return found

    def nodes(self) -> tuple[str, ...]:
        """Return the declared nodes in the order of their first use, those of the init group first."""
        groups = (self.init_group, *self.groups.values())
        return tuple(dict.fromkeys(node for group in groups for node in group.used_nodes()))

    def nodes_to_checkpoint(self) -> tuple[str, ...]:
        """Return the nodes as given, else those of the init group, else all declared, as in Caffe2.

        A run saves the nodes that were given alone, and without them every node of its session.
        """
        return self._nodes_to_checkpoint or self.init_group.used_nodes() or self.nodes()

    def saved_among(self, nodes: Iterable[str]) -> tuple[str, ...]:
        """Return the nodes of a session that a run saves: `nodes_to_checkpoint` as given, else all."""
        return self._nodes_to_checkpoint or tuple(nodes)

    def compile(self, session_class: type | None = None) -> Job:
        """Check the job, fix its groups, and return it; doing so again changes nothing.

        `session_class` is accepted and not needed: a job runs in any session.
        """
        if not self.compiled:
            self.check()
            for group in self.groups.values():
                group.freeze()
            self.compiled = True
        return self

    def check(self) -> None:
        """Raise UsageError that lists everything that keeps this job from running."""
        problems = [*self._own_problems(), *(p for group in self.groups.values() for p in group.problems())]
        if problems:
            numbered = "; ".join(f"({number}) {problem}" for number, problem in enumerate(problems, 1))
            raise UsageError(f"job {self.name or 'without a name'!r} cannot run: {numbered}")

    def _own_problems(self) -> list[str]:
        problems = []
        if not self.epoch_group.num_registered_tasks():
            problems.append("the epoch group has no task: add one with @job.epoch")
        if not self.stop_conditions:
            problems.append(
                "there is no stop condition, so it would never end: add job.stop_when(max_epochs(5)) or so"
            )
        nodes = self._nodes_to_checkpoint
        if nodes is not None and not nodes:
            problems.append("nodes_to_checkpoint is empty: name at least one node, or leave it out")
        twice = dict.fromkeys(node for node in nodes or () if (nodes or ()).count(node) > 1)
        if twice:
            problems.append(f"nodes_to_checkpoint has {', '.join(twice)} more than once: name each node once")
        return problems


def _node_names(nodes: Iterable[str | Node] | None) -> tuple[str, ...] | None:
    if nodes is None:
        return None
    if isinstance(nodes, str):
        raise UsageError(f"nodes_to_checkpoint={nodes!r} is one str: give a list of node names")
    return tuple(check_node_name(node.name if isinstance(node, Node) else node) for node in nodes)


def _checked_name(name: str | None) -> str | None:
    if name is None:
        return None
    printable = isinstance(name, str) and not any(unicodedata.category(c) in ("Cc", "Cs") for c in name)
    if printable and name.strip() and len(name.encode()) <= MAX_NAME_BYTES:
        return name
    raise UsageError(
        f"{name!r} cannot be the name of a job: use up to {MAX_NAME_BYTES} bytes of printable text"
    )
