"""Accumulates gradients in several ways on all ranks: once, and cut in a window and resumed.

windows.py <folder>    writes <folder>/rank<r>.json: by kind, the digests of both
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sys
from collections import deque
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import torchrelay
from torchrelay import EpochLoader, Job, JobRunner, data_parallel, max_epochs
from torchrelay.runners.session import stop_requests

STEPS, WINDOW, CUT = 5, 4, 6
"""Two epochs; the first ends in a window. A stop asked for in a step ends the next one, here the 7th."""
KINDS = ("ddp", "ddp-quiet", "views", "views-quiet", "fsdp", "fsdp-quiet", "fsdp-mixed-quiet")
"""Quiet: gradients are exchanged at the end of a window alone."""


def train(run: Path, kind: str, session: Any, cut: int = 0) -> tuple[str, str]:
    """Two epochs of a kind, or up to a cut: the status, and a digest of parameters and their state."""
    torchrelay.seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    trained: Any = model
    if kind.startswith("fsdp"):
        mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        how = {"mp_policy": mixed} if "mixed" in kind else {}
        fully_shard(model[0], **how)
        fully_shard(model, **how)
    else:
        trained = data_parallel(model, gradient_as_bucket_view=kind.startswith("views"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    x = torch.randn(STEPS * 4, 6, generator=torch.Generator().manual_seed(1))
    loader = EpochLoader((x, x[:, :3]), batch_size=4)
    job = Job("windows", blobs={"model": model, "optimizer": optimizer, "loader": loader})

    @job.epoch
    def epoch(ctx: Any) -> None:
        for batch in ctx.steps(loader):
            inputs, targets = batch
            number = ctx.total_steps
            ends = number % WINDOW == 0
            quiet = "quiet" in kind and not ends and dist.is_initialized()
            if "quiet" in kind and kind.startswith("fsdp"):
                trained.set_requires_gradient_sync(ends)
            with trained.no_sync() if quiet and not kind.startswith("fsdp") else contextlib.nullcontext():
                ((trained(inputs) - targets).square().mean() * batch.weight / WINDOW).backward()
            if ends:
                optimizer.step()
                optimizer.zero_grad()
            if number == cut and ctx.rank == 0:
                os.kill(os.getpid(), signal.SIGTERM)

    job.stop_when(max_epochs(2))
    result = JobRunner(job, run, best=None, code=False).train(session)
    found = hashlib.sha256()
    for parameter in model.parameters():
        for one in (parameter, *(optimizer.state[parameter][key] for key in ("exp_avg", "exp_avg_sq"))):
            local = one.to_local() if hasattr(one, "to_local") else one
            found.update(local.detach().numpy().tobytes())
    return str(result.status), found.hexdigest()


def main(folder: Path) -> None:
    """All kinds; the runs of whole and of cut trainings stay, and one of each cut before its end."""
    stop_requests._announced = deque(maxlen=0)  # each run stands for a process of its own
    session = torchrelay.init()
    told = {}
    for kind in KINDS:
        whole = train(folder / kind / "whole", kind, session)
        cut = train(folder / kind / "cut", kind, session, CUT)
        told[kind] = [whole, cut, train(folder / kind / "cut", kind, session)]
        train(folder / kind / "left", kind, session, CUT)
    rank = dist.get_rank() if dist.is_initialized() else 0
    (folder / f"rank{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
