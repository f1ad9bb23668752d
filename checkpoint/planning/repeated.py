"""Plans of repeated saves: a question whose parts are the very objects of an earlier one has its plan."""

from __future__ import annotations

from collections.abc import Mapping

from torchrelay.checkpoint.format.utils import Recent
from torchrelay.checkpoint.planning.assignments import NodeClass, Plan
from torchrelay.checkpoint.planning.plan import plan_classes
from torchrelay.records import dataclass

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

    def to(self, classes: object, scopes: object, hosts: tuple[int, ...], referenced: frozenset[str]) -> bool:
        """Whether this was asked."""
        same = self.classes is classes and self.scopes is scopes
        return same and self.hosts == hosts and self.referenced == referenced


class RepeatedPlans:
    """Remembers the last few plans; anything that is not the same object is asked anew."""

    def __init__(self) -> None:
        self._answered: Recent[_Answered] = Recent(_REMEMBERED)

    def plan(
        self,
        classes: tuple[NodeClass, ...],
        scopes: Mapping[str, str],
        hosts: tuple[int, ...],
        referenced: frozenset[str] = frozenset(),
    ) -> Plan:
        """The plan of `plan_classes` for the same arguments."""

        def make() -> _Answered:
            plan = plan_classes(classes, scopes=scopes, hosts=hosts, referenced=referenced)
            return _Answered(classes, scopes, hosts, referenced, plan)

        return self._answered.get(lambda one: one.to(classes, scopes, hosts, referenced), make).plan
