"""The trials find what they look for: the built-in run with a rule taken out does not survive them."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import struck_programs as programs

from torchrelay.chaos import damage, power
from torchrelay.chaos.builtin import BuiltIn
from torchrelay.chaos.faults import Fault
from torchrelay.chaos.processes import Order
from torchrelay.chaos.scenarios import Prepared, scenarios
from torchrelay.chaos.strikes import Outcome, Strike, Verdict, strike

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def without(target: BuiltIn, program: str) -> Prepared:
    """The scenario `resume`, continued by a program that lacks a rule."""
    ready = target.prepared(scenarios(["resume"]))[0]
    return replace(ready, scenario=replace(ready.scenario, program=f"{programs.HERE}:{program}"))


def struck(target: BuiltIn, ready: Prepared, what: str, ending: str, kind: str) -> Outcome:
    """A fault at the last call of this kind to a file of this ending."""
    at = [one.number for one in ready.calls if one.kind == kind and one.path.endswith(ending)][-1]
    return target.pool.map(strike, [Strike(ready, Fault(what, at))])[0]


def test_early_acknowledgement_is_lost(target: BuiltIn) -> None:
    """An epoch that was acknowledged before its manifest was written is lost by a kill there."""
    outcome = struck(target, without(target, "acknowledging_early"), "kill", "manifest.json", "create")
    assert outcome.verdict is Verdict.LOST and "was acknowledged" in outcome.reason


def test_swallowed_errors_are_seen(target: BuiltIn) -> None:
    """A failed sync that nobody hears of is undetected, though every byte is right."""
    outcome = struck(target, without(target, "swallowing_errors"), "EIO", "manifest.json", "sync")
    assert outcome.verdict is Verdict.UNDETECTED and "nothing was said" in outcome.reason


def test_open_files_are_seen(target: BuiltIn) -> None:
    """Descriptors that stay open after a failed save are a failure."""
    outcome = struck(target, without(target, "leaving_files_open"), "ENOSPC", "manifest.json", "write")
    assert outcome.verdict is Verdict.FAILED and "left open" in outcome.reason


def test_missing_syncs_are_lost_in_power_cuts(target: BuiltIn) -> None:
    """Without fsync an acknowledged epoch is not on the device when the power fails."""
    system = power.FILE_SYSTEMS["ext4"]
    if reason := power.why_not(system, target.directory):
        pytest.skip(reason)
    ready = without(target, "without_syncs")
    acknowledged = next(
        one.number for one in ready.calls if one.path.endswith("manifest.json") and one.kind == "sync"
    )
    cuts = power.Cuts(ready, system, tuple(range(acknowledged + 10, acknowledged + 60, 10)))
    outcomes = target.pool.map(power.cut, [cuts])[0]
    assert any(one.verdict is Verdict.LOST for one in outcomes), outcomes


def test_unproved_bytes_are_seen(target: BuiltIn) -> None:
    """A reader that does not prove tensors loads flipped bits, and that counts as undetected."""
    ready = target.prepared(scenarios(["resume"]))[0]
    changes = [one for one in damage.draw("flip", ready.files(), 200, 1) if "main" in one.path]
    arguments = {
        "run": str(ready.run),
        "oracle": str(ready.oracle),
        "changes": [asdict(one) for one in changes],
    }
    order = Order(f"{programs.HERE}:look_without_proof", arguments)
    told = target.pool.map(lambda worker, one: worker.nursery.run(one).value, [order])[0]
    assert "undetected" in [verdict for verdict, _ in told]
    proved = target.pool.map(damage.look, [damage.Batch(ready, tuple(changes))])[0]
    assert "undetected" not in [one.verdict.value for one in proved]
