"""Resumed and killed runs end in the same SHA-256 of all state as the uninterrupted run.

The state of a run is that of all its ranks: random states, loaders, parameters, optimizer and
scheduler state, values, and the buffers of rank 0 (of every rank where DDP does not broadcast them).
One start of torchrun per world size plays all of it: SGD with momentum, AdamW and fused AdamW train
side by side in one job (`exact_job`), a rank is killed in the middle of every epoch, and the last
attempt then resumes from every epoch with objects that it has built anew, from another seed.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from exact_job import EPOCHS, expected_trail, train
from exact_story import StoryOf
from killing import fired, names
from samples import sample

from torchrelay import LocalSession

WORLDS = sample([1, 2], [1, 2, 4])
pytestmark = pytest.mark.timeout(300)  # seconds; the first test of a world size plays its whole story


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("world", WORLDS)
def test_a_kill_in_the_middle_of_every_epoch_changes_nothing(story_of: StoryOf, world: int) -> None:
    """Restarted by torchrun after a SIGKILL in each epoch, of ranks in turn, it ends in the same state."""
    story = story_of(world)
    assert fired(story.folder / "kills") == names(story.schedule)
    assert [told["attempt"] for told in story.told] == [EPOCHS] * world
    story.check_resumed("whole", "killed", since=EPOCHS - 1)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("world", WORLDS)
def test_a_resume_from_every_epoch_changes_nothing(story_of: StoryOf, world: int) -> None:
    """From epoch 0 to the last one, objects built from another seed come to the same states."""
    story = story_of(world)
    for epoch in range(EPOCHS + 1):
        story.check_resumed("whole", f"whole from {epoch}", since=epoch)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("world", WORLDS)
def test_every_call_of_the_same_processes_rewinds(story_of: StoryOf, world: int) -> None:
    """A second call for epoch 2 begins there again on all ranks, though the first's branch could go on."""
    story = story_of(world)
    shorter = [set(trail) for trail in story.trails(f"rewound to {EPOCHS - 1}")]
    assert shorter == [{"begin of 3", "end of 3"}] * world
    story.check_resumed("whole", f"rewound to {EPOCHS}", since=2)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("world", WORLDS)
def test_a_save_changes_nothing(story_of: StoryOf, world: int) -> None:
    """The state after a save, random streams included, is the state before it, on every rank."""
    for trail in story_of(world).trails("whole"):
        assert len(trail) == 2 * EPOCHS
        for epoch in range(1, EPOCHS):
            assert trail[f"end of {epoch}"] == trail[f"begin of {epoch + 1}"]
            assert trail[f"begin of {epoch}"] != trail[f"end of {epoch}"]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("world", [2])
def test_batch_norm_without_broadcast_resumes_every_ranks_own_buffers(story_of: StoryOf, world: int) -> None:
    """Buffers that differ between ranks become `rank` for good, which is said once, and resume exactly."""
    story = story_of(world)
    for epoch in range(EPOCHS + 1):
        story.check_resumed("own buffers", f"own buffers from {epoch}", since=epoch)
    files = [story.folder / f"own buffers.warnings-{rank}.json" for rank in range(world)]
    told = [one for file in files for one in json.loads(file.read_text())]
    assert len(told) == 1
    assert "sgd.model.norm.running_mean" in told[0] and "per node" in told[0]
    assert "num_batches_tracked" not in told[0], "what is alike stays replicated"


def test_one_process_resumes_from_every_epoch(tmp_path: Path) -> None:
    """Without a launcher: from every epoch, new objects in a new session come to the same state."""
    with LocalSession() as session:
        whole = train(session, tmp_path / "whole", seed=5)
    for epoch in range(EPOCHS + 1):
        run = shutil.copytree(tmp_path / "whole", tmp_path / f"from {epoch}")
        with LocalSession() as session:
            resumed = train(session, run, seed=100 + epoch, resume_from_epoch=epoch)
        assert resumed.last_epoch == EPOCHS
        assert resumed.trail == expected_trail(whole.trail, epoch)
        assert resumed.digest == whole.digest
