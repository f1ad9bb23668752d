"""torchrelay as a user runs it: epochs of a job, and the time from one's end to the next one's begin."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import torchrelay
from torchrelay import Context, Job, JobRunner, max_epochs

JOB = "bench"


def timed_epochs(
    run: Path, blobs: Mapping[str, Any], saves: int, durable: Callable[[], None], session: Any = None
) -> list[float]:
    """Seconds of the boundaries of a run whose epochs change none of the blobs: each saves all of them.

    Each epoch computes for a tenth of a second before that, so that background work of the first epoch (it
    archives the source) is not part of a save. `durable` is called after each boundary, inside of the
    measured time, and meets the other ranks.
    """
    job = Job(JOB, blobs=dict(blobs))
    secs: list[float] = []
    begun: list[float] = []

    def passed() -> None:
        if begun:
            durable()
            secs.append(time.perf_counter() - begun[-1])

    @job.epoch
    def compute(ctx: Context) -> None:
        passed()
        until, x = time.perf_counter() + 0.1, torch.full((256, 256), 0.01)
        while time.perf_counter() < until:
            x = torch.tanh(x @ x)
        durable()
        begun.append(time.perf_counter())

    @job.exit
    def last(ctx: Context) -> None:
        passed()

    job.stop_when(max_epochs(saves))
    # Nothing changes between these saves, and other engines write all of it every time.
    JobRunner(job, run, save_initial=False, best=None, reuse=False).train(session)
    if len(secs) != saves:
        raise RuntimeError(f"{len(secs)} boundaries were seen where {saves} saves were asked for")
    return secs


def keep_first(run: Path) -> None:
    """Delete later epochs, as later saves of other engines are deleted.

    So the files to make cold or warm before a load have the same size for every engine.
    """
    for folder in (run / "checkpoints/data").iterdir():
        if not folder.name.startswith("e00000001-"):
            shutil.rmtree(folder)


def hand_over(blobs: Mapping[str, Any], session: Any) -> None:
    """Register objects on this session's nodes, as a run does that saves nothing; earlier ones leave."""
    job = Job(JOB, blobs=dict(blobs))

    @job.epoch
    def nothing(ctx: Context) -> None:
        """A job has to have something to do."""

    job.stop_when(max_epochs(1))
    JobRunner(job).train(session)


def load_epoch(run: Path, session: Any) -> None:
    """Load the first epoch of a run into the objects that were handed over, as a resume does."""
    manager = torchrelay.MultiNodeCheckpointManager(run / "checkpoints")
    manager.bind(Job(JOB))
    session.run(manager.init([place.name for place in session.nodes]))
    session.run(manager.load(1))
