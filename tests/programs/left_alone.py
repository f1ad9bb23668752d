"""Run by torchrun on 2 ranks: one leaves a loop of `ctx.steps` alone, or makes one that the other does not.

left_alone.py <folder> [kind]    writes <folder>/rank<r>.json: by case, how the run ended here, and seconds.
With a kind of loader only `hanging` is run, whose ranks are ended in a collective of the program.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import torchrelay
from torchrelay import EpochLoader, Job, JobRunner, max_epochs
from torchrelay.runners.session.distributed import DistributedSession
from torchrelay.runners.training.exit import run_and_leave

X = torch.arange(32.0).reshape(32, 1)
LOADERS: dict[str, Callable[[], Any]] = {
    "even": lambda: EpochLoader((X,), batch_size=8),
    "list": lambda: list(range(4)),
    "loader": lambda: DataLoader(X, batch_size=8),
}


def breaks(ctx: Any, loader: Any) -> None:
    """Rank 1 leaves at its second batch."""
    for number, _ in enumerate(ctx.steps(loader)):
        if ctx.rank == 1 and number == 1:
            break


def breaks_first(ctx: Any, loader: Any) -> None:
    """Rank 1 leaves at once, and goes on with the next loop."""
    for _ in ctx.steps(loader):
        if ctx.rank == 1:
            break
    for _ in ctx.steps([1, 2, 3], count=False):
        pass


def returns(ctx: Any, loader: Any) -> None:
    """Rank 0 leaves the task out of its loop, whose iterator is still held."""
    ctx.workspace["held"] = steps = ctx.steps(loader)
    for _ in steps:
        if ctx.rank == 0:
            return


def makes_one_more(ctx: Any, loader: Any) -> None:
    """Rank 0 validates within a task of all ranks."""
    for _ in ctx.steps(loader):
        pass
    if ctx.rank == 0:
        for _ in ctx.steps([1, 2], count=False):
            pass


def validates_inside(ctx: Any, loader: Any) -> None:
    """Rank 0 validates within the training loop."""
    for number, _ in enumerate(ctx.steps(loader)):
        if ctx.rank == 0 and number == 1:
            for _ in ctx.steps([1, 2], count=False):
                pass


def raises(ctx: Any, loader: Any) -> None:
    """Rank 1 fails in a step."""
    for number, _ in enumerate(ctx.steps(loader)):
        if ctx.rank == 1 and number == 1:
            raise ValueError("odd")


def breaks_together(ctx: Any, loader: Any) -> None:
    """All leave at the second batch, rank 0 much later."""
    for number, _ in enumerate(ctx.steps(loader)):
        if number == 1:
            time.sleep(0 if ctx.rank else 2.5)
            break
    for _ in ctx.steps([1, 2, 3], count=False):
        pass


CASES = (breaks, breaks_first, returns, makes_one_more, validates_inside, raises, breaks_together)


def hanging(ctx: Any, loader: Any) -> None:
    """Rank 1 leaves alone, rank 0 waits in a collective for it."""
    for number, _ in enumerate(ctx.steps(loader)):
        if ctx.rank == 1 and number == 1:
            break
        torch.distributed.all_reduce(torch.zeros(1))
    if ctx.rank == 1:
        time.sleep(60)


def run(session: Any, task: Callable[[Any, Any], None], kind: str, folder: Path) -> tuple[str, float]:
    """Run one case in a session that earlier ones have left behind."""
    began, loader = time.monotonic(), LOADERS[kind]()
    job = Job(f"{task.__name__}-{kind}", blobs=dict(weights=torch.zeros(2)))
    job.epoch(lambda ctx: task(ctx, loader))
    job.stop_when(max_epochs(1))
    try:
        told = JobRunner(job, folder / str(job.name)).train(session).status
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    return told, time.monotonic() - began


def main() -> None:
    """All cases over all kinds of loaders, or the one that hangs."""
    torchrelay.seed(0)
    session, folder = DistributedSession.from_env(timeout_secs=60), Path(sys.argv[1])
    cases = CASES if len(sys.argv) == 2 else (hanging,)
    kinds = LOADERS if len(sys.argv) == 2 else sys.argv[2:]
    told = {f"{task.__name__} {kind}": run(session, task, kind, folder) for task in cases for kind in kinds}
    (folder / f"rank{session.env.rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    run_and_leave(main)
