"""How costs grow: with ranks, by simulation and in real processes, and with blobs.

    benchmarks/growth ranks     the coordinator of 1,000 blobs x 8 to 10,000 ranks (see `coordinator`)
    benchmarks/growth blobs     real saves and loads of 1,000 to 100,000 blobs in one process
    benchmarks/growth real      real saves of 1 to 64 processes
    benchmarks/growth scale     10,000 blobs on 10,000 ranks: plan, commit, read back (see `scale`)
    benchmarks/growth plot FILE.jsonl FILE.png

With `--output FOLDER` the lines, a page and a plot are left there. `--small` runs a small configuration;
with `--flat` rank 0 reads every rank's post, however many there are. Every line printed is one JSON object:
medians of `--saves` saves after the first one, whose figures begin with `first_`; of `ranks` medians over
`--processes` processes. `blobs` ends with the exponent of the growth
of each figure; one above 1.15 is more than n log n over this range.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

KINDS = ("ddp", "fsdp", "hsdp")
RANKS, SMALL_RANKS = (8, 64, 512, 10_000), (8, 64)
BLOBS, SMALL_BLOBS = (1_000, 10_000, 100_000), (100, 1_000)
PROCESSES, SMALL_PROCESSES = (1, 2, 4, 8, 16, 32, 64), (1, 2)
SCALE, SMALL_SCALE = 10_000, 160
COORDINATED = 1_000
"""Blobs of `ranks`."""
ELEMENTS = 16
"""Of each blob in `blobs`: what costs there is not its bytes."""

Line = dict[str, Any]


def coordinator_lines(ranks: Sequence[int], asked: argparse.Namespace) -> Iterator[Line]:
    """W9: processor seconds of planning and committing on rank 0, the device aside; bytes of the manifest.

    Each point has processes of its own: what is the first save of one would be the second of another.
    """
    given = ["--saves", str(asked.saves), *(["--flat"] if asked.flat else [])]
    for kind in KINDS:
        for nodes in ranks:
            command = [sys.executable, __file__, "--point", kind, str(nodes), *given]
            told = [_told_by(command) for _ in range(asked.processes)]
            yield told[0] | _medians([_secs(one) for one in told]) | {"processes": asked.processes}


def _secs(told: Line) -> Line:
    return {key: value for key, value in told.items() if key.endswith("_secs")}


def _medians(lines: Sequence[Line]) -> Line:
    return {key: statistics.median(one[key] for one in lines) for key in lines[0]}


def _told_by(command: Sequence[str]) -> Line:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
    told: Line = json.loads(done.stdout)
    return told


def coordinator_point(kind: str, nodes: int, saves: int, *, flat: bool) -> Line:
    """The figures of one point, as this process finds them."""
    from bench.coordinator import Coordinator

    with tempfile.TemporaryDirectory() as root:
        coordinator = Coordinator(Path(root), kind, COORDINATED, nodes, flat)
        first = coordinator.save()
        later = [coordinator.save() for _ in range(saves)]
        coordinator.close()
    line = {"what": "coordinator", "kind": kind, "ranks": nodes, "blobs": COORDINATED, "flat": flat}
    return line | _figures(first, later)


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


def scale_lines(size: int, *, every: bool) -> Iterator[Line]:
    """As many blobs as ranks, of every kind: plan, manifest, commit and what a reader makes of it."""
    from bench.everybody import KINDS as ALL_KINDS
    from bench.scale import measured as measured_at_scale

    for kind in ALL_KINDS:
        with tempfile.TemporaryDirectory() as root:
            yield measured_at_scale(Path(root), kind, size, size, every=every)


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
    """Saves of so many real processes that replicate 1,000 small tensors, between two barriers.

    Seconds that rank 0 waits from the call to the acknowledgement, processor seconds of its process and of
    all of them together in a save, and the memory of all of them, shared pages counted once, in MB.
    """
    for count in counts:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        with tempfile.TemporaryDirectory() as root:
            asked = [__file__, "--rank-of", root, "--saves", str(saves)]
            done = subprocess.run(
                [*command, *asked], capture_output=True, text=True, timeout=900, check=False
            )
            if done.returncode:
                raise SystemExit(f"{count} processes ended with {done.returncode}: {done.stderr[-2000:]}")
            ranks = [json.loads(Path(root, f"rank-{rank}.json").read_text()) for rank in range(count)]
        together = [sum(secs) for secs in zip(*(one["processor_secs"] for one in ranks), strict=True)]
        rows = zip(ranks[0]["secs"], ranks[0]["processor_secs"], together, strict=True)
        found = [
            dict(zip(("save_secs", "processor_secs", "all_processor_secs"), row, strict=True)) for row in rows
        ]
        memory = round(sum(one["memory_mb"] for one in ranks))
        yield {
            "what": "processes",
            "ranks": count,
            "blobs": 1000,
            "cores": os.cpu_count(),
            "memory_mb": memory,
            **_figures(found[0], found[1:]),
        }


def _as_rank(root: str, saves: int) -> None:
    """One of the processes of `process_lines`; leaves its figures in a file."""
    import torch

    from torchrelay import DistributedSession, Job, MultiNodeCheckpointManager

    torch.set_num_threads(1)
    session = DistributedSession.from_env(start_secs=300.0)
    manager = MultiNodeCheckpointManager(Path(root, "run"), reuse=False)  # nothing changes here
    node = session.local_nodes[0].name
    tensors = {f"w{index:06d}": torch.full((ELEMENTS,), float(index)) for index in range(1000)}
    session.workspace(node).update(tensors)
    manager.bind(Job("growth"))
    session.run(manager.init([place.name for place in session.nodes]))
    manager.engine.ledger.in_run = True
    secs, processor_secs = [], []
    for epoch in range(saves + 1):
        torch.distributed.barrier()
        begin, begun = time.perf_counter(), time.process_time()
        session.run(manager.save(epoch))
        secs.append(time.perf_counter() - begin)
        processor_secs.append(time.process_time() - begun)
    torch.distributed.barrier()
    found = {"secs": secs, "processor_secs": processor_secs, "memory_mb": _memory_mb()}
    Path(root, f"rank-{session.peers.rank}.json").write_text(json.dumps(found))
    manager.engine.ledger.close()
    session.close()


def _memory_mb() -> float:
    """Memory of this process, in which pages that processes share count in equal parts."""
    told = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in told if line.startswith("Pss:")) / 1000


def _figures(first: Line, later: Sequence[Line]) -> Line:
    """Medians of what was measured after the first save, and the first save's own."""
    medians = {key: statistics.median(one[key] for one in later) for key in first}
    return {**{f"first_{key}": value for key, value in first.items()}, **medians}


