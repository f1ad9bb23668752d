"""Stop conditions: the protocol, limits of a whole run, early stopping, and what else a user may give as one.

Limits come from the current program and the progress from the checkpoint: a larger limit continues a run that
had finished. This module imports no torch.
"""

from __future__ import annotations

import functools
import hashlib
import math
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass as python_dataclass
from datetime import timedelta
from types import CodeType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torchrelay.errors import MissingMetricError, UsageError
from torchrelay.jobs.cluster import Node, check_blob_name, check_node_name
from torchrelay.jobs.runtime import seconds_in, whole_number
from torchrelay.records import dataclass

if TYPE_CHECKING:
    from torchrelay.jobs.job import Job
    from torchrelay.jobs.workspace import Workspace


Rule = Literal["any", "all", "rank0"]
RULES = ("any", "all", "rank0")
_SHOWN = 3  # nodes named in a reason
_FORMS = (
    "a stop condition (such as max_epochs(5)), a function of ctx, of ws or of nothing, a tensor with one "
    "element, an output of a task, the name of a blob, or an object with data_finished()"
)
_NO_ANSWERS = (str, bytes, list, tuple, dict, set)  # true if not empty, which is never intended


@python_dataclass(frozen=True)
class StopAnswer:
    """Answer of a condition.

    Attributes:
        stop: Whether the run is to end.
        reason: Why; empty if it is not to end.

    Example:
        return StopAnswer(ctx.metrics["val/loss"] < 0.1, "the loss is below 0.1")
    """

    stop: bool
    reason: str = ""


class StopCondition(Protocol):
    """A condition that is evaluated on every node after every epoch.

    - `rule` combines the answers of the nodes: stop if "any" or "all" of them stop, or if the first node
      ("rank0") does.
    - `limit` conditions depend only on the position, so they are evaluated again on resume with the current
      arguments; for all others the saved answer holds. A limit with `steps` or `secs`, totals of the whole
      run, also ends the running epoch at its next step.
    - A condition with `state_dict` and `load_state_dict` becomes a blob of its job.
    - MissingMetricError means "not yet".
    - Optional `settings` are the JSON arguments of the condition: a saved answer that ended the run holds
      only for equal settings, or if `holds(settings)` returns True.
    """

    @property
    def name(self) -> str:
        """Name under which the answer is saved; unique in its job."""

    @property
    def rule(self) -> Rule:
        """Combination of the nodes' answers."""

    @property
    def limit(self) -> bool:
        """True if the answer depends only on the position."""

    def ask(self, ctx: Any) -> StopAnswer:
        """Return the answer of one node after an epoch and before its save; must not communicate.

        A limit is also asked about a saved position before anything is loaded, without a `workspace`.
        """


def combine(answers_by_node: Mapping[str, StopAnswer], rule: str) -> StopAnswer:
    """Combine the answers of nodes (in rank order); the reason has the nodes that stop unless all do."""
    if rule not in RULES:
        raise UsageError(f"{rule!r} is not a rule of a stop condition: use one of {', '.join(RULES)}")
    asked = dict(list(answers_by_node.items())[:1]) if rule == "rank0" else answers_by_node
    stopping = [node for node, answer in asked.items() if answer.stop]
    if not stopping or (rule == "all" and len(stopping) < len(asked)):
        return StopAnswer(False)
    reason, names, more = asked[stopping[0]].reason, ", ".join(stopping[:_SHOWN]), len(stopping) - _SHOWN
    names += f" and {more} more" if more > 0 else ""
    all_stop = reason and len(stopping) == len(answers_by_node)
    return StopAnswer(True, reason if all_stop else f"{reason} ({names})".lstrip())


def made_with(condition: Any) -> dict[str, Any] | None:
    """Return the settings that an answer is saved with; None if unknown."""
    found = getattr(condition, "settings", None)
    return dict(found) if isinstance(found, Mapping) else None


def verdict_holds(condition: Any, saved: Mapping[str, Any] | None) -> bool:
    """Return True if a saved answer that ended the run holds for the current condition."""
    today = made_with(condition)
    if saved is None or today is None:
        return True
    decides = getattr(condition, "holds", None)
    return bool(decides(saved)) if callable(decides) else saved == today


