"""What saves cost at the least on this machine: `benchmarks/floor_saves.py [MIB] [ROUNDS] [FOLDER]`.

`plan`: the least that the first coordination of 1,000 blobs in this process needs in Python. It makes a
text and a SHA-256 of the leaves, an order, a manifest with one row for each leaf and rank, a record, and two
files. It checks nothing, and waits for no rank or device. Processor milliseconds, the first and the best.

`frozen`: of MIB 90 % are hashed as the format demands (xxh3-128 of blocks of 1 MiB, on all cores), 10 % are
hashed, written past the page cache from aligned memory, and synced; `all` writes all of it so.

`behind`: what makes an asynchronous save durable: all of it copied by one thread, then hashed and written by
one, as during training.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

BLOCK, SEGMENT = 1 << 20, 4 << 20
WRITERS = 3


def plan(folder: Path, ranks: int, blobs: int = 1000) -> None:
    leaves = [
        (f"model.layers.{number:05d}.weight", "tensor", "float32", [1024, 1024], 4 << 20)
        for number in range(blobs)
    ]
    text = ",".join(
        [f'["{name}","{kind}","{dtype}",{shape},{size}]' for name, kind, dtype, shape, size in leaves]
    )
    digest = hashlib.sha256(text.encode()).hexdigest()
    order = sorted(leaves, key=lambda leaf: (-leaf[4], leaf[0]))
    columns = [list(column) for column in zip(*order, strict=True)]
    shards = [[rank, 4 << 20, 16384, digest] for rank in range(ranks)]
    manifest = json.dumps(
        {"plan": digest, "leaves": columns, "shards": shards}, separators=(",", ":")
    ).encode()
    record = json.dumps({"manifest": hashlib.sha256(manifest).hexdigest()}).encode()
    for name, data in (("manifest", manifest), ("record", record)):
        (folder / "new").write_bytes(data)
        (folder / "new").replace(folder / name)


def memory_of(mib: int) -> memoryview:
    """Aligned memory whose pages are there."""
    found = mmap.mmap(-1, mib << 20)
    ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(found)), 1, mib << 20)
    return memoryview(found)


def hash_parts(parts: Sequence[memoryview]) -> None:
    for part in parts:
        for at in range(0, len(part), BLOCK):
            xxhash.xxh3_128_digest(part[at : at + BLOCK])


def hashed(memory: memoryview, threads: int) -> None:
    parts = [memory[at : at + SEGMENT] for at in range(0, len(memory), SEGMENT)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(hash_parts, (parts[number::threads] for number in range(threads))))


def written(path: Path, memory: memoryview, threads: int) -> None:
    file = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_DIRECT, 0o644)

    def write(offsets: Sequence[int]) -> None:
        for at in offsets:
            hash_parts([memory[at : at + SEGMENT]])
            os.pwrite(file, memory[at : at + SEGMENT], at)

    try:
        os.posix_fallocate(file, 0, len(memory))
        offsets = range(0, len(memory), SEGMENT)
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(write, (offsets[number::threads] for number in range(threads))))
        os.fsync(file)
    finally:
        os.close(file)


def secs_of(act: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    begin = clock()
    act()
    return clock() - begin


def main() -> None:
    mib, rounds = (int(text) for text in (*sys.argv[1:3], "512", "7")[:2])
    with tempfile.TemporaryDirectory(dir=sys.argv[3] if len(sys.argv) > 3 else Path.cwd()) as text:
        folder = Path(text)
        for ranks in (8, 512, 10_000):
            found = [secs_of(lambda: plan(folder, ranks), time.process_time) for _ in range(rounds + 1)]  # noqa: B023
            print(f"plan, {ranks:6} ranks: first {1000 * found[0]:.1f} ms, best {1000 * min(found):.1f} ms")
        memory, staging = memory_of(mib), memory_of(mib)
        frozen = len(memory) * 9 // 10 // SEGMENT * SEGMENT
        addresses = [ctypes.addressof(ctypes.c_char.from_buffer(one)) for one in (staging, memory)]
        cases: dict[str, Callable[[], object]] = {
            "all": lambda: written(folder / "all", memory, WRITERS),
            "hash 90 %": lambda: hashed(memory[:frozen], os.cpu_count() or 1),
            "write 10 %": lambda: written(folder / "part", memory[frozen:], WRITERS),
            "behind": lambda: (
                ctypes.memmove(*addresses, len(memory)),
                written(folder / "behind", staging, 1),
            ),
        }
        secs: dict[str, list[float]] = {name: [] for name in cases}
        for number in range(rounds + 1):
            for name, act in cases.items():
                taken = secs_of(act)
                if number:  # the first round warms up
                    secs[name].append(taken)
        for name, found in secs.items():
            print(f"{name:12} {1000 * statistics.median(found):8.1f} ms, best {1000 * min(found):8.1f} ms")
        shares = zip(secs["hash 90 %"], secs["write 10 %"], secs["all"], strict=True)
        print(
            f"frozen: {statistics.median((one + other) / whole for one, other, whole in shares):.2f} of all"
        )


if __name__ == "__main__":
    main()
