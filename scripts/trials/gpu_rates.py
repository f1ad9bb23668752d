"""Measurements of `gpu-check`: copies compared with the pinned path, stalls, saves and loads."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch

import torchrelay
from torchrelay import Context, Job, JobRunner, LocalSession, max_epochs
from torchrelay.checkpoint.manager.engine import Engine
from torchrelay.checkpoint.save.staging import Block, Copier, StagedCopies, StagingSlot

PARTS = 16
"""Parameters of the measured model; with AdamW three tensors each."""
Rows = dict[str, float]


def copies(device: torch.device, nbytes: int, rounds: int) -> Rows:
    """GB/s from the device: into pinned memory as torch does it, unpinned, and as a save stages it."""
    source = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    on_gpu = device.type == "cuda"
    pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=on_gpu)
    plain, block = torch.empty(nbytes, dtype=torch.uint8), Block(nbytes)
    if on_gpu and not block.tensor.is_pinned():
        raise RuntimeError("staging memory is not pinned although CUDA is in use")

    def staged() -> None:
        copier = Copier()
        copier.begin({device} if on_gpu else ())
        copier.copy_late(StagingSlot(block, 0, nbytes), source)
        copier.end()

    limit = _rate(lambda: pinned.copy_(source, non_blocking=True), device, nbytes, rounds)
    ours = _rate(staged, device, nbytes, rounds)
    return {
        "copy, pinned limit, GB/s": limit,
        "copy, unpinned, GB/s": _rate(lambda: plain.copy_(source), device, nbytes, rounds),
        "copy, staged by a save, GB/s": ours,
        "staged / limit": ours / limit,
    }


def _rate(copy: Callable[[], object], device: torch.device, nbytes: int, rounds: int) -> float:
    secs = []
    for _ in range(rounds + 1):
        settle(device)
        begin = time.perf_counter()
        copy()
        settle(device)
        secs.append(time.perf_counter() - begin)
    return nbytes / min(secs[1:]) / 1e9


def settle(device: torch.device) -> None:
    """Wait for all work of the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Wide(torch.nn.Module):
    """Parameters of so many bytes in all, whose gradients cost little."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        super().__init__()
        length = max(64, nbytes // (4 * PARTS))
        self.parts = torch.nn.ParameterList(
            torch.nn.Parameter(torch.zeros(length, device=device)) for _ in range(PARTS)
        )

    def forward(self) -> torch.Tensor:
        """A loss that depends on all of them."""
        return torch.stack([part.square().mean() for part in self.parts]).sum()


def saves_and_loads(device: torch.device, nbytes: int, epochs: int, where: Path) -> Rows:
    """How long saves hold the training, how fast they are written, and how fast all of it comes back."""
    model = Wide(nbytes // 3, device)
    optimizer = torch.optim.AdamW(model.parameters())
    rows: Rows = {}
    for name, behind in (("synchronous", False), ("asynchronous", True)):
        stalls = _stalls(where / name, model, optimizer, device, epochs, behind)
        rows[f"stall per save, {name}, ms"] = statistics.median(stalls) * 1e3
        rows[f"stall per save, {name}, worst, ms"] = max(stalls) * 1e3
    size = sum(tensor.nbytes for tensor in _tensors(model, optimizer))
    rows["state, MB"] = size / 1e6
    rows["save, GB/s"] = size / (rows["stall per save, synchronous, ms"] / 1e3) / 1e9
    blank = Wide(nbytes // 3, device)
    fresh = torch.optim.AdamW(blank.parameters())
    settle(device)
    begin = time.perf_counter()
    torchrelay.open_checkpoint(where / "synchronous").load({"model": blank, "optimizer": fresh})
    settle(device)
    rows["load, cached, GB/s"] = size / (time.perf_counter() - begin) / 1e9
    return rows


def _stalls(
    where: Path,
    model: Wide,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    epochs: int,
    behind: bool,
) -> list[float]:
    """The training's wait of each save after the first two: the call, and the gate before the next step."""
    job = Job("stall", blobs={"model": model, "optimizer": optimizer})
    waits: list[float] = []

    @job.epoch
    def learn(ctx: Context) -> None:
        for _ in range(3):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
        settle(device)
        waits.append(0.0)

    def timed(function: Callable[..., object]) -> Callable[..., object]:
        def call(*given: object) -> object:
            begin = time.perf_counter()
            try:
                return function(*given)
            finally:
                if waits:
                    waits[-1] += time.perf_counter() - begin

        return call

    job.stop_when(max_epochs(epochs + 2))
    with (
        patch.object(Engine, "save", timed(Engine.save)),
        patch.object(StagedCopies, "pass_gate", _of_this_thread(StagedCopies.pass_gate, timed)),
        LocalSession() as session,
    ):
        JobRunner(job, where, asynchronous=behind, keep_last=2, reuse=False).train(session)
    return waits[2:]


def _of_this_thread(function: Callable[..., object], timed: Callable[..., object]) -> Callable[..., object]:
    """What waits at the gate is the thread that trains; the one that writes comes there, too."""
    mine, measured = threading.get_ident(), timed(function)

    def call(*given: object) -> object:
        return (measured if threading.get_ident() == mine else function)(*given)

    return call


def _tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [*model.parameters(), *(one for one in states if isinstance(one, torch.Tensor))]
