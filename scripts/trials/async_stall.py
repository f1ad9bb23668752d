"""How long a save holds the training: the call at the boundary, and the wait at the gate.

One process trains the same layers with synchronous and with asynchronous saves, in turns.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from torchrelay import Context, Job, JobRunner, max_epochs
from torchrelay.checkpoint.asynchronous.stage import Stage
from torchrelay.checkpoint.engine import Engine


def main() -> None:
    """Print medians and worst cases in milliseconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256, help="parameters and optimizer state together")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--step-ms", type=float, default=100, help="what forward and backward take at least")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    found: dict[str, dict[str, list[float]]] = {}
    for _ in range(options.rounds):
        for name, asynchronous in (("synchronous", False), ("asynchronous", True)):
            times = run(options.mib, options.epochs, options.step_ms / 1e3, asynchronous=asynchronous)
            for what, secs in times.items():
                found.setdefault(name, {}).setdefault(what, []).extend(secs)
    for name, parts in found.items():
        for what, secs in parts.items():
            print(f"{name:13} {what:5} median {_ms(statistics.median(secs))} worst {_ms(max(secs))} ms")


def run(mib: int, epochs: int, step_secs: float, *, asynchronous: bool) -> dict[str, list[float]]:
    """Train once; seconds of every call of save, and of every wait of the training's thread at the gate."""
    width = 512
    layers = max(1, (mib << 20) // (3 * 4 * width * width))
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    job = Job("stall", blobs={"model": model, "optimizer": optimizer})

    @job.epoch
    def learn(ctx: Context) -> None:
        for _ in range(2):
            end = time.monotonic() + step_secs
            optimizer.zero_grad()
            model(torch.rand(4, width)).sum().backward()
            time.sleep(max(0.0, end - time.monotonic()))
            optimizer.step()

    job.stop_when(max_epochs(epochs))
    calls: list[float] = []
    gates: list[float] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(Engine, "save", _timed(Engine.save, calls)),
        patch.object(Stage, "pass_gate", _timed(Stage.pass_gate, gates)),
    ):
        JobRunner(job, Path(folder) / "run", asynchronous=asynchronous, keep_last=2).train()
    return {"call": calls, "gate": gates} if asynchronous else {"call": calls}


def _timed(function: Callable[..., Any], secs: list[float]) -> Callable[..., Any]:
    def timed(*given: Any) -> Any:
        begin = time.monotonic()
        try:
            return function(*given)
        finally:
            secs.append(time.monotonic() - begin)

    return timed


def _ms(secs: float) -> str:
    return f"{secs * 1e3:8.1f}"


if __name__ == "__main__":
    main()
