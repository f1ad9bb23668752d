"""Run by torchrun on 2 ranks: every callback of a program raises on one of them, one case after another.

one_rank_raises.py <folder> [--in-turn | callback ...]    writes <folder>/rank<r>.json: how each case ended

Each callback on rank 0 with saves that wait, and on rank 1 with saves behind the training; those that are
named also the other way round; --in-turn tries each callback on one rank alone.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import torchrelay
from torchrelay import EpochLoader, Job, JobRunner, Task, TaskGroup, max_epochs, open_checkpoint
from torchrelay.runners.session.distributed import DistributedSession
from torchrelay.runners.training.exit import run_and_leave

EPOCHS = 3
CALLBACKS = (
    "setup",
    "init",
    "factory",
    "placed",
    "epoch",
    "iterate",
    "batch",
    "length",
    "collate",
    "local_init",
    "local_exit",
    "report_step",
    "task_init",
    "task_exit",
    "condition",
    "state_dict",
    "load_state_dict",
    "set_params",
    "last_epoch",
    "cp_accessible",
    "write",
    "report",
    "open",
    "log",
    "rewind",
    "close",
    "build",
    "upload",
    "download",
    "exit",
)


class Odd:
    """Raises once, in the callback and on the rank of the case, at the second call."""

    def __init__(self, session: Any, folder: Path, name: str, rank: int) -> None:
        self.session, self.folder, self.name = session, folder, name
        self.bad = rank == session.env.rank
        self.calls = 0
        self.acknowledged: list[int] = []

    def may(self, name: str, at: int = 1) -> None:
        """The callback `name` is called."""
        if not self.bad or name != self.name:
            return
        self.calls += 1
        if self.calls == at:
            raise ValueError(f"odd {name}")

    # An object of the program, a loader of the program

    def state_dict(self) -> dict[str, Any]:
        self.may("state_dict", 2)
        return {"count": 1}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.may("load_state_dict")

    def __iter__(self) -> Iterator[int]:
        self.may("iterate", 2)
        for number in range(3):
            self.may("batch", 5)
            yield number

    def __len__(self) -> int:
        self.may("length", 2)
        return 3

    # A handler

    def set_params(self, *about: Any, **more: Any) -> None:
        self.may("set_params")

    def last_epoch(self, user_epoch: int | None = None) -> int | None:
        self.may("last_epoch")
        return user_epoch

    def cp_accessible(self, epoch: int | None = None) -> bool:
        self.may("cp_accessible", 2)
        return True

    def write(self, epoch: int) -> None:
        self.acknowledged.append(epoch)
        self.may("write", 2)

    def report(self, action: str, stats: Mapping[str, float]) -> None:
        self.may("report", 2)

    # A tracker

    def open(self, run: Any, attempt: int) -> None:
        self.may("open")

    def log(self, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
        self.may("log")

    def rewind(self, epoch: int, step: int) -> None:
        self.may("rewind")

    def close(self) -> None:
        self.may("close")

    # The upload

    def build(self, epoch: int, manager: Any) -> TaskGroup:
        self.may("build")
        group = TaskGroup(name="upload")
        group.add(Task(lambda: self.may("upload")))
        return group

    def placed(self, place: Any) -> bool:
        """Whether a task runs at a place: asked on each rank of all places."""
        self.may("placed")
        return True

    def collate(self, samples: list[Any]) -> torch.Tensor:
        self.may("collate", 2)
        return torch.stack([sample[0] for sample in samples])

    def job(self) -> Job:
        """A job that calls all of them."""
        loader = EpochLoader((torch.arange(8.0),), batch_size=4, collate=self.collate, seed=0)
        job = Job("odd", blobs=dict(weights=torch.zeros(2), loader=loader))
        job.blobs(counter=self, scope="rank")

        def made(ctx: Any) -> torch.Tensor:
            self.may("factory")
            return torch.zeros(1)

        def train(ctx: Any) -> None:
            for _ in ctx.steps(loader):
                ctx.log("steps", 1.0, reduce="sum")
            for _ in ctx.steps(self):
                pass
            self.may("epoch", 2)
            ctx["weights"].add_(1)

        job.blobs(made=made)
        for name in ("setup", "init", "download", "exit"):
            getattr(job, name)(lambda ctx, name=name: self.may(name))
        job.epoch(train)
        job.epoch(lambda ctx: None, on=self.placed)
        job.epoch_group.local_init(lambda: self.may("local_init", 2))
        job.epoch_group.local_exit(lambda: self.may("local_exit", 2))
        job.epoch_group.report_step(lambda: self.may("report_step"))
        hooks = {name: [lambda name=name: self.may(name, 2)] for name in ("task_init", "task_exit")}
        job.epoch_group.add(Task(lambda: None, name="hooked", **hooks))
        job.stop_when(max_epochs(EPOCHS))
        job.stop_when(lambda ctx: bool(self.may("condition", 2)))
        return job

    def run(self, *, asynchronous: bool, trackers: bool = True) -> str:
        """How one start of the job ends on this rank."""
        runner = JobRunner(
            self.job(),
            self.folder,
            upload_task_group_builder=self,
            metadata_handler=self,
            trackers=[self] if trackers else [],
            asynchronous=asynchronous,
        )
        try:
            return str(runner.train(self.session).status)
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def tried(session: Any, folder: Path, name: str, rank: int, asynchronous: bool) -> dict[str, Any]:
    """One case: a start in which a callback raises, one in which it may on a resume, and a clean one."""
    odd, began = Odd(session, folder, name, rank), time.monotonic()
    ends = [odd.run(asynchronous=asynchronous) for _ in range(2)]
    secs, committed = time.monotonic() - began, sorted(set(odd.acknowledged))
    last = Odd(session, folder, "none", 0).run(asynchronous=asynchronous)
    epochs = list(open_checkpoint(folder).epochs)
    weights = open_checkpoint(folder).load_tensors("weights")["weights"].tolist()
    lost = [epoch for epoch in committed if epoch not in epochs]
    return {"ends": ends, "secs": secs, "lost": lost, "last": last, "weights": weights}


def main() -> None:
    """All callbacks on each rank, saves that wait and saves behind the training."""
    torchrelay.seed(0)
    session, folder = DistributedSession.from_env(timeout_secs=60), Path(sys.argv[1])
    named = [name for name in sys.argv[2:] if name != "--in-turn"]
    cases = [(name, rank, rank == 1) for name in named or CALLBACKS for rank in range(2)]
    cases += [(name, rank, rank == 0) for name in named for rank in range(2)]
    if "--in-turn" in sys.argv:
        cases = [case for number, case in enumerate(cases) if number % 4 in (0, 3)]
    told = {
        f"{name} {rank} {behind}": tried(session, folder / f"{name}-{rank}-{behind}", name, rank, behind)
        for name, rank, behind in cases
    }
    (folder / f"rank{session.env.rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    run_and_leave(main)
