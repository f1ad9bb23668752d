"""`debug: true`: what the operators of a phase's first steps cost, and how much of the time data took.

PaddleRec prints this for its queue datasets; here every phase has it, once per start, in rank 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

_SHOWN = 15
_MILLI = 1e-3
_PERCENT = 100.0


def watched(batches: Iterable[Any], steps: int, tell: Callable[[str], None]) -> Iterator[Any]:
    """The batches; torch's profiler looks at the first `steps` of them, then `tell` gets lines about it."""
    source, data_secs, taken = iter(batches), 0.0, 0
    profiler = torch.profiler.profile(activities=_activities(), acc_events=True)
    began = time.perf_counter()
    profiler.start()
    try:
        while taken < steps:
            asked = time.perf_counter()
            try:
                batch = next(source)
            except StopIteration:
                break
            data_secs += time.perf_counter() - asked
            taken += 1
            yield batch
    finally:
        profiler.stop()
        secs = time.perf_counter() - began
        for line in _lines(profiler.key_averages(), taken, data_secs / max(secs, 1e-9)):
            tell(line)
    yield from source


def _activities() -> list[Any]:
    known = torch.profiler.ProfilerActivity
    return [known.CPU, *([known.CUDA] if torch.cuda.is_available() else [])]


def _lines(rows: Iterable[Any], steps: int, share_of_data: float) -> Iterator[str]:
    """A line for all, then one for each of the dearest operators; milliseconds of itself, without callees."""
    costs = sorted(((_cost_ms(row), row.key, row.count) for row in rows), reverse=True)
    total = max(sum(cost for cost, _, _ in costs), 1e-9)
    yield f"{steps} steps: operators {total:.3f} ms, data {_PERCENT * share_of_data:.1f} % of the time"
    for cost, name, count in costs[:_SHOWN]:
        yield f"  {name}: {cost:.3f} ms, {_PERCENT * cost / total:.1f} %, {count} calls"


def _cost_ms(row: Any) -> float:
    """Of the device where it computed, else of the CPU."""
    return float(row.self_device_time_total or row.self_cpu_time_total) * _MILLI
