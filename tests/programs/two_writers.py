"""A job that says aloud what is acknowledged; see tests/runners/test_fencing.py.

    two_writers.py PLACE HOW                    the job
    two_writers.py --fork FOLDER PLACE HOW ...  many of them, each a process whose output goes to FOLDER

HOW: `idle` sits in epoch 2 without a step, `steps` takes steps there, `commit` stops itself right before the
record of epoch 2 is created; `-async` behind it saves behind the training.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from torchrelay import Context, Job, JobRunner, MultiNodeCheckpointManager, max_epochs
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.checkpoint.storage.object_store import ObjectStorage

IDLE_SECS = 60.0


class Aloud:
    """A handler: `write` is called once an epoch is acknowledged."""

    def set_params(self, db_prefix: str, db_type: str, node_names: Sequence[str], **more: object) -> None:
        """Nothing to note."""

    def last_epoch(self, user_epoch: int | None = None) -> int | None:
        """From scratch."""
        return user_epoch

    def write(self, epoch: int) -> None:
        """Say so."""
        print(f"saved {epoch}", flush=True)

    def report(self, action: str, stats: Mapping[str, float]) -> None:
        """Nothing to note."""

    def cp_accessible(self, epoch: int | None = None) -> bool:
        """Always."""
        return True


def stop_before_the_record_of(epoch: int) -> None:
    """Stop this process where it is about to fill a slot with a commit of that epoch."""
    for storage in (LocalStorage, ObjectStorage):
        create = storage.link_exclusive

        def link(self, path, data, create=create):
            if b'"kind":"commit"' in data and b'"try":"e%08d-' % epoch in data:
                print("stopping", flush=True)
                # Sent to the process it may reach another thread first, and this one would go on for a while.
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
            return create(self, path, data)

        storage.link_exclusive = link


def train(place: str, how: str) -> None:
    """Run the job; does not return."""
    how, _, asynchronous = how.partition("-")
    job = Job("race", blobs={"weight": torch.zeros(3)})

    @job.epoch
    def train(ctx: Context) -> None:
        if ctx.epoch != 2 or how == "commit":
            return
        if ctx.rank == 0:
            print("training", flush=True)
        if how == "steps":
            for _ in ctx.steps(range(int(IDLE_SECS * 50))):
                time.sleep(0.02)
        time.sleep(IDLE_SECS)

    job.stop_when(max_epochs(3))
    if how == "commit":
        stop_before_the_record_of(2)
    manager = MultiNodeCheckpointManager(place, Aloud(), asynchronous=bool(asynchronous))
    JobRunner(job, manager).main([])


def fork(folder: Path, places: list[str], hows: list[str]) -> None:
    """A process for each; prints their pids, then of each the code it ended with, and when."""
    numbers = {}
    for number, (place, how) in enumerate(zip(places, hows, strict=True)):
        pid = os.fork()
        if pid == 0:
            for stream in (1, 2):
                os.dup2(
                    os.open(folder / f"{number}.{stream}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream
                )
            train(place, how)
        numbers[pid] = number
    print(*numbers, flush=True)
    for _ in places:
        pid, status = os.wait()
        print(numbers[pid], os.waitstatus_to_exitcode(status), time.monotonic(), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--fork":
        fork(Path(sys.argv[2]), sys.argv[3::2], sys.argv[4::2])
    else:
        train(*sys.argv[1:3])
