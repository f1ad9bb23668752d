"""What small tensors cost a Python program at the least: `benchmarks/floor.py [TENSORS] [ROUNDS]`.

`floor` writes and reads a safetensors file with one xxh3-128 per tensor and does nothing else: it looks
at no name, verifies no header, and assumes that memory and file fit. Code that does more in Python
can only be faster by doing it for very many at once. It takes turns with `safetensors` and with
torchrelay in one process (`at once` is `atomic=False`); files are durable when a save ends, and in the page
cache when a load begins. Prints medians in milliseconds, and ratios to safetensors.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import torchrelay
from torchrelay.jobs.runtime import undisturbed

Tensors = Mapping[str, torch.Tensor]
ALIGNMENT = 4096
AT_ONCE = 1000  # buffers of one call


def floor_save(path: Path, tensors: Tensors) -> None:
    head: dict[str, object] = {}
    memories, digests, at = [], [], 0
    for name, tensor in tensors.items():
        size = tensor.nbytes
        head[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        memories.append(memory := (ctypes.c_char * size).from_address(tensor.data_ptr()))
        digests.append(xxhash.xxh3_128_digest(memory))
        at += size
    head["__metadata__"] = {"digests": b"".join(digests).hex()}
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    with path.open("wb", buffering=0) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for first in range(0, len(memories), AT_ONCE):
            os.writev(file.fileno(), memories[first : first + AT_ONCE])
        os.fsync(file.fileno())


def floor_load(path: Path, into: Tensors) -> None:
    with path.open("rb", buffering=0) as file:
        length = int.from_bytes(file.read(8), "little")
        head = json.loads(file.read(length))
        digests = bytes.fromhex(head.pop("__metadata__")["digests"])
        numbers = {name: number for number, name in enumerate(head)}
        for name, tensor in into.items():
            start, stop = head[name]["data_offsets"]
            memory = (ctypes.c_char * (stop - start)).from_address(tensor.data_ptr())
            os.preadv(file.fileno(), [memory], 8 + length + start)
            number = numbers[name]
            if xxhash.xxh3_128_digest(memory) != digests[16 * number : 16 * number + 16]:
                raise ValueError(f"{name} is damaged")


def peer_save(path: Path, tensors: Tensors) -> None:
    save_file(dict(tensors), path)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def peer_load(path: Path, into: Tensors) -> None:
    found = load_file(path)
    for name, tensor in into.items():
        tensor.copy_(found[name])


def peer_some(path: Path, into: Tensors) -> None:
    with safe_open(path, "pt") as file:
        for name, tensor in into.items():
            tensor.copy_(file.get_tensor(name))


def main() -> None:
    count, rounds = (int(text) for text in (*sys.argv[1:], "25000", "7")[:2])
    names = [f"model.layers.{number // 50}.block.{number % 50}.weight" for number in range(count)]
    tensors = {name: torch.randn(1000) for name in names}
    into = {name: torch.zeros(1000) for name in names}
    some = {name: into[name] for name in names[:: max(1, count // 5)][:5]}
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        floor, peer, ours = (Path(folder) / name for name in ("floor", "peer", "ours"))
        compare(
            rounds,
            partial(read_all, Path(folder)),
            {
                "save": {
                    "floor": undisturbed()(partial(floor_save, floor, tensors)),
                    "safetensors": partial(peer_save, peer, tensors),
                    "torchrelay": partial(torchrelay.save_blobs, ours, tensors, overwrite=True),
                },
                "load": {
                    "floor": undisturbed()(partial(floor_load, floor, into)),
                    "safetensors": partial(peer_load, peer, into),
                    "torchrelay": partial(torchrelay.load_into, ours, into),
                    "at once": partial(torchrelay.load_into, ours, into, atomic=False),
                },
                "load 5": {
                    "floor": undisturbed()(partial(floor_load, floor, some)),
                    "safetensors": partial(peer_some, peer, some),
                    "torchrelay": partial(torchrelay.load_into, ours, some, strict=False),
                    "at once": partial(torchrelay.load_into, ours, some, strict=False, atomic=False),
                },
            },
        )


def read_all(folder: Path) -> None:
    """Bring files into the page cache: what was written past it is not there."""
    for path in folder.iterdir():
        path.read_bytes()


def compare(
    rounds: int, warm: Callable[[], object], cases: Mapping[str, Mapping[str, Callable[[], object]]]
) -> None:
    secs: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds + 1):
        for case, engines in cases.items():
            for engine, act in engines.items():
                warm()
                begin = time.perf_counter()
                act()
                if number:  # the first round warms up
                    secs.setdefault((case, engine), []).append(time.perf_counter() - begin)
    for (case, engine), found in secs.items():
        middle = statistics.median(found)
        ratio = statistics.median(secs[case, "safetensors"]) / middle
        print(f"{case:8} {engine:12} {1000 * middle:8.1f} ms  {ratio:.2f}")


if __name__ == "__main__":
    main()
