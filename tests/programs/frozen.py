"""Run by torchrun: trains the schedule that it is given, on plain tensors and a model of every rank.

frozen.py RUN EPOCHS CHANGES KILL     CHANGES is JSON: {epoch: [names]}; rank 0 dies in epoch KILL (0: never)
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from frozen_job import frozen_job

import torchrelay
from torchrelay import JobRunner, max_epochs
from torchrelay.runners.training.exit import run_and_leave


def main() -> None:
    """Train to an epoch."""
    run, epochs, changes, kill = (
        Path(sys.argv[1]),
        int(sys.argv[2]),
        json.loads(sys.argv[3]),
        int(sys.argv[4]),
    )
    session = torchrelay.init()
    job = frozen_job({int(epoch): names for epoch, names in changes.items()})
    if kill and session.env.rank == 0:
        job.epoch(lambda ctx: os.kill(os.getpid(), signal.SIGKILL) if ctx.epoch == kill else None)
    elif kill:
        job.epoch(lambda ctx: None)
    job.stop_when(max_epochs(epochs))
    JobRunner(job, run, reuse=True).train(session)


if __name__ == "__main__":
    run_and_leave(main)
