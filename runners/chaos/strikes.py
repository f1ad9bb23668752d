"""One fault in one run of the built-in target, and the judgement of what it left."""

from __future__ import annotations

import os
import shutil
from dataclasses import field
from pathlib import Path
from typing import Any

from torchrelay.checkpoint.storage.urls import shown
from torchrelay.records import dataclass
from torchrelay.runners.chaos.fault import Fault
from torchrelay.runners.chaos.forks import Ended
from torchrelay.runners.chaos.pool import Worker
from torchrelay.runners.chaos.tally import Outcome, Verdict
from torchrelay.runners.chaos.trial import Ready, Trial

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
    """Copy the run, let the fault happen, prove what is there and go on."""
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
    """Slowness is no error."""
    if said["error"] or said["warnings"]:
        return Verdict.FAILED, f"slowness is reported as an error: {said['error'] or said['warnings']}"
    return Verdict.SURVIVED, ""


def _judge_told(fault: Fault, said: dict[str, Any], struck: str, copy: Trial) -> tuple[Verdict, str]:
    """An error is told by file and reason, once it can matter; nothing is left open."""
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
