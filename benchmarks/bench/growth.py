"""How costs grow: with ranks, by simulation and in real processes, and with blobs.

    benchmarks/growth ranks     the coordinator of 1,000 blobs x 8 to 10,000 ranks (see `coordinator`)
    benchmarks/growth blobs     real saves and loads of 1,000 to 100,000 blobs in one process
    benchmarks/growth real      real saves of 1 to 64 processes
    benchmarks/growth plot FILE.jsonl FILE.png

`--small` runs a small configuration; with `--flat` rank 0 reads every rank's post, however many there are.
Every line printed is one JSON object: medians of `--saves` saves after the first one, whose figures begin
with `first_`. `blobs` ends with the exponent of the growth of each figure; one above 1.15 is more than
n log n over this range.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

KINDS = ("ddp", "fsdp", "hsdp")
RANKS, SMALL_RANKS = (8, 64, 512, 10_000), (8, 64)
BLOBS, SMALL_BLOBS = (1_000, 10_000, 100_000), (100, 1_000)
PROCESSES, SMALL_PROCESSES = (1, 2, 4, 8, 16, 32, 64), (1, 2)
ELEMENTS = 16
"""Of each blob in `blobs`: what costs there is not its bytes."""

Line = dict[str, Any]


def coordinator_lines(
    ranks: Sequence[int], saves: int, blobs: int = 1000, *, flat: bool = False
) -> Iterator[Line]:
    """W9: processor seconds of planning and committing on rank 0, the device aside; bytes of the manifest."""
    from bench.coordinator import Coordinator

    for kind in KINDS:
        for nodes in ranks:
            with tempfile.TemporaryDirectory() as root:
                coordinator = Coordinator(Path(root), kind, blobs, nodes, flat)
                first = coordinator.save()
                later = [coordinator.save() for _ in range(saves)]
                coordinator.close()
            yield {
                "what": "coordinator",
                "kind": kind,
                "ranks": nodes,
                "blobs": blobs,
                "flat": flat,
                **_figures(first, later),
            }


def blob_lines(counts: Sequence[int], saves: int) -> Iterator[Line]:
    """Wall seconds until durable, and of a load into live tensors, of so many blobs in one process."""
    found = []
    for count in counts:
        with tempfile.TemporaryDirectory() as root:
            measured = _save_and_load(Path(root), count, saves + 1)
        found.append({"what": "blobs", "blobs": count, **_figures(measured[0], measured[1:])})
        yield found[-1]
    exponents = {key: _exponent(found, key) for key in ("save_secs", "load_secs") if len(found) > 1}
    yield {"what": "growth with blobs", "exponents": exponents}


def _save_and_load(root: Path, count: int, saves: int) -> list[Line]:
    import torch

    from torchrelay import Job, LocalSession, MultiNodeCheckpointManager

    manager = MultiNodeCheckpointManager(root, keep_last=2, reuse=False)  # nothing changes here
    session = LocalSession(["trainer_0"])
    tensors = {f"w{index:06d}": torch.full((ELEMENTS,), float(index)) for index in range(count)}
    session.workspace("trainer_0").update(tensors)
    manager.bind(Job("growth"))
    session.run(manager.init(["trainer_0"]))
    manager.engine.ledger.in_run = True
    found = []
    for epoch in range(saves):
        times = [time.perf_counter()]
        for action in (manager.save, manager.load):
            session.run(action(epoch))
            times.append(time.perf_counter())
        found.append({"save_secs": times[1] - times[0], "load_secs": times[2] - times[1]})
    manager.engine.ledger.close()
    return found


def process_lines(counts: Sequence[int], saves: int) -> Iterator[Line]:
    """Wall seconds per save of rank 0, with so many real processes that replicate 1,000 small tensors."""
    for count in counts:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        with tempfile.TemporaryDirectory() as root:
            asked = [__file__, "--rank-of", root, "--saves", str(saves)]
            told = subprocess.run([*command, *asked], check=True, capture_output=True, text=True, timeout=900)
        times = json.loads(told.stdout.splitlines()[-1])
        figures = _figures({"save_secs": times[0]}, [{"save_secs": one} for one in times[1:]])
        yield {"what": "processes", "ranks": count, "cores": os.cpu_count(), **figures}


def _as_rank(root: str, saves: int) -> None:
    """One of the processes of `process_lines`."""
    import torch

    from torchrelay import DistributedSession, Job, MultiNodeCheckpointManager

    session = DistributedSession.from_env()
    manager = MultiNodeCheckpointManager(root, reuse=False)  # nothing changes here
    node = session.local_nodes[0].name
    tensors = {f"w{index:06d}": torch.full((ELEMENTS,), float(index)) for index in range(1000)}
    session.workspace(node).update(tensors)
    manager.bind(Job("growth"))
    session.run(manager.init([place.name for place in session.nodes]))
    manager.engine.ledger.in_run = True
    times = []
    for epoch in range(saves + 1):
        begin = time.perf_counter()
        session.run(manager.save(epoch))
        times.append(time.perf_counter() - begin)
    manager.engine.ledger.close()
    if session.peers.rank == 0:
        print(json.dumps(times), flush=True)
    session.close()


def _figures(first: Line, later: Sequence[Line]) -> Line:
    """Medians of what was measured after the first save, and the first save's own."""
    medians = {key: statistics.median(one[key] for one in later) for key in first}
    return {**{f"first_{key}": value for key, value in first.items()}, **medians}


