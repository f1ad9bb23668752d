"""One fault in one run of the built-in target, and the judgement of what it left."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchrelay.runners.chaos.fault import Fault
from torchrelay.runners.chaos.forks import Ended
from torchrelay.runners.chaos.pool import Worker
from torchrelay.runners.chaos.scenarios import Copy, Prepared, copy_of
from torchrelay.runners.chaos.tally import Outcome, Verdict

LIMIT_SECS = 40.0
"""How long a trial of some milliseconds may take before it counts as hanging."""
_SPARED = ("HINT", "writer.json", ".probe-", ".tmp-", "stats.json")
"""Files that prove nothing: a failure there may pass in silence."""
_HARMLESS = ("open", "read", "release", "range", "mkdir")
"""Reads whose bytes were proved in the end, advice, and directories: one that is missing shows at once."""


@dataclass(frozen=True)
class Strike:
    """A fault in a prepared scenario."""

    prepared: Prepared
    fault: Fault
    keep: Path | None = field(default=None, compare=False)
    """Where the directory of a trial with a finding goes."""

    @property
    def kind(self) -> str:
        """What the table calls it."""
        if self.fault.reads:
            return "read"
        return "errno" if self.fault.errno or self.fault.what in ("short", "zero") else self.fault.what

    @property
    def name(self) -> str:
        """`resume/kill@37:after`."""
        return f"{self.prepared.scenario.name}/{self.fault}"


def strike(worker: Worker, one: Strike) -> Outcome:
    """Copy the run, let the fault happen, prove what is there and go on."""
    copy = copy_of(one.prepared, worker.fresh())
    try:
        worker.plan.arm(copy.run, one.fault)
        ended = worker.nursery.run(copy.train(worker.plan, LIMIT_SECS))
        if not worker.plan.fired and ended.well:
            return Outcome(one.kind, one.name, Verdict.MISSED)
        struck = worker.plan.struck
        if one.fault.what in ("short", "zero") and struck.partition(" ")[0] not in ("write", "read"):
            return Outcome(one.kind, one.name, Verdict.MISSED)  # threads met otherwise: nothing was cut
        verdict, reason = _judge_struck(one, ended, struck, str(copy.run))
        if verdict is Verdict.SURVIVED:
            verdict, reason = judge_left(worker.nursery.run(copy.check(LIMIT_SECS)))
        if verdict is not Verdict.SURVIVED:
            reason = f"{struck.replace(str(copy.run), '')}: {reason}{_kept(one, copy)}"
        return Outcome(one.kind, one.name, verdict, reason)
    finally:
        copy.remove()


def judge_left(ended: Ended) -> tuple[Verdict, str]:
    """What the check of a fresh process says."""
    if ended.well:
        return Verdict.SURVIVED, ""
    verdict = {"Lost": Verdict.LOST, "Mixed": Verdict.UNDETECTED}.get(ended.raised, Verdict.FAILED)
    return verdict, f"afterwards: {ended.reason}"


def _judge_struck(one: Strike, ended: Ended, struck: str, run: str) -> tuple[Verdict, str]:
    """What the struck process itself did."""
    if one.fault.what == "kill":
        return (Verdict.SURVIVED, "") if ended.killed else (Verdict.FAILED, f"not killed: {ended.reason}")
    if ended.raised == "Mixed":
        return Verdict.UNDETECTED, ended.reason
    if not ended.well:
        return Verdict.FAILED, ended.reason
    if one.fault.what == "stall":
        return _judge_slow(ended.value)
    return _judge_told(one.fault, ended.value, struck, run)


def _judge_slow(said: dict[str, Any]) -> tuple[Verdict, str]:
    """Slowness is no error."""
    if said["error"] or said["warnings"]:
        return Verdict.FAILED, f"slowness is reported as an error: {said['error'] or said['warnings']}"
    return Verdict.SURVIVED, ""


def _judge_told(fault: Fault, said: dict[str, Any], struck: str, run: str) -> tuple[Verdict, str]:
    """An error is told by file and reason, once it can matter; nothing is left open."""
    if said["open"]:
        return Verdict.FAILED, f"left open: {said['open']}"
    if said["error"] and not said["ours"]:
        return Verdict.FAILED, f"an error of no kind of ours: {said['kind']}: {said['error']}"
    texts = [text for text in (said["error"], *said["warnings"]) if text]
    if not texts:
        tried_again = fault.what in ("short", "EINTR") or (fault.what == "zero" and not fault.lasting)
        silent = tried_again or _may_be_silent(fault, struck, run)
        return (Verdict.SURVIVED, "") if silent else (Verdict.UNDETECTED, "nothing was said of the failure")
    named = any(run in text for text in texts)
    reasoned = not fault.errno or any(os.strerror(fault.errno) in text for text in texts)
    if not named or not reasoned:
        return Verdict.FAILED, f"the error does not name {'the reason' if named else 'the file'}: {texts}"
    return Verdict.SURVIVED, ""


def _may_be_silent(fault: Fault, struck: str, run: str) -> bool:
    """Whether the failed call loses nothing: advice, a read that was tried again, a file that proves nothing.

    Whoever may not read the directory above the checkpoints did not make their name in it; that of a run is
    made and removed again before the run begins.
    """
    kind, _, path = struck.partition(" ")
    above = path == run and (kind == "rmdir" or (kind == "opendir" and fault.what == "EACCES"))
    return kind in _HARMLESS or above or any(name in path for name in _SPARED)


def _kept(one: Strike, copy: Copy) -> str:
    if one.keep is None:
        return ""
    where = one.keep / one.name.replace("/", "-").replace(":", "-")
    shutil.rmtree(where, ignore_errors=True)
    where.mkdir(parents=True)
    for path in (copy.run, copy.oracle):
        if path.exists():
            shutil.move(str(path), where / path.name)
    return f"; what it left is in {where}"