def function_settings(function: Any) -> dict[str, str] | None:
    """Fingerprint the code and plain values of a function; None if it has no Python code.

    The values are those of defaults, closures, partial arguments, a method's object, and globals named in the
    code. Fingerprints differ between Python versions.
    """
    seen = hashlib.sha256()
    while isinstance(function, functools.partial):
        seen.update(repr([_plain(one) for one in (*function.args, *function.keywords.items())]).encode())
        function = function.func
    owner = getattr(function, "__self__", None)
    if not hasattr(function, "__code__") and not hasattr(function, "__func__"):
        owner, function = function, vars(type(function)).get("__call__")
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType):
        return None
    names = _hash_code(code, seen)
    given = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items()]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # an empty cell
            given.append(cell.cell_contents)
    named = {name: function.__globals__.get(name) for name in sorted(names)}
    mine = sorted(vars(owner).items()) if owner is not None and hasattr(owner, "__dict__") else []
    seen.update(repr([_plain(one) for one in (*given, *named.items(), *mine)]).encode())
    return {"code": seen.hexdigest()[:32], "python": sys.implementation.cache_tag or ""}


def _hash_code(code: CodeType, seen: Any) -> set[str]:
    """Hash the code of a function and return the names it uses, including inner functions."""
    names = set(code.co_names)
    seen.update(code.co_code)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _hash_code(constant, seen)
        else:
            seen.update(repr(constant).encode())
    seen.update(repr(code.co_names).encode())
    return names


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_plain(one) for one in value)
    return value if value is None or type(value) in (bool, int, float, str) else type(value).__name__


def free_name(name: str, taken: set[str]) -> str:
    """Return `name`, or the first free one of name_2, name_3, ...; equal in all processes."""
    candidate, number = name, 1
    while candidate in taken:
        number += 1
        candidate = f"{name}_{number}"
    return candidate


SILENT = object()
"""What `read` of a condition returns if the node has no answer."""


@dataclass(frozen=True)
class AskedValue:
    """Condition on the truth of a value, which `read` gets from the `ctx` of each node.

    `epochs`, `steps` and `secs` are totals of a limit; `settings` fingerprint a function.
    """

    name: str
    read: Callable[[Any], Any]
    reason: str
    limit: bool = False
    epochs: int | None = None
    steps: int | None = None
    secs: float | None = None
    settings: Mapping[str, Any] | None = None
    rule: Rule = "any"
    blob: tuple[str, str | None] | None = None
    """The blob and node that `read` reads, which outlives the epoch."""

    def holds(self, saved: Mapping[str, Any]) -> bool:
        """Return True if a saved answer holds; answers of other Python versions cannot be compared."""
        mine = self.settings or {}
        return saved == mine or saved.get("python") != mine.get("python")

    def ask(self, ctx: Any) -> StopAnswer:
        """Evaluate the value; raises UsageError if it is neither true nor false."""
        value = self.read(ctx)
        if isinstance(value, StopAnswer):
            return value
        if value is None:
            returns = "return True to stop or False to continue"
            raise UsageError(f"stop condition {self.name!r} gave None: {returns}")
        if isinstance(value, _NO_ANSWERS):
            raise UsageError(f"stop condition {self.name!r} gave {value!r}, which is neither true nor false")
        try:
            stop = value is not SILENT and bool(value)
        except (RuntimeError, TypeError, ValueError) as error:
            raise UsageError(
                f"stop condition {self.name!r} gave a {_kind(value)} that is neither true nor false: {error}"
            ) from error
        return StopAnswer(stop, self.reason if stop else "")


def max_epochs(n: int) -> StopCondition:
    """Stop after `n` (>= 1) epochs of the run, including those of earlier launches."""
    whole_number("max_epochs", n)
    return AskedValue("max_epochs", lambda ctx: ctx.epoch >= n, f"{n} epochs are done", True, epochs=n)


def max_steps(n: int) -> StopCondition:
    """Stop after `n` steps of the run; the running epoch ends at that step and counts as finished."""
    whole_number("max_steps", n)
    return AskedValue("max_steps", lambda ctx: ctx.total_steps >= n, f"{n} steps are done", True, steps=n)


def max_time(limit: str | float | timedelta) -> StopCondition:
    """Stop after this running time, summed over launches.

    The running epoch ends at its next step and counts as finished.

    Args:
        limit: Seconds, "1h30m", "HH:MM:SS", "D-HH:MM:SS", or a timedelta.

    Raises:
        UsageError: The limit is none of these, or not above 0.
    """
    secs = seconds_in(limit)
    if secs is None or not math.isfinite(secs) or secs <= 0:
        forms = "seconds above 0, a text such as '1h30m' or '01:30:00', or a timedelta"
        raise UsageError(f"max_time is {forms}, not {limit!r:.80}")
    reason = f"{secs:g} s of running have passed"
    return AskedValue("max_time", lambda ctx: ctx.elapsed_secs >= secs, reason, True, secs=secs)


