"""Trainings of the kinds that GPUs run: whole, and cut by a signal and resumed in a fresh process.

    python gpu_cases.py RUN DEVICE CASE [SIGNAL STEP]     sends itself the signal in that step

Prints the digest of all that was trained, and where it began.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Before CUDA begins: without it cuBLAS may add up in another order.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import xxhash
from torch import nn

import torchrelay
from torchrelay import Context, EpochLoader, Job, JobRunner, max_epochs
from torchrelay.checkpoint.format.dtypes import stored_bytes

EPOCHS, STEPS, BATCH = 4, 5, 16
FIRST, SECOND = 8, 12
"""Steps in which a run is cut: in the middle of epoch 2, and of epoch 3."""


@dataclass
class Training:
    """What a case registers, and what it does with a batch."""

    blobs: dict[str, Any]
    step: Callable[[Context, Any], None]
    sample: tuple[int, ...] = (12,)
    runner: dict[str, Any] = field(default_factory=dict)


def net(where: torch.device, *, norm: bool = True) -> nn.Sequential:
    """A network with a buffer and with its own random numbers."""
    middle = [nn.BatchNorm1d(256)] if norm else []
    return nn.Sequential(nn.Linear(12, 256), *middle, nn.Dropout(0.3), nn.ReLU(), nn.Linear(256, 12)).to(
        where
    )


def learn(model: Any, optimizer: torch.optim.Optimizer) -> Callable[[Context, Any], None]:
    """The plain step."""

    def step(ctx: Context, x: torch.Tensor) -> None:
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ctx.log("loss", loss, every=3)

    return step


def fused(where: torch.device) -> Training:
    """Fused AdamW whose step counts lie on the device, saved asynchronously."""
    model = net(where)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    return Training(
        {"model": model, "optimizer": optimizer}, learn(model, optimizer), runner={"asynchronous": True}
    )


def scaled(where: torch.device) -> Training:
    """Images laid channels last from epoch 2 on, half precision, GradScaler, a schedule."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 3, 3)).to(where)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler(where.type, init_scale=2.0**20, growth_interval=3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * STEPS)

    def step(ctx: Context, x: torch.Tensor) -> None:
        if ctx.epoch > 1:
            model.to(memory_format=torch.channels_last)
            x = x.to(memory_format=torch.channels_last)
        with torch.autocast(where.type, dtype=torch.float16):
            loss = (model(x).float() - x[:, :, 2:-2, 2:-2]).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        ctx.log("loss", loss)

    blobs = {"model": model, "optimizer": optimizer, "scaler": scaler, "schedule": schedule}
    return Training(blobs, step, sample=(3, 12, 12))


def averaged(where: torch.device) -> Training:
    """Adam by foreach, and an average of weights and buffers, saved asynchronously."""
    model = net(where)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=True)
    ema = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
    )
    plain = learn(model, optimizer)

    def step(ctx: Context, x: torch.Tensor) -> None:
        plain(ctx, x)
        ema.update_parameters(model)

    return Training({"model": model, "optimizer": optimizer, "ema": ema}, step, runner={"asynchronous": True})


def windows(where: torch.device) -> Training:
    """Gradients added up over three batches, across the ends of epochs."""
    model = net(where)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, capturable=where.type == "cuda")

    def step(ctx: Context, x: torch.Tensor) -> None:
        loss = (model(x) - x).square().mean()
        (loss / 3).backward()
        if ctx.total_steps % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()
        ctx.log("loss", loss)

    return Training({"model": model, "optimizer": optimizer}, step)


