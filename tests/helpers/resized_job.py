"""A job that is saved on some number of nodes, in the middle of its data, and resumed on another.

On 4 ranks `max_steps(7)` ends it in its second pass over the data, 48 of 70 samples done. Every rank
tells which samples it saw in which pass, the state at the start and the end, and what became of its
`own`, a tensor of scope `rank`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from exact_job import SAMPLES, Learner
from state_hash import sha256_of, state_of

import torchrelay
from torchrelay import Context, Job, JobRunner, max_epochs, max_steps
from torchrelay.errors import UsageError
from torchrelay.jobs.cluster import NodePlace
from torchrelay.jobs.random import RandomStreams
from torchrelay.runners.session.base import SessionBase

SEED = 5
STEPS_BEFORE = 7
EPOCHS_BEFORE, EPOCHS = 2, 4
AS_BUILT = -1.0


@dataclass
class State:
    """One rank's state: what all ranks share, its random streams, its own tensor."""

    shared: str
    random: str
    own: float


@dataclass
class Ran:
    """What one rank tells of a run."""

    begin: State | None = None
    end: State | None = None
    seen: list[tuple[int, list[int]]] = field(default_factory=list)
    """Pass over the data, and the samples of one step."""
    error: str | None = None
    untouched: bool = True
    """After an error: whether the objects are as they were built."""


def mean_of(values: dict[str, torch.Tensor], place: NodePlace) -> torch.Tensor:
    """A reshard policy: the mean of all old nodes' tensors plus 100 times the rank."""
    return torch.stack(list(values.values())).mean(0) + 100 * place.rank


POLICIES: dict[str, Any] = {name: name for name in ("error", "drop", "by_rank")}
POLICIES |= {"none": None, "mean": mean_of}


def run(
    session: SessionBase, run_dir: Path, *, reshard: str, first: bool = False, epochs: int = EPOCHS
) -> Ran:
    """Build everything and train: the `first` run ends after 7 steps, others continue to `epochs`."""
    torchrelay.seed(SEED)
    learner = Learner("adamw")
    own = torch.full((2,), AS_BUILT)
    job = Job("resized", blobs=learner.blobs())
    job.blobs(own=own, scope="rank", reshard=POLICIES[reshard])
    told = Ran()

    def state() -> State:
        workspace = session.workspace()
        rank = session.local_nodes[0].rank
        shared = {name: workspace[name] for name in learner.blobs()}
        streams = sha256_of(RandomStreams.capture().encode())
        return State(sha256_of(state_of(shared, buffers=rank == 0)), streams, float(own[0]))

    built = sha256_of(state_of({**learner.blobs(), "own": own}))

    @job.epoch
    def learn(ctx: Context) -> None:
        told.begin = told.begin or state()
        learner.trained.train()
        for batch in ctx.steps(learner.loader):
            told.seen.append((learner.loader.epoch, batch.indices.tolist()))
            learner.step(batch)
        learner.scheduler.step()
        own.fill_(ctx.epoch + ctx.rank / 10 + random.random() / 1000)
        told.end = state()

    job.stop_when(max_steps(STEPS_BEFORE) if first else max_epochs(epochs))
    try:
        JobRunner(job, run_dir).train(session)
    except UsageError as error:
        told.error = str(error)
        told.untouched = sha256_of(state_of({**learner.blobs(), "own": own})) == built
    return told


def samples_of(runs: list[Ran], data_epoch: int) -> list[int]:
    """The samples that all ranks of some runs saw in one pass over the data, sorted."""
    return sorted(index for ran in runs for epoch, step in ran.seen if epoch == data_epoch for index in step)


def every_sample_once() -> list[int]:
    return list(range(SAMPLES))
