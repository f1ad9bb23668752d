"""One start of torchrun per world size that plays `programs/exact_resume.py`, and what its ranks told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from exact_job import EPOCHS, expected_trail
from killing import Kill
from state_hash import sha256_of
from torchrun import REPOSITORY, torchrun

PROGRAM = REPOSITORY / "tests/programs/exact_resume.py"
STEPS = (3, 7, 11, 5)
"""Where in the epochs 1 to 4 the kills are: in the loop of each learner, and again of the first."""


class Story:
    """What the ranks of one world size have told."""

    def __init__(self, folder: Path, world: int) -> None:
        self.folder = folder
        self.schedule = [Kill(epoch, STEPS[epoch - 1], (epoch - 1) % world) for epoch in range(1, EPOCHS + 1)]
        kills = json.dumps([[kill.epoch, kill.step, kill.rank] for kill in self.schedule])
        self.done = torchrun(
            PROGRAM, str(folder), kills, warm=True, ranks=world, cwd=folder, max_restarts=EPOCHS,
            timeout_secs=240, env={"PYTHONPATH": str(REPOSITORY / "tests/helpers")},
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


StoryOf = Callable[[int], Story]
