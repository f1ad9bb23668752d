"""What a stop condition is, and how the answers of many nodes become one."""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any, Literal, Protocol

from torchrelay.errors import UsageError

Rule = Literal["any", "all", "rank0"]
RULES = ("any", "all", "rank0")
_SHOWN = 3  # nodes that a reason names; thousands would hide the reason


@dataclass(frozen=True)
class StopAnswer:
    """Whether to stop, and why in a few words (empty when not)."""

    stop: bool
    reason: str = ""


class StopContext(Protocol):
    """What a condition may look at: the `ctx` of the node, after the epoch and before its save.

    A limit is also asked about a saved position before anything is loaded; then there is no `workspace`.
    """

    @property
    def epoch(self) -> int:
        """Epochs done."""

    @property
    def total_steps(self) -> int:
        """Steps of all epochs and attempts."""

    @property
    def elapsed_secs(self) -> float:
        """Seconds of running over all attempts."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics with their last reduced values, of whatever epoch."""

    @property
    def measured(self) -> Mapping[str, float]:
        """Those that the epoch which is over has logged."""

    @property
    def workspace(self) -> Any:
        """The node's GLOBAL workspace."""


class StopCondition(Protocol):
    """Asked on every node after every epoch.

    `rule` says how the nodes' answers combine: stop when "any" or "all" of them say so, or when the
    first node ("rank0") does. `limit` conditions depend on nothing but the position, so they are asked
    anew on resume with today's arguments; of all others the saved verdict holds. A limit that has
    `steps` or `secs`, totals of the whole run, also ends the running epoch at its next step. A condition
    with `state_dict` and `load_state_dict` becomes a blob of its job. One that raises MissingMetricError
    waits: it does not say stop.

    A condition may have `settings`, JSON values of what it was made with: a saved verdict that ends the run
    holds only for these. With `holds(settings)` it decides itself whether a verdict by other ones holds.
    """

    @property
    def name(self) -> str:
        """What the verdict is saved under; unique in its job."""

    @property
    def rule(self) -> Rule:
        """How the answers of the nodes combine."""

    @property
    def limit(self) -> bool:
        """Whether the position alone decides."""

    def ask(self, ctx: Any) -> StopAnswer:
        """Answer for one node; does not communicate."""


def combine(answers_by_node: Mapping[str, StopAnswer], rule: str) -> StopAnswer:
    """Make one answer of the nodes' answers (in the order of their ranks); pure.

    The reason is that of the first node that says stop, with the names of all that do. No node, no stop.
    """
    if rule not in RULES:
        raise UsageError(f"{rule!r} is not a rule of a stop condition: use one of {', '.join(RULES)}")
    asked = dict(list(answers_by_node.items())[:1]) if rule == "rank0" else answers_by_node
    stopping = [node for node, answer in asked.items() if answer.stop]
    if not stopping or (rule == "all" and len(stopping) < len(asked)):
        return StopAnswer(False)
    return StopAnswer(True, f"{asked[stopping[0]].reason} ({_names(stopping)})".lstrip())


def _names(nodes: list[str]) -> str:
    more = len(nodes) - _SHOWN
    return ", ".join(nodes[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def made_with(condition: Any) -> dict[str, Any] | None:
    """The settings that its verdict is saved with; None where nothing tells them."""
    found = getattr(condition, "settings", None)
    return dict(found) if isinstance(found, Mapping) else None


def verdict_holds(condition: Any, saved: Mapping[str, Any] | None) -> bool:
    """Whether a verdict that ended the run is one of today's condition, made as it was then."""
    today = made_with(condition)
    if saved is None or today is None:
        return True
    decides = getattr(condition, "holds", None)
    return bool(decides(saved)) if callable(decides) else saved == today


def function_settings(function: Any) -> dict[str, str] | None:
    """What tells a function from one with other code or other plain values; None where Python shows none.

    Plain values are numbers, texts, flags and None: of defaults, closures, partial arguments, attributes of
    the object whose method it is, and of globals that its code names. Each version of Python has other code.
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
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    given = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items(), *cells]
    named = {name: function.__globals__.get(name) for name in sorted(names)}
    mine = sorted(vars(owner).items()) if owner is not None and hasattr(owner, "__dict__") else []
    seen.update(repr([_plain(one) for one in (*given, *named.items(), *mine)]).encode())
    return {"code": seen.hexdigest()[:32], "python": sys.implementation.cache_tag or ""}


def _hash_code(code: CodeType, seen: Any) -> set[str]:
    """Hash what a function does and return the names that it looks up, those of inner functions too."""
    names = set(code.co_names)
    seen.update(code.co_code)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _hash_code(constant, seen)
        else:
            seen.update(repr(constant).encode())
    seen.update(repr(code.co_names).encode())
    return names


def _is_filled(cell: Any) -> bool:
    try:
        return bool(cell.cell_contents is not cell)
    except ValueError:
        return False


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_plain(one) for one in value)
    return value if value is None or type(value) in (bool, int, float, str) else type(value).__name__


def free_name(name: str, taken: set[str]) -> str:
    """Return `name`, or the first of name_2, name_3, ... that is free: alike wherever the program runs."""
    candidate, number = name, 1
    while candidate in taken:
        number += 1
        candidate = f"{name}_{number}"
    return candidate