def epoch_limiter(job: Job, num_epochs: int) -> StopCondition:
    """Stop `job` after `num_epochs` epochs of all launches, asked on the current node (else on every node).

    A task of the init group creates a blob, in which one of the epoch group counts. It is saved for readers;
    the condition asks for the run's own epoch, also on resume from epochs saved without the limiter.

    Args:
        job: The job, to which the condition is added.
        num_epochs: Number of epochs, at least 1.

    Returns:
        The condition.

    Raises:
        UsageError: `num_epochs` is invalid.

    Example:
        epoch_limiter(job, num_epochs=5)
    """
    from torchrelay.jobs.task import Task

    epochs = whole_number("epoch_limiter's num_epochs", num_epochs)
    node = Node.current(required=False)
    counter = free_name("epoch_limiter", {condition.name for condition in job.stop_conditions})

    def begin(ws: Workspace) -> None:
        ws[counter] = 0

    def advance(ctx: Any) -> None:
        ctx.workspace[counter] = ctx.epoch

    Task(begin, name=f"begin_{counter}", group=job.init_group)
    Task(advance, name=f"advance_{counter}", group=job.epoch_group)

    def reached(ctx: Any) -> bool:
        ws = getattr(ctx, "workspace", None)  # None: a saved position that is not loaded yet
        return bool(ctx.epoch >= epochs) and (ws is None or node in (None, Node(ws.node)))

    condition = AskedValue(counter, reached, f"{epochs} epochs are done", True, epochs=epochs)
    job.add_stop_condition(condition)
    return condition


Mode = Literal["min", "max"]
_NOT_IN_BLOB_NAMES = re.compile(r"[:*?\[\]@.]")


