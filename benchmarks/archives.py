"""What a state archive costs beside a safetensors file: `benchmarks/archives.py [MIB] [ROUNDS] [FOLDER]`.

`save_states` and `load_states` take turns with safetensors' own `save_file` and `load_file` in one process,
on the same module of MIB mebibytes (64 by default; 1024 and more say something) in 24 tensors. Files are
durable when a save ends: `save_file` is followed by fsync of file and directory. They are in the page cache
when a load begins; `load_states` verifies every byte, and what it loads is compared bit for bit. Prints
medians in milliseconds, and the median of the rounds' ratios with their range.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import torchrelay

TENSORS = 24


def module(mib: int) -> torch.nn.Module:
    holder = torch.nn.Module()
    size = max(1, mib * 2**20 // 4 // TENSORS)
    for number in range(TENSORS):
        holder.register_parameter(f"p{number}", torch.nn.Parameter(torch.randn(size)))
    return holder


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def save_safetensors(path: Path, model: torch.nn.Module) -> None:
    save_file({name: one.detach() for name, one in model.named_parameters()}, path)
    sync(path)
    sync(path.parent)


def load_safetensors(path: Path, model: torch.nn.Module) -> None:
    model.load_state_dict(load_file(path))


def timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return (time.perf_counter() - begin) * 1e3


def one_round(
    folder: Path, model: torch.nn.Module, into: torch.nn.Module, *, ours_first: bool
) -> dict[str, float]:
    ours, theirs = folder / "a.zip", folder / "a.safetensors"
    for path in (ours, theirs):
        path.unlink(missing_ok=True)
    sync(folder)
    work: dict[str, Callable[[], object]] = {
        "save ours": lambda: torchrelay.save_states(ours, model),
        "save theirs": lambda: save_safetensors(theirs, model),
        "load ours": lambda: torchrelay.load_states(ours, into),
        "load theirs": lambda: load_safetensors(theirs, into),
    }
    order = [
        f"{verb} {who}" for verb in ("save", "load") for who in ("ours", "theirs")[:: 1 if ours_first else -1]
    ]
    found = {name: timed(work[name]) for name in order}
    for name, one in model.named_parameters():
        if not torch.equal(one, into.get_parameter(name)):
            raise SystemExit(f"{name} did not come back")
    return found


def main(words: list[str]) -> None:
    mib, rounds = (int(words[at]) if len(words) > at else default for at, default in ((0, 64), (1, 5)))
    model, into = module(mib), module(mib)
    with tempfile.TemporaryDirectory(dir=words[2] if len(words) > 2 else None) as folder:
        one_round(Path(folder), model, into, ours_first=True)  # warms up
        found = [one_round(Path(folder), model, into, ours_first=at % 2 == 0) for at in range(rounds)]
    print(f"{mib} MiB, {rounds} rounds, torch {torch.__version__}")
    for verb in ("save", "load"):
        ours, theirs = ([one[f"{verb} {who}"] for one in found] for who in ("ours", "theirs"))
        ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
        print(
            f"{verb}: ours {statistics.median(ours):.1f} ms, safetensors {statistics.median(theirs):.1f} ms, "
            f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
