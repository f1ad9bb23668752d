"""A job of several emulated nodes in one process: each trains its own network with its own random draws."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from exact_job import OPTIMIZERS, Net, data
from state_hash import hash_of_node, sha256_of

import torchrelay
from torchrelay import Context, EpochLoader, Job, JobRunner, LocalSession, max_epochs

EPOCHS = 3


@dataclass(frozen=True)
class Nodes:
    """What the nodes of a session have, by name."""

    digests: dict[str, str]
    """SHA-256 of everything, random states included."""
    random: dict[str, str]
    draws: dict[str, list[float]]
    seen: dict[str, list[int]]
    """Samples of the last epoch that ran here, in order."""


def drawing_job(reshard: Any = None) -> Job:
    """Networks of scope `rank`, because every node draws its own initial weights, noise and dropout."""
    job = Job("drawing")
    job.blobs(loader=lambda ctx: EpochLoader(data(), batch_size=16).placed(ctx.rank, ctx.world_size))
    job.blobs(
        model=lambda ctx: Net(),
        optimizer=lambda ctx: OPTIMIZERS["adamw"](ctx["model"].parameters()),
        draws=[],
        scope="rank",
        reshard=reshard,
    )
    job.blobs(seen=[], scope="transient")

    @job.epoch
    def learn(ctx: Context) -> None:
        ctx["seen"] = []
        model = ctx["model"].train()
        for batch in ctx.steps(ctx["loader"]):
            x, y = batch
            loss = torch.nn.functional.cross_entropy(model(x * (1 + 0.1 * np.random.rand())), y)
            ctx["optimizer"].zero_grad()
            loss.backward()
            ctx["optimizer"].step()
            ctx["seen"] = ctx["seen"] + batch.indices.tolist()
        ctx["draws"] = [*ctx["draws"], random.random()]

    return job


def train(
    nodes: int, run_dir: Path, *, seed: int = 5, epochs: int = EPOCHS, reshard: Any = None, **how: Any
) -> Nodes:
    """Train in a new session, and tell what its nodes end with."""
    torchrelay.seed(seed)
    job = drawing_job(reshard)
    job.stop_when(max_epochs(epochs))
    with LocalSession([f"trainer_{rank}" for rank in range(nodes)]) as session:
        JobRunner(job, run_dir).train(session, **how)
        return state_of_nodes(session)


def state_of_nodes(session: LocalSession) -> Nodes:
    """Look at all nodes."""
    names = [place.name for place in session.nodes]
    saved = {name: {**session.workspace(name), "seen": None} for name in names}
    return Nodes(
        {name: hash_of_node(saved[name], session.streams(name)) for name in names},
        {name: sha256_of(session.streams(name).encode()) for name in names},
        {name: session.workspace(name)["draws"] for name in names},
        {name: session.workspace(name)["seen"] for name in names},
    )
