"""Every agreement of a session on 3 ranks, a failing task on one of them, and live DDP at the end."""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchrelay
from torchrelay.errors import PeerError, StorageError, TaskFailedError
from torchrelay.jobs.job import TaskGroup
from torchrelay.jobs.session import decide, together
from torchrelay.jobs.task import Task
from torchrelay.runners.training.exit import leave

session = torchrelay.init(seed=3)
peers, rank = session.peers, session.env.rank


def raised(kind, work):
    try:
        work()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def fail_on_1():
    if rank == 1:
        raise StorageError("disk full")
    return rank


def fail_task(ctx):
    if ctx.rank == 1:
        raise ValueError("bad sample 17")


def grouped(ctx):
    total = torch.tensor([ctx.rank])
    dist.all_reduce(total, group=ctx.group)
    ctx["total"] = int(total)


assert peers.exchange("ranks", {"rank": rank}) == [{"rank": r} for r in range(3)]
assert decide(peers, "epoch", lambda: 7) == 7
assert "disk full" in raised(StorageError, lambda: together(peers, "write", fail_on_1))
assert [session.agree_flags((rank, -rank)).wait() for _ in range(3)] == [(2, 0)] * 3
assert torchrelay.init() is session
assert [place.host_index for place in session.nodes] == [0, 0, 0]

assert "bad sample 17" in raised(TaskFailedError, lambda: session.run(fail_task))
assert peers.exchange("after a failed task", rank) == [0, 1, 2]

pair = TaskGroup("global", name="pair")
Task(grouped, group=pair, on=[0, 2])
for _ in range(2):
    session.run(pair)
assert rank == 1 or session.workspace()["total"] == 2

model = DistributedDataParallel(torch.nn.Linear(4, 4))
model(torch.ones(2, 4)).sum().backward()
if "mismatch" in sys.argv:
    text = raised(PeerError, lambda: peers.exchange("save" if rank == 2 else "stop", None))
    assert "rank 2 at 'save'" in text, text
os.write(1, f"good {rank} {os.getpid()}".encode() + b"\n")
leave(0)
