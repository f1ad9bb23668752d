"""What a stop condition is, and how the answers of many nodes become one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
        """Metrics as last reduced."""

    @property
    def workspace(self) -> Any:
        """The node's GLOBAL workspace."""


class StopCondition(Protocol):
    """Asked on every node after every epoch.

    `rule` says how the nodes' answers combine: stop when "any" or "all" of them say so, or when the
    first node ("rank0") does. `limit` conditions depend on nothing but the position, so they are asked
    anew on resume with today's arguments; of all others the saved verdict holds. A limit that has
    `steps` or `secs`, totals of the whole run, also ends the running epoch at its next step. A condition
    with `state_dict` and `load_state_dict` becomes a blob of its job.
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


def free_name(name: str, taken: set[str]) -> str:
    """Return `name`, or the first of name_2, name_3, ... that is free: alike wherever the program runs."""
    candidate, number = name, 1
    while candidate in taken:
        number += 1
        candidate = f"{name}_{number}"
    return candidate
