"""Four ranks that pretend to be on two hosts resume copies of one run, and tell what each has read.

`shared_reads.py FOLDER CASES...`: the run is trained first; each case is `name:share:trouble`, with a trouble
that rank 0 makes in the copy (`flip-<node>`) or that a rank meets: its reads fail (`fail-<rank>`, or
`fail-<rank>-late`), a byte changes on its way to it (`noise-<rank>`), it leaves the others (`cut-<rank>`).
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

# As two launchers would have it, one per host.
os.environ["GROUP_RANK"] = str(int(os.environ["RANK"]) // 2)

import torchrelay
from torchrelay import DistributedSession, Job, JobRunner, max_epochs
from torchrelay.checkpoint.storage.open import CountingStorage
from torchrelay.errors import PeerError, StorageError
from torchrelay.jobs.session import together

SIZES = {"big": 5_000_000, "odd": 1_234_567, **{f"small{index}": 777 + index for index in range(300)}}


class Failing(CountingStorage):
    """Fails every read in place beyond the first `free` bytes of tensors that were counted."""

    def __init__(self, storage: Any, free: int) -> None:
        super().__init__(storage)
        self.free, self.fired = free, 0

    def count(self, nbytes: int) -> None:
        super().count(nbytes)
        if nbytes > 1 << 19 and self.bytes_read > self.free:
            self.fired += 1
            raise StorageError(errno.EIO, "the mount of this rank is gone")


class Troubled:
    """A wire that changes a byte of the second broadcast that comes here, or ends there."""

    def __init__(self, wire: Any, kind: str) -> None:
        self.wire, self.rank, self.kind, self.fired, self.came = wire, wire.rank, kind, 0, 0

    def broadcast(self, memory: memoryview, source: int) -> None:
        self.came += source != self.rank
        here = source != self.rank and self.came == 2 and not self.fired
        self.fired += here
        if here and self.kind == "cut":
            raise PeerError("the cable is cut")
        self.wire.broadcast(memory, source)
        if here:
            memory[len(memory) // 2] ^= 4


class Model(nn.Module):
    """Parameters of `SIZES`, and one of another type."""

    def __init__(self) -> None:
        super().__init__()
        for number, (name, size) in enumerate(SIZES.items()):
            fill = torch.arange(size, dtype=torch.float32).mul_(number + 1).sin_()
            self.register_parameter(name, nn.Parameter(fill))
        self.register_buffer("narrow", torch.arange(600_001).to(torch.bfloat16))


def job(epochs: int, seen: list[Any]) -> Job:
    """Every epoch adds 1 to all; `seen` gets the state before the first epoch of this process."""
    job = Job("shared")
    job.blobs(model=lambda ctx: Model(), scope="replicated")
    job.blobs(own=lambda ctx: torch.full((400_000,), float(ctx.rank)), scope="rank", reshard="by_rank")
    job.stop_when(max_epochs(epochs))

    @job.epoch
    def add(ctx: Any) -> None:
        tensors = {**ctx["model"].state_dict(), "own": ctx["own"]}
        if not seen:
            seen.append((ctx.epoch, {name: tensor.clone() for name, tensor in tensors.items()}))
        with torch.no_grad():
            for tensor in tensors.values():
                tensor += 1

    return job


def right(seen: list[Any], rank: int) -> bool:
    """Whether the state is what the schedule says, bit for bit."""
    epoch, tensors = seen[0]
    wanted = {**Model().state_dict(), "own": torch.full((400_000,), float(rank))}
    for tensor in wanted.values():
        for _ in range(epoch - 1):
            tensor += 1
    return set(wanted) == set(tensors) and all(wanted[name].equal(tensors[name]) for name in wanted)


def flip(run: Path, epoch: int, node: str) -> None:
    """One bit of the largest file of a node is another."""
    tries = sorted((run / "checkpoints/data").glob(f"e{epoch:08d}-*"))
    files = [file for one in tries for file in one.glob(f"*{node}*.safetensors")]
    file = max(files, key=lambda file: file.stat().st_size)
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size // 2)
        byte = opened.read(1)
        opened.seek(-1, 1)
        opened.write(bytes([byte[0] ^ 4]))


def resume(session: Any, run: Path, share: bool | None, trouble: str) -> dict[str, Any]:
    """One resume, told of by each rank."""
    rank, seen, texts = session.peers.rank, [], []
    runner = JobRunner(job(3, seen), run, share_reads=share)
    engine = runner.manager.engine
    kind, _, rest = trouble.partition("-")
    who, _, late = rest.partition("-")
    if kind == "fail" and rank == int(who):
        engine.storage = engine.ledger.storage = Failing(engine.storage, 2 << 20 if late else 0)
    else:
        engine.storage = engine.ledger.storage = CountingStorage(engine.storage)
    wires = [session.wire()] if share else []
    if kind in ("noise", "cut") and rank == int(who):
        wires = [Troubled(session.wire(), kind)]
        session.wire = lambda: wires[0]
    counted: list[int] = []
    loads = engine.load

    def load(*args: Any) -> None:
        before = engine.storage.bytes_read
        try:
            loads(*args)
        finally:
            counted.append(engine.storage.bytes_read - before)

    engine.load = load
    began, error = time.monotonic(), None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            runner.train(session)
        except torchrelay.errors.RelayError as raised:
            error = [type(raised).__name__, str(raised)]
    texts = [str(one.message) for one in caught]
    return {
        "bytes": counted, "error": error, "warned": texts, "secs": time.monotonic() - began,
        "epoch": seen[0][0] if seen else None, "right": right(seen, rank) if seen else None,
        "fired": getattr(engine.storage, "fired", 0),
        "noise": sum(getattr(wire, "fired", 0) for wire in wires),
    }  # fmt: skip


def main() -> None:
    folder = Path(sys.argv[1])
    secs = 6.0 if ":cut-" in sys.argv[-1] else 1800.0
    with DistributedSession.from_env(timeout_secs=secs) as session:
        JobRunner(job(2, []), folder / "run", reuse=False).train(session)
        for case in sys.argv[2:]:
            name, share, trouble = case.split(":")

            def prepare(name: str = name, trouble: str = trouble) -> None:
                if session.peers.rank == 0:
                    shutil.copytree(folder / "run", folder / name)
                    if trouble.startswith("flip-"):
                        flip(folder / name, 2, trouble.removeprefix("flip-"))

            together(session.peers, f"copy {name}", prepare)
            wanted = {"": None, "True": True, "mixed": session.peers.rank != 1 or None}[share]
            told = session.peers.exchange(
                f"told {name}", resume(session, folder / name, wanted, trouble), deadline_secs=60
            )
            vars(session).pop("wire", None)
            if session.peers.rank == 0:
                (folder / f"{name}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
