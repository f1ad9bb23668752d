"""A server in a thread of this process, of a model that a test makes, and handlers that wait for the test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="pip install -e '.[serve]'")

import httpx
import torch

from torchrelay import Job, JobRunner, LocalSession, max_epochs
from torchrelay.runners.programs.request import RequestLimits
from torchrelay.tools.serving.app import Running
from torchrelay.tools.serving.batching import Watching
from torchrelay.tools.serving.handlers import ModelSlot, Served, TensorHandler
from torchrelay.tools.serving.web import access_at, bound_socket

JSON = {"content-type": "application/json"}


@dataclass
class Here:
    """A server that answers at `port`."""

    port: int
    running: Running
    thread: threading.Thread
    client: httpx.Client

    def predict(self, sample: Any, **more: Any) -> httpx.Response:
        return self.client.post("/predict", json={"sample": sample}, **more)

    def metric(self, name: str) -> float:
        """A counter or gauge without labels; sums over labels."""
        lines = self.client.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.split("{")[0].split()[0] == name)


@contextmanager
def serving(
    served: Served,
    *,
    watching: Watching | None = None,
    token: str | None = None,
    host: str = "127.0.0.1",
    **limits: Any,
) -> Iterator[Here]:
    """Serve until the block ends; limits are those of `RequestLimits`."""  # fmt: skip
    listening = bound_socket(host, 0)
    port = listening.getsockname()[1]
    told = RequestLimits(**{"secs": 60.0, "drain_secs": 30.0, **limits})
    running = Running(ModelSlot(served), listening, told, access_at(host, port, token), watching)
    begun = threading.Event()
    thread = threading.Thread(target=lambda: running.run(begun.set), daemon=True)
    thread.start()
    assert begun.wait(60)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            yield Here(port, running, thread, client)
    finally:
        running.stop()
        thread.join(60)
        listening.close()
    assert not thread.is_alive()


def served(handler: Any, **more: Any) -> Served:
    return Served("a run", handler, **{"epoch": 1, "key": "one", **more})


def linear(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


class Held(TensorHandler):
    """Predicts only when the test lets it; says when it has begun, and how large its batches were."""

    def __init__(self, module: torch.nn.Module | None = None) -> None:
        super().__init__(module or linear())
        self.begun, self.free = threading.Event(), threading.Event()
        self.sizes: list[int] = []

    def predict(self, samples: Sequence[Any]) -> Sequence[Any]:
        self.sizes.append(len(samples))
        self.begun.set()
        assert self.free.wait(60)
        return super().predict(samples)


def wait_until(is_so: Callable[[], bool], secs: float = 60.0) -> None:
    """Wait for a condition; fails the test where it does not come."""
    pause = threading.Event()
    for _ in range(int(secs / 0.01)):
        if is_so():
            return
        pause.wait(0.01)
    raise AssertionError("it did not come to be")


def train(
    where: Path, epochs: int, *, best: bool = True, again_from: int | None = None, fails: bool = False
) -> None:
    """Epochs whose model says their number: all weights are 0, the last bias is the epoch."""
    model = linear()
    with torch.no_grad():
        for one in model.parameters():
            one.zero_()
    optimizer = torch.optim.Adam(model.parameters())
    job = Job("served", blobs={"model": model, "optimizer": optimizer})

    @job.epoch
    def epoch(ctx: Any) -> None:
        if fails:
            raise RuntimeError("as planned")
        for one in model.parameters():
            one.grad = torch.zeros_like(one)
        optimizer.step()  # changes its own state alone
        with torch.no_grad():
            model[2].bias += 1
        ctx.log("val/acc", float(-abs(ctx.epoch - 2)))

    job.stop_when(max_epochs(epochs))
    options = {"best": ("val/acc", "max")} if best else {}
    JobRunner(job, where, **options).train(LocalSession(), again_from)
