"""What verified loads cost beside one that verifies nothing: `benchmarks/loads.py [MIB] [ROUNDS] [FOLDER]`.

The same MIB mebibytes (2048 by default) in 200 tensors are loaded into resident ones, by every engine in
turn, in one process. `load_into`, `Checkpoint.load` and `load_states` do it as they do by default: all
bytes are verified before any tensor changes, and again while they are read into place. `atomic=False` reads
them once. `bytes alone` is the least that this needs: every MiB of the file is read and hashed, then read
into place and hashed, by one thread per core. No header, name or digest is read. safetensors is
`load_file` and `copy_`, by a thread for each core and by one. Files are taken out
of the page cache before cold loads, and read again before warm ones. What the first loads give is compared
bit for bit. Prints a page with medians of ROUNDS (3), the median of the rounds' ratios to safetensors with
their range, and the peak of memory beyond the tensors.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

import torch  # noqa: E402 - the path comes first
import xxhash  # noqa: E402
from bench.caches import make_cold, make_warm, sync_tree  # noqa: E402
from bench.engines_single import RelayEpoch, Safetensors  # noqa: E402
from bench.memory import ExtraMemory  # noqa: E402
from bench.table import hardware, versions  # noqa: E402

import torchrelay  # noqa: E402

TENSORS, MIB = 200, 1 << 20
CORES = os.cpu_count() or 1
Tensors = Mapping[str, torch.Tensor]
Load = Callable[[Path, Tensors], object]


def module_of(tensors: Tensors) -> torch.nn.Module:
    module = torch.nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
    return module


def on_one_thread(path: Path, into: Tensors) -> None:
    torch.set_num_threads(1)
    try:
        Safetensors().load(path, into, whole=True)
    finally:
        torch.set_num_threads(CORES)


def bytes_alone(path: Path, into: Tensors) -> None:
    """The same bytes, which no name is asked for: the file's data ends with those of the last tensor."""
    with (path / "state.safetensors").open("rb", buffering=0) as file:
        at, places = os.fstat(file.fileno()).st_size - sum(one.nbytes for one in into.values()), []
        for memory in (memoryview(into[name].numpy()).cast("B") for name in sorted(into)):
            places += [(at + first, memory[first : first + MIB]) for first in range(0, len(memory), MIB)]
            at += len(memory)

        def check(mine: Sequence[tuple[int, memoryview]]) -> None:
            room = memoryview(bytearray(MIB))
            for first, place in mine:
                os.preadv(file.fileno(), [room[: len(place)]], first)
                xxhash.xxh3_128_digest(room[: len(place)])

        def fill(mine: Sequence[tuple[int, memoryview]]) -> None:
            for first, place in mine:
                os.preadv(file.fileno(), [place], first)
                xxhash.xxh3_128_digest(place)

        share = -(-len(places) // CORES)
        with ThreadPoolExecutor(CORES) as threads:
            for work in (check, fill):
                list(threads.map(work, [places[n * share : (n + 1) * share] for n in range(CORES)]))


ENGINES: dict[str, tuple[str, Load]] = {
    "safetensors": ("safetensors", lambda path, into: Safetensors().load(path, into, whole=True)),
    "safetensors, one thread": ("safetensors", on_one_thread),
    "bytes alone": ("safetensors", bytes_alone),
    "`load_into`": ("file", lambda path, into: torchrelay.load_into(path / "a", into)),
    "`load_into`, `atomic=False`": (
        "file",
        lambda path, into: torchrelay.load_into(path / "a", into, atomic=False),
    ),
    "`open_checkpoint(...).load`": ("epoch", lambda path, into: RelayEpoch().load(path, into, whole=True)),
    "`load_states`": ("archive", lambda path, into: torchrelay.load_states(path / "a", module_of(into))),
}


def save_all(folder: Path, tensors: Tensors) -> None:
    for name in ("safetensors", "file", "archive"):
        (folder / name).mkdir()
    Safetensors().save(folder / "safetensors", tensors)
    torchrelay.save_blobs(folder / "file" / "a", tensors)
    torchrelay.save_states(folder / "archive" / "a", module_of(tensors))
    RelayEpoch().timed_saves([folder / "epoch"], tensors)
    sync_tree(folder)


def measured(folder: Path, tensors: Tensors, into: Tensors, rounds: int) -> list[str]:
    secs: dict[tuple[str, str], list[float]] = {}
    processor: dict[str, list[float]] = {}
    extra: dict[str, int] = {}
    for number in range(rounds + 1):
        for state, prepare in (("cold", make_cold), ("warm", make_warm)):
            for engine, (kind, load) in ENGINES.items():
                if number == 0 and state == "cold":
                    continue  # the first round warms up
                for tensor in into.values():
                    tensor[:1] = 0
                prepare(folder / kind)
                with ExtraMemory() as memory:
                    begin = time.perf_counter(), time.process_time()
                    load(folder / kind, into)
                    taken = time.perf_counter() - begin[0], time.process_time() - begin[1]
                if any(one[0] != tensors[name][0] for name, one in into.items()) or (
                    number == 0 and any(not torch.equal(one, tensors[name]) for name, one in into.items())
                ):
                    raise SystemExit(f"{engine} has loaded other bytes")
                if number:
                    secs.setdefault((state, engine), []).append(taken[0])
                    if state == "warm":
                        processor.setdefault(engine, []).append(taken[1])
                    extra[engine] = max(extra.get(engine, 0), memory.nbytes or 0)
    lines = [
        "| load | cold, s | ratio | warm, s | ratio | processor time, warm, s | memory beyond, MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for engine in ENGINES:
        cells = [cell for state in ("cold", "warm") for cell in figures(secs, state, engine)]
        cells += [f"{statistics.median(processor[engine]):.3f}", f"{extra[engine] / 2**20:.0f}"]
        lines.append(f"| {engine} | {' | '.join(cells)} |")
    return lines


def figures(secs: Mapping[tuple[str, str], list[float]], state: str, engine: str) -> tuple[str, str]:
    own, peer = secs[state, engine], secs[state, "safetensors"]
    ratios = [theirs / ours for theirs, ours in zip(peer, own, strict=True)]
    spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    return f"{statistics.median(own):.3f}", spread


def main(words: list[str]) -> None:
    mib, rounds = (int(words[at]) if len(words) > at else default for at, default in ((0, 2048), (1, 3)))
    torch.set_num_threads(CORES)
    where = Path(words[2] if len(words) > 2 else tempfile.gettempdir())
    elements = max(16, mib * 2**18 // TENSORS)
    tensors = {f"layer{number}": torch.randn(elements) for number in range(TENSORS)}
    into = {name: torch.zeros(elements) for name in tensors}
    with tempfile.TemporaryDirectory(dir=where) as folder:
        save_all(Path(folder), tensors)
        lines = measured(Path(folder), tensors, into, rounds)
    moment = f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC"
    known = ", ".join(f"{name} {version}" for name, version in versions().items() if "not" not in version)
    command = " ".join(["benchmarks/loads.py", *words[:2]])
    print(f"# Loads of {mib} MiB in {TENSORS} tensors\n")
    print(f"{moment}, `{command}`, {rounds} rounds. {hardware(where)}; {known}.")
    print("Medians; ratios are how many times as quick as safetensors in the same round, with their range.\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main(sys.argv[1:])