def _exponent(lines: Sequence[Line], key: str) -> float:
    """How a figure grows between the last two sizes: 1 is linear."""
    small, large = lines[-2], lines[-1]
    return round(math.log(large[key] / small[key]) / math.log(large["blobs"] / small["blobs"]), 3)


def plot(lines: Iterable[Line], path: Path) -> None:
    """Draw what was measured, one panel per kind of measurement. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels: dict[str, list[Line]] = {}
    for line in lines:
        panels.setdefault(line["what"], []).append(line)
    drawn = {what: found for what, found in panels.items() if "exponents" not in found[0]}
    figure, axes = pyplot.subplots(1, len(drawn), figsize=(6 * len(drawn), 4), squeeze=False)
    for axis, (what, found) in zip(axes[0], drawn.items(), strict=True):
        by = "blobs" if what == "blobs" else "ranks"
        for kind in dict.fromkeys(line.get("kind", "") for line in found):
            some = [line for line in found if line.get("kind", "") == kind]
            for key in (key for key in some[0] if key.endswith("_secs")):
                axis.plot([one[by] for one in some], [one[key] for one in some], "o-", label=f"{kind} {key}")
        axis.set(xscale="log", yscale="log", xlabel=by, ylabel="seconds", title=what)
        axis.legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measure, and print a line for each point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("ranks", "blobs", "real", "plot"), default="ranks")
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--flat", action="store_true")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.saves < 1:
        parser.error("--saves is a number from 1")
    if asked.what == "plot" and (len(asked.files) != 2 or not asked.files[0].is_file()):
        parser.error("plot takes a file of results that is there, and the name of a picture")
    if asked.rank_of is not None:
        _as_rank(asked.rank_of, asked.saves)
        return
    if asked.what == "plot":
        source, picture = asked.files
        plot(map(json.loads, source.read_text().splitlines()), picture)
        return
    lines = {
        "ranks": lambda: coordinator_lines(
            SMALL_RANKS if asked.small else RANKS, asked.saves, flat=asked.flat
        ),
        "blobs": lambda: blob_lines(SMALL_BLOBS if asked.small else BLOBS, asked.saves),
        "real": lambda: process_lines(SMALL_PROCESSES if asked.small else PROCESSES, asked.saves),
    }
    for line in lines[asked.what]():
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
