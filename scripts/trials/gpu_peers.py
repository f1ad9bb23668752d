"""Measurements of `gpu-check` with peers: stalls, loads, and whether steps wait for the device."""

from __future__ import annotations

import statistics
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gpu_rates import Wide, settle
from safetensors.torch import load_file, save_file

import torchrelay
from torchrelay import Context, EpochLoader, Job, JobRunner, LocalSession, max_epochs
from torchrelay.errors import DamagedError

Rows = dict[str, float | str]
MIB = 1 << 20


def loads(device: torch.device, nbytes: int, rounds: int, where: Path) -> Rows:
    """A load of weights with every byte verified, beside safetensors and torch.load; memory and damage."""
    source = Wide(nbytes, device)
    with torch.no_grad():
        for part in source.parts:
            part.uniform_()
    run = where / "weights"
    _saved(run, source)
    state = {name: one.detach() for name, one in source.state_dict().items()}
    save_file(state, where / "peer.safetensors")
    torch.save(state, where / "peer.pt")
    target = Wide(nbytes, device)
    checkpoint = torchrelay.open_checkpoint(run)

    def ours() -> None:
        checkpoint.load({"model": target})

    def safetensors() -> None:
        target.load_state_dict(load_file(where / "peer.safetensors", device=str(device)))

    def torch_load() -> None:
        target.load_state_dict(torch.load(where / "peer.pt", map_location=device, mmap=True))

    ways: dict[str, Callable[[], None]] = {
        "torchrelay, every byte verified": ours, "safetensors load_file and copy": safetensors,
        "torch.load mapped and copy": torch_load,
    }  # fmt: skip
    secs: dict[str, list[float]] = {name: [] for name in ways}
    rows: Rows = {}
    for number in range(rounds + 1):
        for name, way in ways.items():
            begin = _mark(device)
            way()
            settle(device)
            if number:
                secs[name].append(time.perf_counter() - begin)
            elif device.type == "cuda":
                rows[f"load, {name}, more memory of the device, MiB"] = (
                    torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
                ) / MIB
    size = sum(one.nbytes for one in state.values())
    for name, took in secs.items():
        rows[f"load, {name}, GB/s"] = size / statistics.median(took) / 1e9
    if any(not torch.equal(one, state[name]) for name, one in target.state_dict().items()):
        raise RuntimeError("a load gave other bits than were saved")
    rows["a damaged epoch"] = _refused(run, target)
    return rows


def _mark(device: torch.device) -> float:
    settle(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    return time.perf_counter()


def _saved(run: Path, model: torch.nn.Module) -> None:
    job = Job("weights", blobs={"model": model})

    @job.epoch
    def nothing(ctx: Context) -> None:
        pass

    job.stop_when(max_epochs(1))
    with LocalSession() as session:
        JobRunner(job, run, code=False).train(session)


def _refused(run: Path, target: Wide) -> str:
    """A flipped bit is found, and the tensors on the device are as they were."""
    with torch.no_grad():
        for part in target.parts:
            part.fill_(7.0)
    shard = max(run.rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    with shard.open("r+b") as file:
        file.seek(shard.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 4]))
    try:
        torchrelay.open_checkpoint(run).load({"model": target})
    except DamagedError:
        if all(bool((part == 7.0).all()) for part in target.parts):
            return "refused, nothing was written to the device"
        raise RuntimeError("a refused load has changed its targets") from None
    raise RuntimeError("a flipped bit was loaded")


def peers(device: torch.device, nbytes: int, rounds: int, where: Path) -> Rows:
    """What saves of the same state cost the training with torch.save and with DCP, which wait for no disk."""
    model = Wide(nbytes // 3, device)
    optimizer = torch.optim.AdamW(model.parameters())
    model().backward()
    optimizer.step()
    optimizer.zero_grad()
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        began: list[Any] = []

        def save(number: int) -> None:
            torch.save(state, where / f"peer-{number}.pt")

        def dcp_save(number: int) -> None:
            dcp.save(state, checkpoint_id=where / f"dcp-{number}")

        def dcp_async(number: int) -> None:
            began.append(dcp.async_save(state, checkpoint_id=where / f"dcp-async-{number}"))

        rows: Rows = {}
        for name, way in {"torch.save": save, "DCP save": dcp_save, "DCP async_save": dcp_async}.items():
            took = []
            for number in range(rounds + 1):
                settle(device)
                begin = time.perf_counter()
                way(number)
                took.append(time.perf_counter() - begin)
                while began:
                    began.pop().result()
            rows[f"stall per save, {name}, ms"] = statistics.median(took[1:]) * 1e3
        return rows
    finally:
        dist.destroy_process_group()


def _is_ours(filename: str) -> bool:
    return "/torchrelay/" in filename and not filename.endswith("rank_log.py")  # which notes all warnings


def waits(device: torch.device, where: Path) -> Rows:
    """How often our code waits for the device in an epoch of 60 steps that log the loss, by whom."""
    if device.type != "cuda":
        return {}
    model = torch.nn.Linear(64, 64, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    data = torch.randn(60 * 4, 64)
    loader = EpochLoader((data,), batch_size=4)
    job = Job("waits", blobs={"model": model, "optimizer": optimizer, "loader": loader})
    found: list[str] = []

    def note(*_: Any, **__: Any) -> None:
        mine = [line for line in traceback.extract_stack() if _is_ours(line.filename)]
        if mine:
            found.append(f"{Path(mine[-1].filename).name}:{mine[-1].lineno}")

    @job.epoch
    def epoch(ctx: Context) -> None:
        if ctx.epoch == 2:
            torch.cuda.set_sync_debug_mode("warn")
        for batch in ctx.steps(loader):
            (x,) = batch
            x = x.pin_memory().to(device, non_blocking=True)
            loss = (model(x) - x).square().mean()
            optimizer.zero_grad()
            (loss * batch.weight).backward()
            optimizer.step()
            ctx.log("loss", loss)
            ctx.log("curve", loss, every=5, weight=4)
        torch.cuda.set_sync_debug_mode("default")

    job.stop_when(max_epochs(2))
    with warnings.catch_warnings(), LocalSession() as session:
        warnings.simplefilter("always")
        warnings.showwarning = note
        JobRunner(job, where / "waits", code=False).train(session)
    return {"waits for the device by torchrelay in 60 steps": ", ".join(found) or "none"}
