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
from killing import Kill, fired, names
from state_hash import sha256_of
from torchrun import REPOSITORY, torchrun

from torchrelay import LocalSession

PROGRAM = REPOSITORY / "tests/programs/exact_resume.py"
STEPS = (3, 7, 11, 5)
"""Where in the epochs 1 to 4 the kills are: in the loop of each of the three learners, and again the first."""
WORLDS = [1, 2, 4]
pytestmark = pytest.mark.timeout(300)  # seconds; the first test of a world size plays its whole story


class Story:
    """What the ranks of one world size have told."""

    def __init__(self, folder: Path, world: int) -> None:
        self.folder = folder
        self.schedule = [Kill(epoch, STEPS[epoch - 1], (epoch - 1) % world) for epoch in range(1, EPOCHS + 1)]
        kills = json.dumps([[kill.epoch, kill.step, kill.rank] for kill in self.schedule])
        self.done = torchrun(
            PROGRAM, str(folder), kills, ranks=world, cwd=folder, max_restarts=EPOCHS, timeout_secs=240,
            env={"PYTHONPATH": str(REPOSITORY / "tests/helpers")},
        )  # fmt: skip
        assert self.done.rc == 0, str(self.done)
        self.told = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(world)]

    def digest(self, run: str) -> str:
        """The state of all ranks at the end of a run."""
        return sha256_of([told["runs"][run]["digest"] for told in self.told])

    def trails(self, run: str) -> list[dict[str, str]]:
        """The state of each rank at both ends of the epochs that a run went through."""
        return [told["runs"][run]["trail"] for told in self.told]

    def check_resumed(self, whole: str, run: str, since: int) -> None:
        """The run went through the epochs after `since` and through the same states as the whole one."""
        assert self.trails(run) == [expected_trail(trail, since) for trail in self.trails(whole)]
        assert self.digest(run) == self.digest(whole)


@pytest.fixture(scope="module")
def story_of(tmp_path_factory: pytest.TempPathFactory):
    """The story of a world size, played once; one that failed is not tried again."""
    told: dict[int, Story | AssertionError] = {}

    def story(world: int) -> Story:
        if world not in told:
            try:
                told[world] = Story(tmp_path_factory.mktemp(f"ranks{world}-"), world)
            except AssertionError as error:
                told[world] = error
        found = told[world]
        if isinstance(found, AssertionError):
            pytest.fail(str(found))
        return found

    return story


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("world", WORLDS)
def test_a_kill_in_the_middle_of_every_epoch_changes_nothing(story_of, world: int) -> None:
    """torchrun restarts after a SIGKILL in each epoch, of ranks in turn, and the final state is the same."""
    story = story_of(world)
    assert fired(story.folder / "kills") == names(story.schedule)
    assert [told["attempt"] for told in story.told] == [EPOCHS] * world
    story.check_resumed("whole", "killed", since=EPOCHS - 1)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("world", WORLDS)
def test_a_resume_from_every_epoch_changes_nothing(story_of, world: int) -> None:
    """From epoch 0 to the last one, objects built from another seed come to the same states."""
    story = story_of(world)
    for epoch in range(EPOCHS + 1):
        story.check_resumed("whole", f"whole from {epoch}", since=epoch)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("world", WORLDS)
def test_every_call_of_the_same_processes_rewinds(story_of, world: int) -> None:
    """A second call for epoch 2 begins there again on all ranks, although the first one's branch could go on."""
    story = story_of(world)
    shorter = [set(trail) for trail in story.trails(f"rewound to {EPOCHS - 1}")]
    assert shorter == [{"begin of 3", "end of 3"}] * world
    story.check_resumed("whole", f"rewound to {EPOCHS}", since=2)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("world", WORLDS)
def test_a_save_changes_nothing(story_of, world: int) -> None:
    """The state after a save, random streams included, is the state before it, on every rank."""
    for trail in story_of(world).trails("whole"):
        assert len(trail) == 2 * EPOCHS
        for epoch in range(1, EPOCHS):
            assert trail[f"end of {epoch}"] == trail[f"begin of {epoch + 1}"]
            assert trail[f"begin of {epoch}"] != trail[f"end of {epoch}"]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("world", [world for world in WORLDS if world > 1])
def test_batch_norm_without_broadcast_resumes_every_ranks_own_buffers(story_of, world: int) -> None:
    """Buffers that differ between ranks become `rank` for good, which is said once, and resume exactly."""
    story = story_of(world)
    for epoch in range(EPOCHS + 1):
        story.check_resumed("own buffers", f"own buffers from {epoch}", since=epoch)
    told = json.loads((story.folder / "own buffers.warnings.json").read_text())
    assert len(told) == 1
    assert "sgd.model.norm.running_mean" in told[0] and "scope rank" in told[0]
    assert "num_batches_tracked" not in told[0], "what is alike stays replicated"


def test_one_process_resumes_from_every_epoch(tmp_path: Path) -> None:
    """Without a launcher: from epoch 0 to the last one, new objects and a new session come to the same state."""
    with LocalSession() as session:
        whole = train(session, tmp_path / "whole", seed=5)
    for epoch in range(EPOCHS + 1):
        run = shutil.copytree(tmp_path / "whole", tmp_path / f"from {epoch}")
        with LocalSession() as session:
            resumed = train(session, run, seed=100 + epoch, resume_from_epoch=epoch)
        assert resumed.last_epoch == EPOCHS
        assert resumed.trail == expected_trail(whole.trail, epoch)
        assert resumed.digest == whole.digest
