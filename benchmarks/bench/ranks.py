"""W3, W4, W6: several gloo ranks. `python -m bench.ranks ASKED` in the environment of a launcher."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median

import torch.distributed as dist

from bench.caches import bytes_below
from bench.content import blank, fill, first_difference, local_of, nbytes_of
from bench.engines_ranks import Dcp, PerRank, RankEngine, RankZero, Relay, TorchSnapshot
from bench.least import least_load_secs, least_save_secs
from bench.loads import Before
from bench.memory import ExtraMemory, ready_memory
from bench.models import State, build
from bench.task import Answers, Asked

ENGINES: dict[str, Callable[[], RankEngine]] = {
    "torchrelay epoch": Relay,
    "rank 0 torch.save, no CRC": partial(RankZero, "torch"),
    "rank 0 safetensors": partial(RankZero, "safetensors"),
    "per rank torch.save, no CRC": PerRank,
    "DCP": partial(Dcp, 1),
    "DCP, 2 threads": partial(Dcp, 2),
    "DCP, 2 threads, plan caching": partial(Dcp, 2, caching=True),
    "torchsnapshot, replicated": partial(TorchSnapshot, replicated=True),
    "torchsnapshot, per rank": partial(TorchSnapshot, replicated=False),
}
NBYTES = {"W3": 1 << 30, "W4": 2 << 30, "W6": 2 << 30}


def built(asked: Asked) -> State:
    """The state of this rank."""
    nbytes = round(NBYTES[asked.workload] * asked.scale)
    return build(asked.layout, nbytes, optimizer=asked.workload != "W3")


def saved(asked: Asked, engine: RankEngine, state: State) -> Answers:
    """A first save into the engine's folder, and later ones of the same processes."""
    fill(state.tensors)
    more = [asked.path.with_name(f"{asked.path.name}-{number}") for number in range(1, asked.saves)]
    if dist.get_rank() == 0:
        ready_memory(2 * nbytes_of(state.tensors))
    with ExtraMemory() as extra:
        first, *later = engine.timed_saves([asked.path, *more], state)
    memory = _sum(extra.nbytes)
    if dist.get_rank() == 0:
        for path in more:
            shutil.rmtree(path, ignore_errors=True)
    stored = bytes_below(asked.path)
    if stored < nbytes_of(state.tensors):
        raise RuntimeError(f"{stored} bytes were stored of a state of {nbytes_of(state.tensors)}")
    least = least_save_secs(asked.path.parent, stored)
    found: Answers = {"save": {"secs": first, "extra_memory": memory, "bytes": stored, "least": least}}
    if later:
        found["save again"] = {"secs": median(later), "least": least}
    return found


def loaded(asked: Asked, engine: RankEngine, state: State, action: str) -> Answers:
    """One load on all ranks into what is resident."""
    blank(state.tensors)
    engine.ready(state)
    local = _sum(sum(local_of(tensor).nbytes for tensor in state.tensors.values()))
    before = Before(asked.path, action, local or 0)
    cached = before() if dist.get_rank() == 0 else None
    with ExtraMemory() as extra:
        dist.barrier()
        begin = time.perf_counter()
        engine.load(asked.path, state)
        dist.barrier()
        secs = time.perf_counter() - begin
    memory = _sum(extra.nbytes)
    wrong = first_difference(state.tensors)
    if wrong is not None:
        raise RuntimeError(f"{wrong} was loaded with other bytes than were saved")
    least = least_load_secs(asked.path, state.tensors, before.threads(dist.get_world_size()), before)
    return {action: {"secs": secs, "extra_memory": memory, "cached": cached, "least": least}}


def warm_up(asked: Asked, engine: RankEngine) -> None:
    """Save a little once, so that imports and connections are not measured."""
    trial = asked.path.with_name(f"{asked.path.name}-trial")
    if dist.get_rank() == 0:
        shutil.rmtree(trial, ignore_errors=True)
    dist.barrier()
    state = built(replace(asked, scale=0.0))
    fill(state.tensors)
    engine.timed_saves([trial], state)
    engine.ready(state)
    engine.load(trial, state)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(trial)


def _sum(nbytes: int | None) -> int | None:
    """Bytes of all ranks together."""
    every: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(every, nbytes)
    known = [one for one in every if one is not None]
    return sum(known) if len(known) == len(every) else None


def main() -> None:
    """Measure what is asked; rank 0 prints it."""
    asked = Asked.of_process()
    engine = ENGINES[asked.engine]()
    engine.start()
    warm_up(asked, engine)
    state = built(asked)
    found: Answers = {}
    for action in asked.actions:
        found |= saved(asked, engine, state) if action == "save" else loaded(asked, engine, state, action)
    if dist.get_rank() == 0:
        asked.answer(found)
    dist.barrier()
    engine.stop()


if __name__ == "__main__":
    main()
