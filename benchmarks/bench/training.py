"""W7: a training loop with saves in flight. `python -m bench.training ASKED`.

Everything that is compared comes from the loop's own clock and is taken in the same way for all engines:
how long the call blocks, how long a step waits before the optimizer's own work begins (the gate), when a
save is durable, and what a save costs the loop altogether.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch

from bench.content import nbytes_of
from bench.engines_training import (
    DcpAsync,
    NoHook,
    OrbaxAsync,
    Relay,
    Saving,
    Synchronous,
    TorchSnapshotAsync,
)
from bench.memory import ExtraMemory
from bench.models import Net, State
from bench.task import Answers, Asked

ENGINES: dict[str, Callable[[], Saving]] = {
    "torchrelay, asynchronous": partial(Relay, asynchronous=True),
    "torchrelay, synchronous": partial(Relay, asynchronous=False),
    "torch.save, synchronous": partial(Synchronous, "torch"),
    "safetensors, synchronous": partial(Synchronous, "safetensors"),
    "DCP async": partial(DcpAsync, stager=False),
    "DCP async, DefaultStager": partial(DcpAsync, stager=True),
    "DCP async, DefaultStager, plan caching": partial(DcpAsync, stager=True, caching=True),
    "torchsnapshot async": TorchSnapshotAsync,
    "Orbax async": OrbaxAsync,
}
NBYTES = 1 << 30
STEPS_BETWEEN = 4
QUIET_STEPS = 4
ROWS = 16


@dataclass
class Training:
    """Steps of so many seconds: as many small batches as that takes, then one step of AdamW."""

    state: State
    micro: int = 1
    steps: list[tuple[float, float]] = field(default_factory=list)
    """Seconds of every step, and of what stood before the optimizer's own work in it."""
    _working: list[float] = field(default_factory=list)
    _passed: float = 0.0

    def __post_init__(self) -> None:
        """Look at the clock behind all hooks that stand before every optimizer's step: its own come last."""
        self.state.optimizer.register_step_pre_hook(self._pass)

    def _pass(self, *_: object) -> None:
        self._passed = time.perf_counter()

    def calibrate(self, step_secs: float) -> None:
        """Find the number of small batches from the quickest steps; it never changes later."""
        tried = self.run(5)
        optimizer = min(self._working)
        batch = min(whole - secs for (whole, _), secs in zip(tried, self._working, strict=True))
        self.micro = max(1, round((step_secs - optimizer) / max(1e-6, batch)))
        self.step()
        self.steps.clear()

    def step(self, gate: Callable[[], None] = lambda: None) -> None:
        """Forward, backward, the engine's gate, the optimizer."""
        model, optimizer = self.state.model, self.state.optimizer
        begin = time.perf_counter()
        optimizer.zero_grad()
        for _ in range(self.micro):
            model(torch.full((ROWS, model.width), 0.01)).square().mean().backward()
        middle = time.perf_counter()
        gate()
        optimizer.step()
        end = time.perf_counter()
        self.steps.append((end - begin, self._passed - middle))
        self._working.append(end - self._passed)

    def run(self, count: int, gate: Callable[[], None] = lambda: None) -> list[tuple[float, float]]:
        """So many steps, and their seconds."""
        for _ in range(count):
            self.step(gate)
        return self.steps[-count:]


def trainer(nbytes: int) -> Training:
    """A network and its optimizer, as large as asked for together."""
    torch.manual_seed(0)
    model = Net(nbytes // 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.1)  # many layers, and the numbers must stay finite
    return Training(State(model, torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)))


def measured(asked: Asked, engine: Saving) -> Answers:
    """The loop without saves, with saves, without saves."""
    training = trainer(round(NBYTES * asked.scale))
    training.calibrate(asked.step_secs)
    quiet: list[tuple[float, float]] = []
    with ExtraMemory() as extra:
        loop = engine.loop(
            training.state,
            asked.path,
            asked.saves,
            lambda: quiet.extend(training.run(QUIET_STEPS)),
            lambda gate: training.run(STEPS_BETWEEN, gate),
        )
    quiet += training.run(QUIET_STEPS)
    normal = median(secs for secs, _ in quiet)
    waits = [max(waited for _, waited in steps) for steps in loop.steps]
    excess = (loop.secs - normal * STEPS_BETWEEN * asked.saves) / asked.saves
    later = slice(1, None) if asked.saves > 1 else slice(None)
    held = [call + wait for call, wait in zip(loop.blocked, waits, strict=True)]
    return {
        "call blocked": {"secs": median(loop.blocked[later])},
        "gate": {"secs": median(waits[later])},
        "call and gate": {"secs": median(held[later])},
        "first save": {"secs": held[0]},
        "durable": {"secs": median(loop.durable[later]), "bytes": nbytes_of(training.state.tensors)},
        "slowdown": {"secs": excess, "extra_memory": extra.nbytes},
        "noise of the slowdown": {"secs": _noise(quiet)},
        "step alone": {"secs": normal},
    }


def _noise(quiet: list[tuple[float, float]]) -> float:
    """How much the steps without saves differ, over as many steps as lie between two saves."""
    times = [secs for secs, _ in quiet]
    return (max(times) - min(times)) * STEPS_BETWEEN


def warm_up(asked: Asked, engine: Saving) -> None:
    """One save of little, so that imports are not measured."""
    training = trainer(1 << 16)
    training.step()
    folder = asked.path.with_name(f"{asked.path.name}-trial")
    quiet: Any = NoHook
    engine.loop(training.state, folder, 1, quiet, lambda gate: training.run(1, gate))


def main() -> None:
    """Answer what is asked."""
    asked = Asked.of_process()
    engine = ENGINES[asked.engine]()
    warm_up(asked, engine)
    found = measured(asked, engine)
    asked.answer(found)


if __name__ == "__main__":
    main()
