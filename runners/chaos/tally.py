"""What came of the trials, by kind: tried, survived, refused, lost, undetected, failed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import field
from enum import Enum
from typing import Any

from torchrelay.records import dataclass


class Verdict(Enum):
    """What became of a trial.

    REFUSED: what the fault has damaged was named and not used. MISSED: the fault did not happen, so nothing
    was tried.
    """

    SURVIVED = "survived"
    REFUSED = "refused"
    LOST = "lost"
    UNDETECTED = "undetected"
    FAILED = "failed"
    MISSED = "missed"


SHOWN = tuple(one for one in Verdict if one is not Verdict.MISSED)
COLUMNS = ("kind", "tried", *(one.value for one in SHOWN), "seconds")


@dataclass(frozen=True)
class Outcome:
    """One trial: its name, by which it is repeated, and what came of it."""

    kind: str
    name: str
    verdict: Verdict
    reason: str = ""

    @property
    def bad(self) -> bool:
        """Whether it is a finding."""
        return self.verdict not in (Verdict.SURVIVED, Verdict.REFUSED, Verdict.MISSED)


@dataclass
class Tally:
    """Outcomes, counted."""

    outcomes: list[Outcome] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    """Kinds that could not be tried, and why."""

    def add(self, outcomes: Iterable[Outcome], kind: str = "", seconds: float = 0.0) -> None:
        """Count more."""
        self.outcomes += outcomes
        if kind:
            self.seconds[kind] = self.seconds.get(kind, 0.0) + seconds

    def count(self, kind: str, verdict: Verdict | None = None) -> int:
        """Trials of a kind in which the fault happened, or those of a verdict."""
        mine = [one for one in self.outcomes if one.kind == kind]
        if verdict is None:
            return sum(one.verdict is not Verdict.MISSED for one in mine)
        return sum(one.verdict is verdict for one in mine)

    @property
    def kinds(self) -> tuple[str, ...]:
        """In the order in which they came."""
        return tuple(dict.fromkeys([*(one.kind for one in self.outcomes), *self.seconds]))

    @property
    def bad(self) -> tuple[Outcome, ...]:
        """All findings."""
        return tuple(one for one in self.outcomes if one.bad)

    def rows(self) -> Sequence[Sequence[str]]:
        """The lines of the table below COLUMNS."""
        return [
            [kind, str(self.count(kind)), *(str(self.count(kind, one)) for one in SHOWN),
             f"{self.seconds.get(kind, 0.0):.1f}"]
            for kind in self.kinds
        ]  # fmt: skip

    def json(self) -> dict[str, Any]:
        """The table and the findings as JSON."""
        kinds = {
            row[0]: {**dict(zip(COLUMNS[1:-1], map(int, row[1:-1]), strict=True)), "seconds": float(row[-1])}
            for row in self.rows()
        }
        bad = [
            {"kind": one.kind, "trial": one.name, "verdict": one.verdict.value, "reason": one.reason}
            for one in self.bad
        ]
        return {"kinds": kinds, "findings": bad, "skipped": self.skipped}