class EarlyStopping:
    """Stop condition whose state (best value, measurements waited) is a blob that a resume restores.

    An epoch counts once, and only if it logged the metric.
    """

    rule: Rule = "any"
    limit = False
    shared_by_nodes = True  # emulated nodes share this object

    def __init__(self, metric: str, mode: Mode, patience: int, min_delta: float) -> None:
        self.metric, self.mode, self.patience, self.min_delta = metric, mode, patience, min_delta
        self.name = f"early_stopping({metric})"
        self.blob_name = f"early_stopping/{_NOT_IN_BLOB_NAMES.sub('_', metric)}"
        self.best: float | None = None
        self.waited = 0
        self._asked_in = 0

    def __repr__(self) -> str:
        return f"{self.name}: best {self.best}, waited {self.waited} of {self.patience} measurements"

    def ask(self, ctx: Any) -> StopAnswer:
        """Update with this epoch's value; raises MissingMetricError until an epoch has logged the metric."""
        measured = getattr(ctx, "measured", ctx.metrics)  # a direct call may pass metrics only
        if self.metric not in ctx.metrics:
            known = ", ".join(sorted(ctx.metrics)) or "none: no epoch task called ctx.log"
            text = f"early_stopping waits for the metric {self.metric!r}; known are: {known}"
            raise MissingMetricError(text, self.metric)
        if self.metric in measured and ctx.epoch != self._asked_in:
            self._asked_in, value = ctx.epoch, float(measured[self.metric])
            sign = 1 if self.mode == "min" else -1
            better = self.best is None or sign * (self.best - value) > self.min_delta
            if math.isfinite(value) and better:
                self.best, self.waited = value, 0
            else:
                self.waited += 1
        if self.waited < self.patience:
            return StopAnswer(False)
        best = "never had a finite value" if self.best is None else f"did not improve on {self.best:g}"
        return StopAnswer(True, f"{self.metric} {best} for {self.waited} epochs that logged it")

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that the answer is saved with."""
        return {name: getattr(self, name) for name in ("mode", "patience", "min_delta")}

    def holds(self, saved: Mapping[str, Any]) -> bool:
        """Return True if a saved answer holds: patience is not larger now, and the threshold is equal."""
        return {**saved, "patience": self.patience} == self.settings and self.patience <= saved["patience"]

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values."""
        return {
            "best": self.best, "waited": self.waited, "epoch": self._asked_in,
            "mode": self.mode, "min_delta": self.min_delta,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; if the metric or mode has changed, waiting starts over."""
        best = state["best"] if state.get("mode", self.mode) == self.mode else None
        self.best = None if best is None else float(best)
        same = best == state["best"] and state.get("min_delta", self.min_delta) == self.min_delta
        self.waited, self._asked_in = int(state["waited"]) if same else 0, int(state["epoch"])


def early_stopping(
    metric: str, mode: Mode = "min", patience: int = 3, min_delta: float = 0.0
) -> EarlyStopping:
    """Stop after `patience` measurements in a row without an improvement of `metric`.

    Epochs that do not log the metric do not count. NaN and infinite values are never improvements.

    Args:
        metric: Name given to `ctx.log`.
        mode: "min" or "max".
        patience: Number of measurements without improvement.
        min_delta: An improvement must exceed the best value by more than this.

    Returns:
        The condition, for `job.stop_when`.

    Raises:
        UsageError: An argument is invalid.

    Example:
        job.stop_when(early_stopping("val/loss", patience=3))
    """
    if not isinstance(metric, str) or not metric:
        raise UsageError(f"early_stopping needs the name of a metric, not {metric!r}")
    if mode not in ("min", "max"):
        raise UsageError(f"early_stopping's mode is 'min' or 'max', not {mode!r}")
    whole_number("early_stopping's patience", patience)
    number = isinstance(min_delta, (int, float)) and not isinstance(min_delta, bool)
    if not (number and math.isfinite(min_delta) and min_delta >= 0):
        raise UsageError(f"early_stopping's min_delta is a number from 0, not {min_delta!r}")
    return EarlyStopping(metric, mode, patience, float(min_delta))


class Renamed:
    """A condition under another name, because its own name is taken in its job."""

    def __init__(self, condition: StopCondition, name: str) -> None:
        self.condition, self.name = condition, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self.condition, name)


def condition_of(given: Any, job: Job | None = None) -> StopCondition:
    """Convert `given` to a stop condition with a unique name in `job`; UsageError lists the valid forms.

    A condition with state becomes a blob of the job, so that a resume restores it, unless the user registered
    it.
    """
    from torchrelay.jobs.blobs import is_stateful

    condition = _as_condition(given)
    if job is None:
        return condition
    if is_stateful(condition) and not any(blob.source is condition for blob in job.blobs):
        blob_name = getattr(condition, "blob_name", None) or f"stop/{condition.name}"
        job.blobs.add({free_name(blob_name, set(job.blobs.names)): condition})
    known = job.stop_conditions
    if any(condition is one or condition is getattr(one, "condition", None) for one in known):
        raise UsageError(f"stop condition {condition.name!r} has already been added to the job")
    name = free_name(condition.name, {one.name for one in known})
    renamed: Any = Renamed(condition, name)
    return condition if name == condition.name else renamed


def _as_condition(given: Any) -> StopCondition:
    import torch

    from torchrelay.jobs.blobs import call_style, invoke, step_name
    from torchrelay.jobs.task import TaskOutput

    is_class = isinstance(given, type)
    if not is_class and callable(getattr(given, "ask", None)):
        return _checked(given)
    if isinstance(given, TaskOutput):
        return AskedValue(
            f"output({given})",
            lambda ctx: given.fetch_all().get(ctx.workspace.node, SILENT),
            f"{given} is true",
        )
    if isinstance(given, str):
        blob, reason = _address_of(given), f"blob {given!r} is true"
        return AskedValue(f"blob({given})", lambda ctx: _read(ctx.workspace, *blob), reason, blob=blob)
    if isinstance(given, torch.Tensor):
        if given.numel() != 1:
            shape = f"a tensor of shape {tuple(given.shape)} cannot be a stop condition: it needs one element"
            raise UsageError(f"{shape}; use a function, such as `lambda: done.all()`")
        return AskedValue("tensor", lambda ctx: given, "the tensor given as stop condition is true")
    if not is_class and callable(getattr(given, "data_finished", None)):
        finished, kind = given.data_finished(), _kind(given)
        if not isinstance(finished, (bool, int)):
            return _as_condition(finished)
        return AskedValue(kind, lambda ctx: given.data_finished(), f"the data of {kind} is finished")
    if callable(given) and not is_class:
        call_style(given)
        name, settings = step_name(given) or "condition", function_settings(given)
        return AskedValue(
            name, lambda ctx: invoke(given, ctx.workspace, ctx), f"{name} says so", settings=settings
        )
    raise UsageError(f"{given!r:.80} is not a stop condition; expected {_FORMS}")


def _checked(given: Any) -> StopCondition:
    missing = [name for name in ("name", "rule", "limit") if not hasattr(given, name)]
    if missing:
        raise UsageError(f"the stop condition {_kind(given)} has ask() but no {', '.join(missing)}")
    if given.rule not in RULES:
        raise UsageError(f"stop condition {given.name!r} has the rule {given.rule!r}, not {', '.join(RULES)}")
    return given  # type: ignore[no-any-return]


def _address_of(text: str) -> tuple[str, str | None]:
    """Return the blob and its node: the named one, else the current one; None means every node."""
    node, _, name = text.rpartition(":")
    current = Node.current(required=False)
    return check_blob_name(name), check_node_name(node) if node else (current.name if current else None)


def _read(workspace: Any, name: str, node: str | None) -> Any:
    if node not in (None, workspace.node):
        return SILENT
    if name in workspace:
        return workspace[name]
    raise UsageError(
        f"the stop condition reads blob {name!r}, which {workspace.node} does not have after the "
        f"epoch (it has {', '.join(workspace) or 'none'}): make it in the init group, or in each epoch"
    )


def _kind(given: object) -> str:
    return given.__name__ if isinstance(given, type) else type(given).__name__
