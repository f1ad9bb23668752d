"""What loads of large tensors cost at the least: `benchmarks/floor_large.py [SCALE] [ROUNDS]`.

`floor` reads what W5, W4 and W6 read, warm, hashes every block of 1 MiB with xxh3-128, and puts the bytes
into resident memory. It does nothing else: it reads no names and verifies no log, manifest or header.

W5: fresh processes load 5 of 500 tensors, in turns with safetensors and torchrelay; the floor decodes the
header with Python's `json`. W4 and W6: so many processes each read their part of one file; for tensor
parallelism half of the bytes are columns, of which each block goes to two processes. Prints medians and the
best in milliseconds.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy
import xxhash

BLOCK, RUN = 1 << 20, 2 << 20
NAMES = [f"model.layers.{number // 50}.block.{number % 50}.weight" for number in range(500)]


def read_verified(descriptor: int, at: int, memory: memoryview, digests: bytes | None) -> None:
    """Fill `memory` from byte `at`; blocks must have the digests, or are only hashed."""
    for first in range(0, len(memory), RUN):
        part = memory[first : first + RUN]
        if os.preadv(descriptor, [part], at + first) != len(part):
            raise ValueError("the file ends too early")
        for start in range(0, len(part), BLOCK):
            found = xxhash.xxh3_128_digest(part[start : start + BLOCK])
            number = (first + start) // BLOCK
            if digests is not None and found != digests[16 * number : 16 * number + 16]:
                raise ValueError("a block is damaged")


def floor_load(path: Path, into: dict[str, memoryview], threads: int) -> None:
    with path.open("rb", buffering=0) as file:
        length = int.from_bytes(file.read(8), "little")
        head = json.loads(file.read(length))
        digests = bytes.fromhex(head.pop("__metadata__")["digests"])
        size = next(iter(into.values())).nbytes
        each = 16 * -(-size // BLOCK)
        numbers = {name: number for number, name in enumerate(head)}
        waiting = list(into.items())

        def work() -> None:
            while waiting:
                name, memory = waiting.pop()
                own = digests[each * numbers[name] : each * (numbers[name] + 1)]
                read_verified(file.fileno(), 8 + length + head[name]["data_offsets"][0], memory, own)

        side_by_side([work] * threads)


def side_by_side(works: list[Callable[[], None]]) -> None:
    helpers = [threading.Thread(target=work) for work in works[1:]]
    for helper in helpers:
        helper.start()
    works[0]()
    for helper in helpers:
        helper.join()


def one_load(engine: str, path: Path, size: int) -> float:
    """Seconds of the first large load of this process."""
    import torch

    import torchrelay
    from torchrelay.jobs.runtime import undisturbed

    def load(file: Path, tensors: dict[str, torch.Tensor]) -> None:
        if engine == "safetensors":
            from safetensors import safe_open

            with safe_open(file, "pt") as opened:
                for name, tensor in tensors.items():
                    tensor.copy_(opened.get_tensor(name))
        elif engine == "torchrelay":
            torchrelay.load_into(file.with_suffix(".ours"), tensors, strict=False, atomic=False)
        else:
            memories = {
                name: memoryview((ctypes.c_ubyte * one.nbytes).from_address(one.data_ptr())).cast("B")
                for name, one in tensors.items()
            }
            undisturbed()(floor_load)(file, memories, int(engine[-1]))

    small = path.with_name("small")
    load(small, {name: torch.ones(4) for name in NAMES[:2]})
    tensors = {name: torch.zeros(size // 4) for name in NAMES[::100]}
    for file in (path, path.with_suffix(".ours")):
        with file.open("rb", buffering=0) as stream:
            while stream.read(1 << 24):
                pass
    begin = time.perf_counter()
    load(path, tensors)
    return time.perf_counter() - begin


def write(path: Path, names: list[str], size: int) -> None:
    """One file for the floor and safetensors, and one of torchrelay's."""
    import torch

    import torchrelay

    tensors = {name: torch.full((size // 4,), float(number)) for number, name in enumerate(names)}
    torchrelay.save_blobs(path.with_suffix(".ours"), tensors)
    memory = [tensor.numpy().view(numpy.uint8).data for tensor in tensors.values()]
    blocks = [xxhash.xxh3_128_digest(one[at : at + BLOCK]) for one in memory for at in range(0, size, BLOCK)]
    head: dict[str, object] = {
        name: {"dtype": "F32", "shape": [size // 4], "data_offsets": [number * size, (number + 1) * size]}
        for number, name in enumerate(names)
    }
    head["__metadata__"] = {"digests": b"".join(blocks).hex()}
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 4096)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.writelines(memory)


def some_of_many(folder: Path, scale: float, rounds: int) -> None:
    size = round(4_000_000 * scale) // 64 * 64
    path = folder / "file"
    write(folder / "small", NAMES[:2], 16)
    write(path, NAMES, size)
    secs: dict[str, list[float]] = {"floor 1": [], "floor 2": [], "safetensors": [], "torchrelay": []}
    for number in range(rounds):
        engines = list(secs)
        for engine in engines[number % 4 :] + engines[: number % 4]:
            asked = [sys.executable, __file__, "one", engine, str(path), str(size)]
            secs[engine].append(float(subprocess.run(asked, check=True, stdout=subprocess.PIPE).stdout))
    for engine, found in secs.items():
        told(f"W5 {engine}", found)


def part_of_all(path: Path, rank: int, ranks: int, *, columns: bool) -> Callable[[], None]:
    """What one process reads: its part, or for tensor parallelism half of that and of twice as much."""
    size = path.stat().st_size // ranks // (4 * RUN) * (4 * RUN)
    place = mmap.mmap(-1, size)
    place.write(bytes(size))
    memory, descriptor = memoryview(place), os.open(path, os.O_RDONLY)
    slab = numpy.zeros(RUN, numpy.uint8)

    def read() -> None:
        straight = size // 2 if columns else size
        read_verified(descriptor, rank * size, memory[:straight], None)
        first = rank // 2 * 2 * size
        for number in range((size - straight) // (RUN // 2)):
            read_verified(descriptor, first + number * RUN, slab.data, None)
            half = slab.reshape(-1, 2, 4096)[:, rank % 2]
            at = straight + number * RUN // 2
            numpy.frombuffer(memory[at : at + RUN // 2], numpy.uint8).reshape(-1, 4096)[:] = half

    return read


def ranks_at_once(folder: Path, scale: float, rounds: int) -> None:
    path = folder / "all"
    path.write_bytes(bytes(round((1 << 31) * scale)))
    read_in(path)
    context = multiprocessing.get_context("fork")
    for ranks, columns in ((1, False), (2, False), (4, False), (4, True)):
        barrier, found = context.Barrier(ranks), context.SimpleQueue()

        def process(
            reads: list[Callable[[], None]], meet: Callable[[], int], put: Callable[[float], None]
        ) -> None:
            for _ in range(rounds + 1):
                meet()
                begin = time.perf_counter()
                side_by_side(reads)
                meet()
                put(time.perf_counter() - begin)

        parts = max(2, ranks)  # one process reads with two threads
        reads = [part_of_all(path, part, parts, columns=columns) for part in range(parts)]
        processes = [
            context.Process(target=process, args=(reads[rank::ranks], barrier.wait, found.put))
            for rank in range(ranks)
        ]
        for one in processes:
            one.start()
        secs = [max(found.get() for _ in processes) for _ in range(rounds + 1)]
        for one in processes:
            one.join()
        told(f"W4 and W6 floor, {ranks} processes{', tensor parallel' if columns else ''}", secs[1:])


def read_in(path: Path) -> None:
    """Have the page cache hold a file as reads bring it in: as written, it took up to twice as long."""
    with path.open("rb", buffering=0) as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while stream.read(1 << 24):
            pass


def told(what: str, secs: list[float]) -> None:
    print(f"{what:50} {1000 * statistics.median(secs):8.2f} ms, best {1000 * min(secs):8.2f}", flush=True)


def main() -> None:
    if sys.argv[1:2] == ["one"]:
        print(one_load(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])))
        return
    scale, rounds = (float(text) for text in (*sys.argv[1:], *("0.5", "7")[len(sys.argv) - 1 :])[:2])
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        ranks_at_once(Path(folder), scale, int(rounds))
        some_of_many(Path(folder), scale, int(rounds))


if __name__ == "__main__":
    main()
