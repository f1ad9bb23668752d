"""Wrote epochs_v1/: the checkpoints of a run of two nodes, two epochs and a rewind. They are frozen.

python tests/golden/make_epochs.py tests/golden/epochs_v1
"""

from __future__ import annotations

import sys

import torch

from torchrelay import Job, JobRunner, LocalSession, MultiNodeCheckpointManager, max_epochs


def job() -> Job:
    """Two weights that each epoch counts up, one of them nobody's but the node's."""
    made = Job("frozen", blobs={"weights": lambda _: torch.zeros(2, 3)})
    made.blobs(own=lambda ctx: torch.full((2,), 10.0 * ctx.rank), scope="rank", reshard="drop")

    @made.init
    def begin(ctx) -> None:  # type: ignore[no-untyped-def]
        ctx["words"] = {"à": [1, 2.5, None]}

    @made.epoch
    def count(ctx) -> None:  # type: ignore[no-untyped-def]
        ctx["weights"] += torch.arange(6.0).reshape(2, 3)
        ctx["own"] += 1
        ctx.log("val/acc", ctx.epoch / 4)

    made.stop_when(max_epochs(2))
    return made


if __name__ == "__main__":
    with LocalSession(["trainer_0", "trainer_1"]) as session:
        JobRunner(job(), MultiNodeCheckpointManager(sys.argv[1])).train(session)
    with LocalSession(["trainer_0", "trainer_1"]) as session:
        JobRunner(job(), MultiNodeCheckpointManager(sys.argv[1]), resume_from_epoch=1).train(session)
