"""Convert everything that a user may give as a stop condition."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any

import torch

from torchrelay.errors import UsageError
from torchrelay.jobs.blobs import call_style, invoke, is_stateful, step_name
from torchrelay.jobs.cluster import Node, check_blob_name, check_node_name
from torchrelay.jobs.stop import RULES, Rule, StopAnswer, StopCondition, free_name, function_settings
from torchrelay.jobs.task import TaskOutput
from torchrelay.records import dataclass

if TYPE_CHECKING:
    from torchrelay.jobs.job import Job

_FORMS = (
    "a stop condition (such as max_epochs(5)), a function of ctx, of ws or of nothing, a tensor with one "
    "element, an output of a task, the name of a blob, or an object with data_finished()"
)
SILENT = object()
_NO_ANSWERS = (str, bytes, list, tuple, dict, set)  # true if not empty, which is never intended


@dataclass(frozen=True)
class AskedValue:
    """Condition on the truth of a value, which is read on each node.

    `read` gets the `ctx` of a node; it returns SILENT if this node has no answer.
    """

    name: str
    read: Callable[[Any], Any]
    reason: str
    rule: Rule = field(default="any", init=False)
    limit: bool = field(default=False, init=False)
    settings: Mapping[str, Any] | None = None

    @property
    def blob(self) -> tuple[str, str | None] | None:
        """Name of the blob that is read, and its node (None: all nodes)."""
        return (self.read.blob, self.read.node) if isinstance(self.read, _BlobValue) else None

    def holds(self, saved: Mapping[str, Any]) -> bool:
        """Return True if a saved answer holds; answers of other Python versions cannot be compared."""
        mine = self.settings or {}
        return saved == mine or saved.get("python") != mine.get("python")

    def ask(self, ctx: Any) -> StopAnswer:
        """Evaluate the value; raises UsageError if it is neither true nor false."""
        value = self.read(ctx)
        if isinstance(value, StopAnswer):
            return value
        if value is SILENT:
            return StopAnswer(False)
        return StopAnswer(True, self.reason) if _truth(value, self.name) else StopAnswer(False)


@dataclass(frozen=True)
class Renamed:
    """A condition under another name, because its own name is taken in its job."""

    condition: Any
    name: str

    def __getattr__(self, name: str) -> Any:
        return getattr(self.condition, name)

    @property
    def rule(self) -> Rule:
        """That of the condition."""
        return self.condition.rule  # type: ignore[no-any-return]

    @property
    def limit(self) -> bool:
        """That of the condition."""
        return bool(self.condition.limit)

    def ask(self, ctx: Any) -> StopAnswer:
        """Ask the condition."""
        return self.condition.ask(ctx)  # type: ignore[no-any-return]


def condition_of(given: Any, job: Job | None = None) -> StopCondition:
    """Convert `given` to a stop condition with a unique name in `job`.

    A condition with state becomes a blob of the job (unless the user registered it). Raises UsageError, which
    lists the valid forms, for anything else.
    """
    condition = _as_condition(given)
    if job is None:
        return condition
    if is_stateful(condition) and not any(blob.source is condition for blob in job.blobs):
        # Its state is a blob, so that a resume restores it.
        blob_name = getattr(condition, "blob_name", None) or f"stop/{condition.name}"
        job.blobs.add({free_name(blob_name, set(job.blobs.names)): condition})
    known = job.stop_conditions
    if any(condition is one or condition is getattr(one, "condition", None) for one in known):
        raise UsageError(f"stop condition {condition.name!r} has already been added to the job")
    name = free_name(condition.name, {one.name for one in known})
    return condition if name == condition.name else Renamed(condition, name)


def _as_condition(given: Any) -> StopCondition:
    if _is_condition(given):
        return given  # type: ignore[no-any-return]
    if isinstance(given, TaskOutput):
        return AskedValue(
            f"output({given})",
            lambda ctx: given.fetch_all().get(ctx.workspace.node, SILENT),
            f"{given} is true",
        )
    if isinstance(given, str):  # `trainer_1:done`, or `done` on the current node, else on every node
        node, _, name = given.rpartition(":")
        current = Node.current(required=False)
        where = check_node_name(node) if node else (current.name if current else None)
        read = _BlobValue(check_blob_name(name), where)
        return AskedValue(f"blob({given})", read, f"blob {given!r} is true")
    if isinstance(given, torch.Tensor):
        if given.numel() != 1:
            raise UsageError(
                f"a tensor of shape {tuple(given.shape)} cannot be a stop condition: it needs one element; "
                "use a function, such as `lambda: done.all()`"
            )
        return AskedValue("tensor", lambda ctx: given, "the tensor given as stop condition is true")
    if not isinstance(given, type) and callable(getattr(given, "data_finished", None)):
        finished, kind = given.data_finished(), _kind(given)
        if not isinstance(finished, (bool, int)):
            return _as_condition(finished)
        return AskedValue(kind, lambda ctx: given.data_finished(), f"the data of {kind} is finished")
    if callable(given) and not isinstance(given, type):
        call_style(given)
        name = step_name(given) or "condition"
        return AskedValue(
            name,
            lambda ctx: invoke(given, ctx.workspace, ctx),
            f"{name} says so",
            settings=function_settings(given),
        )
    raise UsageError(f"{given!r:.80} is not a stop condition; expected {_FORMS}")


def _is_condition(given: Any) -> bool:
    if isinstance(given, type) or not callable(getattr(given, "ask", None)):
        return False
    missing = [name for name in ("name", "rule", "limit") if not hasattr(given, name)]
    if missing:
        raise UsageError(f"the stop condition {_kind(given)} has ask() but no {', '.join(missing)}")
    if given.rule not in RULES:
        raise UsageError(f"stop condition {given.name!r} has the rule {given.rule!r}, not {', '.join(RULES)}")
    return True


@dataclass(frozen=True)
class _BlobValue:
    blob: str
    node: str | None

    def __call__(self, ctx: Any) -> Any:
        workspace = ctx.workspace
        if self.node not in (None, workspace.node):
            return SILENT
        if self.blob in workspace:
            return workspace[self.blob]
        raise UsageError(
            f"the stop condition reads blob {self.blob!r}, which {workspace.node} does not have after the "
            f"epoch (it has {', '.join(workspace) or 'none'}): make it in the init group, or in each epoch"
        )


def _truth(value: Any, name: str) -> bool:
    if value is None:
        raise UsageError(f"stop condition {name!r} gave None: return True to stop or False to continue")
    if isinstance(value, _NO_ANSWERS):
        raise UsageError(f"stop condition {name!r} gave {value!r}, which is neither true nor false")
    try:
        return bool(value)
    except (RuntimeError, TypeError, ValueError) as error:
        raise UsageError(
            f"stop condition {name!r} gave a {_kind(value)} that is neither true nor false: {error}"
        ) from error


def _kind(given: object) -> str:
    return given.__name__ if isinstance(given, type) else type(given).__name__
