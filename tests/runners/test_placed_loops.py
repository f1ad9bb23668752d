"""Loops of `ctx.steps` in tasks that some ranks run: these agree, and nobody waits for the others."""

from __future__ import annotations

import json
from typing import Any

import pytest
from torchrun import REPOSITORY, torchrun

PROGRAM = REPOSITORY / "tests/programs/placed_loops.py"
pytestmark = [pytest.mark.ranks, pytest.mark.timeout(150)]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of 3 ranks saw, by case."""
    folder = tmp_path_factory.mktemp("placed")
    done = torchrun(PROGRAM, str(folder), warm=True, ranks=3, cwd=folder, timeout_secs=100)
    assert done.rc == 0, str(done)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(3)]


def test_a_loop_agrees_among_the_ranks_of_its_task(told: list[dict[str, Any]]) -> None:
    """One rank takes all of its batches, two end with the shorter, and the loop of all loses none."""
    assert [one["mixed"] for one in told] == [
        ["FINISHED", {"first": 3, "some": 2, "train": 10}],
        ["FINISHED", {"train": 10, "last": 21}],
        ["FINISHED", {"some": 2, "train": 10, "last": 21}],
    ]


def test_tasks_of_each_node_with_one_function_count_steps_together(told: list[dict[str, Any]]) -> None:
    """A limit on steps ends them at one step; evaluations and hooks of a node are its own."""
    assert [one["hooked"] for one in told] == [
        ["FINISHED", {"train": 4, "check": 2}],
        ["FINISHED", {"hook": 3, "train": 4, "check": 3}],
        ["FINISHED", {"train": 4, "check": 4}],
    ]


def test_a_preemption_in_a_task_of_one_rank_waits_for_a_step_of_all(told: list[dict[str, Any]]) -> None:
    """All leave at one step of the training loop, and the next start goes on there."""
    whole, rest = {"train": 6}, {"train": 4}
    for rank, one in enumerate(told):
        assert one["left"][0] == ["PREEMPTED", {"validate": 8, **whole} if rank == 0 else whole]
        assert one["left"][1] == ["FINISHED", rest]


def test_counted_steps_of_some_ranks_are_refused_at_once(told: list[dict[str, Any]]) -> None:
    """The refusal comes to all ranks, with the remedy."""
    assert all(
        "use ctx.steps(loader, count=False) in it, or run it on all ranks" in one["counted"] for one in told
    )