def _exponent(lines: Sequence[Line], key: str) -> float:
    """How a figure grows between the last two sizes: 1 is linear."""
    small, large = lines[-2], lines[-1]
    return round(math.log(large[key] / small[key]) / math.log(large["blobs"] / small["blobs"]), 3)


def parsed() -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    whats = ("ranks", "blobs", "real", "scale", "plot")
    parser.add_argument("what", nargs="?", choices=whats, default="ranks")
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--processes", type=int, help="ranks: that measure each point; 3, small: 1")
    parser.add_argument("--flat", action="store_true")
    parser.add_argument("--every", action="store_true", help="scale: the shares of all ranks (an hour)")
    parser.add_argument("--output", type=Path, help="a folder for the lines, a page and a plot")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    parser.add_argument("--point", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.processes is None:
        asked.processes = 1 if asked.small else 3
    if min(asked.saves, asked.processes) < 1:
        parser.error("--saves and --processes are numbers from 1")
    if asked.output is not None and not asked.output.is_dir():
        parser.error(f"--output {asked.output} is not a folder")
    if asked.what == "plot" and (len(asked.files) != 2 or not asked.files[0].is_file()):
        parser.error("plot takes a file of results that is there, and the name of a picture")
    return asked


def measured(asked: argparse.Namespace) -> Iterator[Line]:
    """The points that were asked for, one by one."""
    if asked.what == "ranks":
        return coordinator_lines(SMALL_RANKS if asked.small else RANKS, asked)
    if asked.what == "blobs":
        return blob_lines(SMALL_BLOBS if asked.small else BLOBS, asked.saves)
    if asked.what == "scale":
        return scale_lines(SMALL_SCALE if asked.small else SCALE, every=asked.every)
    return process_lines(SMALL_PROCESSES if asked.small else PROCESSES, asked.saves)


def main() -> None:
    """Measure, print a line for each point, and leave all of them in the folder, if one was given."""
    asked = parsed()
    if asked.rank_of is not None:
        _as_rank(asked.rank_of, asked.saves)
        return
    if asked.point is not None:
        kind, nodes = asked.point
        told = coordinator_point(kind, int(nodes), asked.saves, flat=asked.flat)
        print(json.dumps(told))
        return
    from bench import growth_page

    if asked.what == "plot":
        source, picture = asked.files
        if not growth_page.plot(map(json.loads, source.read_text().splitlines()), picture):
            raise SystemExit(
                "benchmarks/growth: error: a plot needs matplotlib (see benchmarks/requirements.txt)"
            )
        return
    lines = []
    for line in measured(asked):
        print(json.dumps(line), flush=True)
        lines.append(line)
    if asked.output is not None:
        today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
        command = shlex.join(["benchmarks/growth", *sys.argv[1:]])
        for path in growth_page.leave(asked.output, asked.what, lines, today, command):
            print(f"wrote {path}", file=sys.stderr)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
