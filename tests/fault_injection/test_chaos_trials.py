"""Nothing is lost, mixed or passed over in silence, whatever happens at whatever system call of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from samples import sample

from torchrelay.chaos import power
from torchrelay.chaos.builtin import BuiltIn
from torchrelay.chaos.scenarios import SCENARIOS, scenarios
from torchrelay.chaos.strikes import COLUMNS, Tally, Verdict

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STRIKES = {"kill": sample(25, 395), "errno": sample(30, 196), "read": sample(4, 12), "stall": sample(2, 4)}
"""Per scenario; the large one, whose trials take longer, gets an eighth. The campaign has in all
2,024 kills and 1,004 errors."""
ROUNDS = 4
"""So often what is missing is drawn: threads that meet otherwise let a program end before a late number."""


def run(target: BuiltIn, kind: str, trials: int, tell: Callable[[str], None], *names: str) -> Tally:
    """Trials of a kind, their table told."""
    target.wish = replace(target.wish, trials=trials, scenarios=scenarios(names))
    tally = target.run(kind)
    for row in tally.rows():
        cells = ", ".join(f"{name} {cell}" for name, cell in zip(COLUMNS, row, strict=True))
        tell(f"chaos, {cells} {' '.join(names)}")
    return tally


@pytest.mark.parametrize("scenario", [one.name for one in SCENARIOS])
@pytest.mark.parametrize("kind", STRIKES)
def test_calls_are_struck(target: BuiltIn, kind: str, scenario: str, tell) -> None:
    """Killed, failing or slow: every acknowledged epoch is proved and compared, the next one saved."""
    least = max(1, STRIKES[kind] // (8 if scenario == "large" else 1))
    tally, seed = Tally(), target.wish.seed
    for number in range(ROUNDS):
        if (missing := least - tally.count(kind)) > 0:
            target.wish = replace(target.wish, seed=seed + number)
            tally.add(run(target, kind, missing, tell, scenario).outcomes)
    target.wish = replace(target.wish, seed=seed)
    assert not tally.bad, tally.bad[:5]
    assert tally.count(kind) >= least


def test_a_large_file_is_written_plainly_where_it_cannot_be_opened_for_direct_writes(target: BuiltIn) -> None:
    """The second opening of a file is not its creation: it may fail in silence, and nothing is lost."""
    ready = target.prepared(scenarios(["large"]))[0]
    calls = [call for call in ready.calls if call.path.endswith(".2.main.safetensors")]
    assert [call.kind for call in calls[:4]] == ["create", "mode", "open", "allocate"]
    # Threads that meet otherwise move the number by a few.
    tried = [target.repeat(f"large/EMFILE@{calls[2].number + more}") for more in range(-5, 3)]
    assert not any(tally.bad for tally in tried)
    assert sum(tally.count("errno") for tally in tried) == len(tried)


@pytest.mark.parametrize(("kind", "trials"), [("flip", sample(600, 5000)), ("truncate", sample(100, 400))])
def test_bytes_are_changed(target: BuiltIn, kind: str, trials: int, tell) -> None:
    """Flipped bits and cut files of committed epochs are noticed, or make no difference."""
    tally = run(target, kind, trials, tell)
    assert not tally.bad, tally.bad[:5]
    assert tally.count(kind) >= trials
    reasons = {outcome.reason.rpartition(": ")[2] for outcome in tally.outcomes}
    assert {"refused", "an older epoch is used", "harmless"} <= reasons


@pytest.mark.parametrize("system", power.FILE_SYSTEMS)
def test_power_fails(target: BuiltIn, system: str, tell) -> None:
    """The device, cut off at many boundaries, recovers to every acknowledged epoch, on each file system."""
    target.wish = replace(target.wish, file_systems=(system,))
    tally = run(target, "power", sample(24, 66), tell)
    if tally.skipped:
        pytest.skip(tally.skipped[f"power {system}"])
    assert not tally.bad, tally.bad[:5]
    assert tally.count(f"power {system}") >= sample(20, 60)


def test_without_root_power_cuts_say_so(target: BuiltIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where images cannot be mounted the kind is skipped with the reason, and counts as not tried."""
    monkeypatch.setattr(power.os, "geteuid", lambda: 1000)
    target.wish = replace(target.wish, file_systems=("ext4",))
    tally = target.run("power")
    assert "needs root" in tally.skipped["power ext4"] and not tally.outcomes


def test_one_trial_is_repeated(target: BuiltIn) -> None:
    """The name of a trial means it again: a kill, damage, a power cut."""
    for name in ("first/kill@60:after", "resume/flip@17", "resume/ENOSPC@90:lasting"):
        outcomes = target.repeat(name).outcomes
        assert [(one.name, one.verdict) for one in outcomes] == [(name, Verdict.SURVIVED)]
