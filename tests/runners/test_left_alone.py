"""Ranks that leave loops of ctx.steps alone, or make other loops: all raise within seconds, nobody waits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from samples import sample
from torchrun import REPOSITORY, torchrun

from torchrelay.runners.distributed.loops import ENDED, LEFT, OPEN, Loops, contradiction, first_contradiction

PROGRAM = REPOSITORY / "tests/programs/left_alone.py"
KINDS = ("even", "list", "loader")
SECS = 15.0
"""Above what a loaded machine takes for what a quiet one does in two; a collective may take 60."""

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(250)]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """How all cases ended on both ranks, one after another in one session."""
    folder = tmp_path_factory.mktemp("left")
    done = torchrun(PROGRAM, str(folder), ranks=2, cwd=folder, warm=True, timeout_secs=200)
    assert done.rc == 0, str(done)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("breaks", "rank 1 left loop 1 of ctx.steps in this group"),
        ("returns", "rank 0 left loop 1 of ctx.steps in this group"),
        ("makes_one_more", "rank 0 runs loop 2 of ctx.steps in this group (over a list), rank 1 does not"),
        ("breaks_first", "in loop 1 of ctx.steps in this group, another one is in loop 2"),
        ("validates_inside", "in loop 2 of ctx.steps in this group, another one is in loop 1"),
        ("raises", "ValueError: odd"),
    ],
)
def test_all_ranks_raise_what_one_did_alone(
    told: list[dict[str, Any]], case: str, text: str, kind: str
) -> None:
    """A break, a return, a further loop or a failure of one rank is one error of all, with the remedy."""
    for rank in range(2):
        words, secs = told[rank][f"{case} {kind}"]
        assert text in words
        assert case == "raises" or ("UsageError" in words and "its own task" in words)
        assert secs < SECS


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_break_at_the_same_step_go_on(told: list[dict[str, Any]], kind: str) -> None:
    """However much later one of them does, and also in a session in which other runs have failed."""
    assert [told[rank][f"breaks_together {kind}"][0] for rank in range(2)] == ["FINISHED"] * 2


@pytest.mark.parametrize("kind", sample(["even"], ["even", "list"]))
def test_a_collective_of_the_program_that_one_rank_left_ends_soon(tmp_path: Path, kind: str) -> None:
    """Torch would wait for its time-out; every rank says which rank left which loop in which batch."""
    done = torchrun(PROGRAM, str(tmp_path), kind, ranks=2, cwd=tmp_path, warm=True, timeout_secs=40)
    assert done.rc != 0
    for rank in range(2):
        assert "rank 1 left loop 1 of ctx.steps" in done.of_rank(rank), str(done)
        assert "in batch 2, rank 0 is in batch 2" in done.of_rank(rank)


def loops(run: int = 1, *, over: bool = False, still: int = 0, **made: list[tuple[int, str]]) -> Any:
    """A note of a rank that made these loops; `still` after so many collectives."""
    found = {among: [[*one, "list"] for one in some] for among, some in made.items()}
    about = {"over": over, "failed": False, "still": bool(still), "collectives": still, "asks": [0, "", []]}
    return {"run": run, **about, "made": found}


def test_a_slower_rank_contradicts_nobody() -> None:
    """Behind in the same loop, in an earlier loop, or not yet at the end: that may all come right."""
    fast = loops(all=[(3, LEFT), (2, OPEN)])
    for made in ([(3, OPEN)], [(3, LEFT)], [(3, ENDED), (1, OPEN)], []):
        assert contradiction(0, fast, 1, loops(all=made)) is None
    assert contradiction(0, fast, 1, loops(run=2, all=[(1, LEFT)])) is None
    assert contradiction(0, fast, 1, loops(all=[(2, LEFT)])) is not None


def test_a_collective_more_in_the_batch_that_another_left_is_a_wait_for_it() -> None:
    """Without a collective more, or where the other has ended the loop with all, it may be a slow step."""
    waits = loops(all=[(3, OPEN)], still=5)
    assert contradiction(0, waits, 1, loops(all=[(3, LEFT)])) is not None
    assert contradiction(0, waits, 1, loops(all=[(3, ENDED)])) is None
    assert contradiction(0, waits, 1, {**loops(all=[(3, LEFT)]), "collectives": 5}) is None


def test_a_question_that_another_rank_has_passed_is_a_contradiction() -> None:
    """A rank in a later batch has asked as often as one that asks now, or never will."""
    asks = {**loops(all=[(2, OPEN)]), "asks": [1, "run.metric('a')", [[0, 2]]]}
    for batch, contradicts in ((1, False), (2, False), (3, True)):
        found = contradiction(0, asks, 1, loops(all=[(batch, OPEN)]))
        assert bool(found and "rank 1 did not" in found) == contradicts
    assert contradiction(0, asks, 1, {**asks, "made": {"all": [[3, OPEN, "list"]]}}) is None


def test_loops_of_some_ranks_concern_these_alone() -> None:
    """A rank that is not of the task need not make its loop; one that is, does."""
    alone, none = loops(**{"0,2": [(1, OPEN)]}), loops(over=True)
    assert contradiction(0, alone, 1, none) is None
    assert "rank 2 does not" in (contradiction(0, alone, 2, none) or "")
    assert first_contradiction([alone, none, alone]) is None
    assert "rank 0 runs loop 1" in (first_contradiction([loops(**{"0,2": [(1, ENDED)]}), none, none]) or "")


def test_a_group_within_another_counts_by_itself() -> None:
    """What a nested run of the session does is forgotten when it ends, and is another run for the others."""
    some = Loops()
    with some.of_group():
        some.begin(some.enter("all", "list"))
        before = some.note()
        with some.of_group():
            assert some.note() == {**before, "run": 2, "made": {}}
        assert some.note()["made"] == before["made"]
