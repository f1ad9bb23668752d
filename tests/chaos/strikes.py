"""One fault in one run of the built-in target, the judgement of what it left, and the tally of trials."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import field
from enum import Enum
from pathlib import Path
from typing import Any

from torchrelay.chaos.faults import Fault
from torchrelay.chaos.processes import Ended, Worker
from torchrelay.chaos.scenarios import Ready, Trial
from torchrelay.checkpoint.storage.open import shown
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


LIMIT_SECS = 40.0
"""How long a trial of some milliseconds may take before it counts as hanging."""
_CUT = {"short": ("write", "read"), "zero": ("write", "read"), "stale": ("list",)}
"""Faults that change what a call does, and to what sorts of calls they can."""


@dataclass(frozen=True)
class Strike:
    """A fault in a prepared scenario."""

    prepared: Ready
    fault: Fault
    keep: Path | None = field(default=None, compare=False)
    """Where the directory of a trial with a finding goes."""

    @property
    def kind(self) -> str:
        """What the table calls it."""
        if self.fault.reads:
            return "read"
        return "errno" if self.fault.errno or self.fault.what in _CUT else self.fault.what

    @property
    def name(self) -> str:
        """`resume/kill@37:after`."""
        return f"{self.prepared.scenario.name}/{self.fault}"


def strike(worker: Worker, one: Strike) -> Outcome:
    """Copy the run, inject the fault, verify what is there, and resume."""
    copy = one.prepared.copy(worker.fresh())
    try:
        order, told = copy.struck(worker.plan, one.fault, LIMIT_SECS)
        ended = worker.nursery.run(order)
        if not told.fired and ended.well:
            return Outcome(one.kind, one.name, Verdict.MISSED)
        struck = told.struck
        if struck.partition(" ")[0] not in _CUT.get(one.fault.what, (struck.partition(" ")[0],)):
            return Outcome(one.kind, one.name, Verdict.MISSED)  # threads met otherwise: nothing was cut
        verdict, reason = _judge_struck(one, ended, struck, copy)
        if verdict is Verdict.SURVIVED:
            verdict, reason = judge_left(worker.nursery.run(copy.check(LIMIT_SECS)))
        if verdict is not Verdict.SURVIVED:
            reason = f"{struck.replace(copy.place, '')}: {reason}{_kept(one, copy)}"
        return Outcome(one.kind, one.name, verdict, reason)
    finally:
        copy.remove()


def judge_left(ended: Ended) -> tuple[Verdict, str]:
    """What the check of a fresh process says."""
    if ended.well:
        return Verdict.SURVIVED, ""
    verdict = {"Lost": Verdict.LOST, "Mixed": Verdict.UNDETECTED}.get(ended.raised, Verdict.FAILED)
    return verdict, f"afterwards: {ended.reason}"


def _judge_struck(one: Strike, ended: Ended, struck: str, copy: Trial) -> tuple[Verdict, str]:
    """What the struck process itself did."""
    if one.fault.what == "kill":
        return (Verdict.SURVIVED, "") if ended.killed else (Verdict.FAILED, f"not killed: {ended.reason}")
    if ended.raised == "Mixed":
        return Verdict.UNDETECTED, ended.reason
    if not ended.well:
        return Verdict.FAILED, ended.reason
    if one.fault.what == "stall":
        return _judge_slow(ended.value)
    return _judge_told(one.fault, ended.value, struck, copy)


def _judge_slow(said: dict[str, Any]) -> tuple[Verdict, str]:
    """Check that slowness is not reported as an error."""
    if said["error"] or said["warnings"]:
        return Verdict.FAILED, f"slowness is reported as an error: {said['error'] or said['warnings']}"
    return Verdict.SURVIVED, ""


def _judge_told(fault: Fault, said: dict[str, Any], struck: str, copy: Trial) -> tuple[Verdict, str]:
    """Check that an error names file and reason once it can matter, and that nothing is left open."""
    if said["open"]:
        return Verdict.FAILED, f"left open: {said['open']}"
    if said["error"] and not said["ours"]:
        return Verdict.FAILED, f"an error of no kind of ours: {said['kind']}: {said['error']}"
    texts = [text for text in (said["error"], *said["warnings"]) if text]
    if not texts:
        silent = copy.may_be_silent(fault, struck)
        return (Verdict.SURVIVED, "") if silent else (Verdict.UNDETECTED, "nothing was said of the failure")
    named = any(shown(copy.place) in text or struck.partition(" ")[2] in text for text in texts)
    reasoned = not fault.errno or any(os.strerror(fault.errno) in text for text in texts)
    if not named or not reasoned:
        return Verdict.FAILED, f"the error does not name {'the reason' if named else 'the file'}: {texts}"
    return Verdict.SURVIVED, ""


def _kept(one: Strike, copy: Trial) -> str:
    if one.keep is None:
        return ""
    where = one.keep / one.name.replace("/", "-").replace(":", "-")
    shutil.rmtree(where, ignore_errors=True)
    where.mkdir(parents=True)
    copy.keep(where)
    return f"; what it left is in {where}"
