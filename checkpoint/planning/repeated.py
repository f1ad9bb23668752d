"""Plans of repeated saves: a question whose parts are the very objects of an earlier one has its plan."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from torchrelay.checkpoint.planning.assignments import NodeClass, Plan
from torchrelay.checkpoint.planning.plan import plan_classes

_REMEMBERED = 4
"""Plans: a save that refers to older bytes asks twice."""


@dataclass(frozen=True, eq=False)
class _Answered:
    """A plan and what was asked. Classes and scopes are compared by identity: they never change."""

    classes: tuple[NodeClass, ...]
    scopes: Mapping[str, str]
    hosts: tuple[int, ...]
    referenced: frozenset[str]
    plan: Plan


class RepeatedPlans:
    """Remembers the last few plans; anything that is not the same object is asked anew."""

    def __init__(self) -> None:
        self._answered: deque[_Answered] = deque(maxlen=_REMEMBERED)

    def plan(
        self,
        classes: tuple[NodeClass, ...],
        scopes: Mapping[str, str],
        hosts: tuple[int, ...],
        referenced: frozenset[str] = frozenset(),
    ) -> Plan:
        """The plan of `plan_classes` for the same arguments."""
        for one in self._answered:
            alike = one.classes is classes and one.scopes is scopes and one.hosts == hosts
            if alike and one.referenced == referenced:
                return one.plan
        plan = plan_classes(classes, scopes=scopes, hosts=hosts, referenced=referenced)
        self._answered.appendleft(_Answered(classes, scopes, hosts, referenced, plan))
        return plan
