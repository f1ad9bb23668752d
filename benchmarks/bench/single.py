"""W1, W2, W5: one process with plain tensors. `python -m bench.single ASKED`."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from bench.caches import bytes_below
from bench.content import blank, fill, first_difference, nbytes_of
from bench.engines_single import (
    Broken,
    Dcp,
    Engine,
    Orbax,
    RelayEpoch,
    RelayEpochAtOnce,
    RelayFile,
    RelayFileAtOnce,
    RelayFileUnverified,
    Safetensors,
    TorchSave,
    TorchSnapshot,
)
from bench.least import least_load_secs, least_save_secs
from bench.loads import Before
from bench.memory import ExtraMemory, ready_memory
from bench.task import Answers, Asked

ENGINES: dict[str, Callable[[], Engine]] = {
    "torchrelay file": RelayFile,
    "torchrelay file, atomic=False": RelayFileAtOnce,
    "torchrelay file, unverified": RelayFileUnverified,
    "torchrelay epoch": RelayEpoch,
    "torchrelay epoch, atomic=False": RelayEpochAtOnce,
    "torch.save": partial(TorchSave, crc=True),
    "torch.save, no CRC": partial(TorchSave, crc=False),
    "safetensors": Safetensors,
    "DCP": partial(Dcp, 1),
    "DCP, 2 threads": partial(Dcp, 2),
    "DCP, 2 threads, plan caching": partial(Dcp, 2, caching=True),
    "torchsnapshot": TorchSnapshot,
    "Orbax": Orbax,
    "broken": Broken,
}


@dataclass(frozen=True)
class Shape:
    """So many tensors of so many float32 each at scale 1; `chosen` of them are loaded (0: all)."""

    tensors: int
    elements: int
    chosen: int = 0
    by_count: bool = False

    def scaled(self, scale: float) -> Shape:
        """Fewer tensors, or smaller ones."""
        if self.by_count:
            return Shape(max(10, round(self.tensors * scale)), self.elements)
        return Shape(self.tensors, max(16, round(self.elements * scale)), self.chosen)

    @property
    def nbytes(self) -> int:
        """Bytes that a save writes."""
        return 4 * self.tensors * self.elements

    @property
    def loaded_bytes(self) -> int:
        """Bytes that a load must read."""
        return 4 * (self.chosen or self.tensors) * self.elements

    def resident(self, *, to_save: bool) -> dict[str, torch.Tensor]:
        """The tensors that are saved, or those to be loaded, each with memory of its own."""
        names = [f"model.layers.{i // 50}.block.{i % 50}.weight" for i in range(self.tensors)]
        if self.chosen and not to_save:
            names = names[:: self.tensors // self.chosen][: self.chosen]
        return {name: torch.empty(self.elements) for name in names}


SHAPES = {
    "W1": Shape(200, (1 << 29) // 200),
    "W2": Shape(50_000, 1000, by_count=True),
    "W5": Shape(500, 1_000_000, chosen=5),
}


def saved(asked: Asked, engine: Engine, shape: Shape) -> Answers:
    """A first save into the engine's folder, and later ones of the same process."""
    tensors = shape.resident(to_save=True)
    fill(tensors)
    more = [asked.path.with_name(f"{asked.path.name}-{number}") for number in range(1, asked.saves)]
    ready_memory(2 * nbytes_of(tensors))
    with ExtraMemory() as extra:
        first, *later = engine.timed_saves([asked.path, *more], tensors)
    for path in more:
        shutil.rmtree(path, ignore_errors=True)
    nbytes = bytes_below(asked.path)
    least = least_save_secs(asked.path.parent, nbytes)
    found: Answers = {"save": {"secs": first, "extra_memory": extra.nbytes, "bytes": nbytes, "least": least}}
    if later:
        found["save again"] = {"secs": median(later), "least": least}
    return found


def loaded(asked: Asked, engine: Engine, shape: Shape, action: str) -> Answers:
    """One load into resident tensors."""
    into = shape.resident(to_save=False)
    blank(into)
    before = Before(asked.path, action, nbytes_of(into))
    cached = before()
    with ExtraMemory() as extra:
        begin = time.perf_counter()
        engine.load(asked.path, into, whole=not shape.chosen)
        secs = time.perf_counter() - begin
    wrong = first_difference(into)
    if wrong is not None:
        raise RuntimeError(f"{wrong} was loaded with other bytes than were saved")
    least = least_load_secs(asked.path, into, before.threads(1), before)
    return {action: {"secs": secs, "extra_memory": extra.nbytes, "cached": cached, "least": least}}


def warm_up(asked: Asked, engine: Engine) -> None:
    """Do everything once with little, so that imports are not measured."""
    little = {"a.weight": torch.ones(4), "b.weight": torch.ones(4)}
    trial = asked.path.with_name(f"{asked.path.name}-trial")
    shutil.rmtree(trial, ignore_errors=True)
    engine.timed_saves([trial], little)
    engine.load(trial, little, whole=True)
    shutil.rmtree(trial)


def main() -> None:
    """Answer what is asked."""
    asked = Asked.of_process()
    engine = ENGINES[asked.engine]()
    shape = SHAPES[asked.workload].scaled(asked.scale)
    warm_up(asked, engine)
    found: Answers = {}
    for action in asked.actions:
        found |= saved(asked, engine, shape) if action == "save" else loaded(asked, engine, shape, action)
    asked.answer(found)


if __name__ == "__main__":
    main()