class Kept:
    """An object with state of its own on the device."""

    def __init__(self, where: torch.device) -> None:
        self.mean = torch.zeros(12, device=where)
        self.best: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """What is saved."""
        return {"mean": self.mean, "best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it back."""
        self.mean, self.best = state["mean"], state["best"]


def made(where: torch.device) -> Training:
    """A generator of the device, tensors that a container gains there, and an object's own."""
    model = net(where)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    random, kept = torch.Generator(where), Kept(where)
    random.manual_seed(3)
    history: dict[str, Any] = {"norms": []}
    plain = learn(model, optimizer)

    def step(ctx: Context, x: torch.Tensor) -> None:
        plain(ctx, x + 0.1 * torch.randn(x.shape, device=where, generator=random) + 0.01 * kept.mean)
        kept.mean = kept.mean * 0.9 + x.mean(0)
        kept.best = {"weight": model[0].weight.detach().clone(), "at": ctx.total_steps}
        history["norms"].append(x.norm())
        if sum(one.device != where for one in (*history["norms"], kept.mean, kept.best["weight"])):
            raise RuntimeError("a tensor came back on another device")

    blobs = {"model": model, "optimizer": optimizer, "random": random, "kept": kept, "history": history}
    return Training(blobs, step)


def graphed(where: torch.device) -> Training:
    """Forward and backward replayed as CUDA graphs, which hold the addresses of the parameters."""
    model = net(where, norm=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, capturable=where.type == "cuda")
    called: Any = model
    if where.type == "cuda":
        called = torch.cuda.make_graphed_callables(model, (torch.zeros(BATCH, 12, device=where),))
    return Training(
        {"model": model, "optimizer": optimizer}, learn(called, optimizer), runner={"asynchronous": True}
    )


def compiled(where: torch.device) -> Training:
    """A compiled model under its own name."""
    model = torch.compile(net(where))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return Training({"model": model, "optimizer": optimizer}, learn(model, optimizer))


def halves(where: torch.device) -> Training:
    """Weights in bfloat16 that are trained through copies in float32, which the optimizer holds."""
    model = net(where).to(torch.bfloat16)
    masters = [one.detach().float().requires_grad_() for one in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-2)

    def step(ctx: Context, x: torch.Tensor) -> None:
        loss = (model(x.to(torch.bfloat16)).float() - x).square().mean()
        model.zero_grad()
        loss.backward()
        for master, one in zip(masters, model.parameters(), strict=True):
            master.grad = one.grad.float() if one.grad is not None else None
        optimizer.step()
        with torch.no_grad():
            for master, one in zip(masters, model.parameters(), strict=True):
                one.copy_(master)
        ctx.log("loss", loss)

    return Training({"model": model, "masters": masters, "optimizer": optimizer}, step)


def sharded(where: torch.device) -> Training:
    """FSDP2 with half precision in its collectives. Needs ranks."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = net(where, norm=False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model[0], mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    return Training(
        {"model": model, "optimizer": optimizer}, learn(model, optimizer), runner={"asynchronous": True}
    )


def replicated(where: torch.device) -> Training:
    """DistributedDataParallel whose gradients are views of its buckets. Needs ranks."""
    model = net(where)
    trained = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    def step(ctx: Context, x: torch.Tensor) -> None:
        ends = ctx.total_steps % 3 == 0
        with nullcontext() if ends else trained.no_sync():
            loss = (trained(x) - x).square().mean()
            (loss / 3).backward()
        if ends:
            optimizer.step()
            optimizer.zero_grad()
        ctx.log("loss", loss)

    return Training({"model": model, "optimizer": optimizer}, step)


ALONE = {one.__name__: one for one in (fused, scaled, averaged, windows, made, graphed, compiled, halves)}
ON_RANKS = {one.__name__: one for one in (sharded, replicated)}


def train(run: Path, device: str, case: str, cut: tuple[int, int] | None = None) -> str:
    """Train a case from wherever the run is to its end, or to a cut; the digest of its state."""
    warnings.simplefilter("ignore")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    session = torchrelay.init(seed=5, device=device)
    where = session.device
    training = (ALONE | ON_RANKS)[case](where)
    shape = (BATCH * STEPS, *training.sample)
    data = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    loader = EpochLoader((data,), batch_size=BATCH)
    job = Job(case, blobs={**training.blobs, "loader": loader})
    begun: list[int] = []

    @job.epoch
    def epoch(ctx: Context) -> None:
        for batch in ctx.steps(loader):
            begun.append(ctx.total_steps)
            (x,) = batch
            training.step(ctx, x.to(where))
            if cut and ctx.total_steps == cut[1]:
                os.kill(os.getpid(), cut[0])

    job.stop_when(max_epochs(EPOCHS))
    result = JobRunner(job, run, **training.runner).train(session)
    if result.status != "FINISHED":
        sys.exit(75)
    found = digest(training.blobs, torch.rand(4, device=where))
    session.close()
    print(f"began {begun[0] if begun else 0}", flush=True)
    return found


def digest(blobs: dict[str, Any], drawn: torch.Tensor) -> str:
    """Of every tensor in the state of the blobs, and of what the random state of the device gives next."""
    hashed = xxhash.xxh3_128()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            local = value.to_local() if hasattr(value, "to_local") else value
            hashed.update(stored_bytes(local, "state"))
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                add(value[key])
        elif isinstance(value, (list, tuple)):
            for one in value:
                add(one)
        elif isinstance(value, torch.Generator):
            add(value.get_state())
        elif hasattr(value, "state_dict"):
            add(value.state_dict())
        else:
            hashed.update(repr(value).encode())

    add(blobs)
    add(drawn)
    return str(hashed.hexdigest())


if __name__ == "__main__":
    to, on, name, *numbers = sys.argv[1:]
    sent = (int(signal.Signals[numbers[0]]), int(numbers[1])) if numbers else None
    told = train(Path(to), on, name, sent)
    if os.environ.get("RANK", "0") == "0":
        print(f"digest {told}", flush=True)
