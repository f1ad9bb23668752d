"""Run by torchrun on 3 ranks: loops of `ctx.steps` in tasks of some ranks.

placed_loops.py <folder>    writes <folder>/rank<r>.json: by case, what this rank saw
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import defaultdict, deque
from pathlib import Path
from typing import Any

import torch

import torchrelay
from torchrelay import Job, JobRunner, Node, max_epochs, max_steps
from torchrelay.errors import UsageError
from torchrelay.runners.session import stop_requests
from torchrelay.runners.session.distributed import DistributedSession
from torchrelay.runners.training.exit import run_and_leave

SECS = 40.0
"""What a collective may take: a wait that was never going to end fails the test."""


class Story:
    """One job of each case: `seen` has what this rank's loops took, by task."""

    def __init__(self, session: DistributedSession, folder: Path) -> None:
        self.session, self.folder = session, folder
        self.rank = session.env.rank
        self.seen: dict[str, list[int]] = defaultdict(list)

    def job(self, name: str, epochs: int = 1) -> Job:
        """A job with something to save."""
        self.seen.clear()
        job = Job(name, blobs=dict(weights=torch.zeros(2)))
        job.stop_when(max_epochs(epochs))
        return job

    def loop(self, name: str, length: int, *, count: bool = True) -> Any:
        """A task that loops over so many batches."""

        def task(ctx: Any) -> None:
            for batch in ctx.steps(range(length), count=count):
                self.seen[name].append(batch)

        task.__name__ = name
        return task

    def run(self, job: Job) -> tuple[str, dict[str, int]]:
        """How it ended, and how many batches each task of this rank took."""
        status = JobRunner(job, self.folder / str(job.name)).train(self.session).status
        return status, {name: len(batches) for name, batches in self.seen.items()}

    def mixed(self) -> Any:
        """Tasks of one and of two ranks, with batches of their own, before and after one of all ranks."""
        job = self.job("mixed")
        job.epoch(self.loop("first", 3, count=False), on="rank0")
        job.epoch(self.loop("some", 2 + self.rank, count=False), on=[0, 2])
        job.epoch(self.loop("train", 10))
        job.epoch(self.loop("last", 20 + self.rank, count=False), on=lambda place: place.rank > 0)
        return self.run(job)

    def hooked(self) -> Any:
        """A hook of one node loops alone; each node has a task of its own with the same function."""
        job = self.job("hooked")
        job.stop_when(max_steps(4))
        job.epoch_group.local_init(self.loop("hook", 3, count=False), node="trainer_1")
        for rank in range(3):
            with Node(f"trainer_{rank}"):
                job.epoch(self.loop("train", 10))
                job.epoch(self.loop("check", 2 + rank, count=False))
        return self.run(job)

    def left(self) -> Any:
        """SIGTERM comes to rank 0 in its validation, while the others are in the training loop."""
        outcomes = []
        for attempt in range(2):
            job = self.job("left", 2)

            @job.epoch(on="rank0")
            def validate(ctx: Any, attempt: int = attempt) -> None:
                for batch in ctx.steps(range(4), count=False):
                    self.seen["validate"].append(batch)
                    if batch == 1 and ctx.epoch == 2 and attempt == 0:
                        os.kill(os.getpid(), signal.SIGTERM)

            job.epoch(self.loop("train", 5))
            outcomes.append(self.run(job))
        return outcomes

    def counted(self) -> Any:
        """Steps of the job in a task of some ranks."""
        job = self.job("counted")
        job.epoch(self.loop("some", 3), on=[0, 2])
        try:
            return self.run(job)
        except UsageError as error:
            return str(error)


def main() -> None:
    """All cases, one after another."""
    stop_requests._announced = deque(maxlen=0)  # each run stands for a process of its own
    torchrelay.seed(0)
    session = DistributedSession.from_env(timeout_secs=SECS)
    story = Story(session, Path(sys.argv[1]))
    told = {name: getattr(story, name)() for name in ("mixed", "hooked", "left", "counted")}
    (story.folder / f"rank{story.rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    run_and_leave(main)
