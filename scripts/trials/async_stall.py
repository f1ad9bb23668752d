"""How long a save holds the training: the call at the boundary, and the wait at the gate.

The same state is trained with synchronous and with asynchronous saves, in turns, by one process or, under
torchrun, by replicas of which each writes its share. The first saves of a run are listed separately.
A thread measures the longest time for which it did not get the interpreter. On a busy machine look at the
processor time of the calls.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.parallel import DistributedDataParallel

import torchrelay
from torchrelay import Context, Job, JobRunner, max_epochs
from torchrelay.checkpoint.manager.engine import Engine
from torchrelay.checkpoint.save.staging import StagedCopies

TENSORS = 66
"""Parameters; with two states of fused AdamW each, 198 tensors."""
Times = dict[str, list[float]]
"""Seconds by what they were spent on."""
Spent = list[tuple[float, float]]
"""Seconds by the clock, and of the processor."""


def main() -> None:
    """Print medians and worst cases in milliseconds; under torchrun those of rank 0."""
    parser = argparse.ArgumentParser(prog="scripts/campaigns/async-stall", description=__doc__)
    parser.add_argument("--mib", type=int, default=128, help="parameters and optimizer state together")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--step-ms", type=float, default=200, help="what forward and backward take at least")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    if min(options.mib, options.epochs, options.rounds) < 1 or options.step_ms < 0:
        parser.error("--mib, --epochs and --rounds are numbers from 1, --step-ms is not negative")
    session = torchrelay.init() if "RANK" in os.environ else None
    found: dict[str, Times] = {}
    for number in range(options.rounds):
        for name in ("synchronous", "asynchronous"):
            with folder(session, f"{number}-{name}") as where:
                for what, secs in run(where, session, options, name == "asynchronous").items():
                    found.setdefault(name, {}).setdefault(what, []).extend(secs)
    if session is None or session.peers.rank == 0:
        for name, parts in found.items():
            for what, secs in parts.items():
                print(f"{name:13} {what:16} median {_ms(statistics.median(secs))} worst {_ms(max(secs))} ms")


@contextmanager
def folder(session: Any, name: str) -> Iterator[Path]:
    """A folder that all ranks see."""
    with tempfile.TemporaryDirectory() as mine:
        yield Path(mine if session is None else session.peers.exchange(name, mine)[0]) / "run"
        if session is not None:
            session.peers.exchange(f"{name} done", None)


class Flat(torch.nn.Module):
    """Parameters whose gradients cost little."""

    def __init__(self, mib: int) -> None:
        super().__init__()
        length = (mib << 20) // (3 * 4 * TENSORS)
        self.parts = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(length)) for _ in range(TENSORS))

    def forward(self) -> torch.Tensor:
        """A loss that depends on all of them."""
        return torch.stack([part[:64].sum() for part in self.parts]).sum()


def run(where: Path, session: Any, options: argparse.Namespace, asynchronous: bool) -> Times:
    """Train once; what every save and every wait of the training's thread at the gate took."""
    model = Flat(options.mib)
    trained = model if session is None else DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    job = Job("stall", blobs={"model": model, "optimizer": optimizer})

    @job.epoch
    def learn(ctx: Context) -> None:
        for _ in range(2):
            end = time.monotonic() + options.step_ms / 1e3
            optimizer.zero_grad()
            trained().backward()
            time.sleep(max(0.0, end - time.monotonic()))
            optimizer.step()

    job.stop_when(max_epochs(options.epochs))
    calls: Spent = []
    gates: Spent = []
    with ExitStack() as stack:
        stack.enter_context(patch.object(Engine, "save", _timed(Engine.save, calls)))
        stack.enter_context(patch.object(StagedCopies, "pass_gate", _timed(StagedCopies.pass_gate, gates)))
        starved = stack.enter_context(ticking())
        JobRunner(job, where, asynchronous=asynchronous, keep_last=2).train(session)
    found = {"first calls": calls[:2], "call": calls[2:], "first gates": gates[:2], "gate": gates[2:]}
    times = {what: [wall for wall, _ in spent] for what, spent in found.items() if spent}
    times |= {f"{what}, cpu": [cpu for _, cpu in spent] for what, spent in found.items() if spent}
    return {**times, "starved": starved}


@contextmanager
def ticking() -> Iterator[list[float]]:
    """Let a thread wake up every millisecond; in the list, later, its longest waits for the interpreter."""
    stop, waits, longest = threading.Event(), [0.0], []

    def tick() -> None:
        before = time.monotonic()
        while not stop.wait(0.001):
            now = time.monotonic()
            waits.append(now - before - 0.001)
            before = now

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield longest
    finally:
        stop.set()
        thread.join()
        longest += sorted(waits)[-5:]


def _timed(function: Callable[..., Any], spent: Spent) -> Callable[..., Any]:
    def timed(*given: Any) -> Any:
        begin, cpu = time.monotonic(), time.thread_time()
        try:
            return function(*given)
        finally:
            if threading.current_thread() is threading.main_thread():
                spent.append((time.monotonic() - begin, time.thread_time() - cpu))

    return timed


def _ms(secs: float) -> str:
    return f"{secs * 1e3:8.1f}"


if __name__ == "__main__":
    main()
