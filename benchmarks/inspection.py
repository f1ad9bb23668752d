"""How long it takes to look at a run: verbs of the command line as processes, on a run that a JobRunner made.

    python benchmarks/inspection.py [--epochs 1000] [--blobs 100] [--repeats 5] [--where DIRECTORY]

A run in DIRECTORY that is there is measured as it is. Each figure is the median, with its range, of the wall
time of a fresh process, output into a pipe; `help` is what a process costs that looks at nothing.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

VERBS = (
    ("help", ["--help"]),
    ("ls RUNS", ["ls", "{runs}"]),
    ("ls RUN", ["ls", "{run}"]),
    ("ls RUN --json", ["ls", "{run}", "--json"]),
    ("show RUN", ["show", "{run}"]),
    ("ckpt show RUN@last", ["ckpt", "show", "{run}@last"]),
    ("ckpt show RUN@best", ["ckpt", "show", "{run}@best"]),
    ("ckpt du RUN", ["ckpt", "du", "{run}"]),
    ("ckpt why RUN", ["ckpt", "why", "{run}"]),
    ("stats RUN", ["ckpt", "stats", "{run}"]),
    ("compare RUN RUN", ["runs", "compare", "{run}", "{run}"]),
)


def make(run: Path, epochs: int, blobs: int) -> None:
    """Train so many epochs of a job with so many blobs, one of which changes."""
    import torch

    from torchrelay import Job, JobRunner, LocalSession, max_epochs

    job = Job(
        "inspected", blobs={f"part{number:06d}": torch.full((8,), float(number)) for number in range(blobs)}
    )

    @job.epoch
    def train(ctx) -> None:
        ctx["part000000"].add_(1.0)
        ctx.log("val/acc", ctx.epoch % 97 / 97)

    job.stop_when(max_epochs(epochs))
    with LocalSession() as session:
        JobRunner(job, run).train(session)


def measured(arguments: list[str], repeats: int) -> tuple[list[float], list[float], int]:
    """Wall and processor seconds of so many processes, after one that warms the caches; bytes printed."""
    command = [sys.executable, "-m", "torchrelay", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    wall, processor, size = [], [], 0
    for _ in range(repeats + 1):
        begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment)
        wall.append(time.perf_counter() - begin)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        processor.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
        size = len(done.stdout)
    return wall[1:], processor[1:], size


def main() -> None:
    """Make the run where it is not there, measure, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--epochs", type=int, default=1000)
    parser.add_argument("--blobs", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--where", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        runs = asked.where or Path(temporary)
        run = runs / "inspected"
        if not (run / "run.json").exists():
            make(run, asked.epochs, asked.blobs)
        print("| verb | wall, s: median (range) | processor, s | output, kB |\n|---|---|---|---|")
        for name, arguments in VERBS:
            words = [one.format(runs=runs, run=run) for one in arguments]
            wall, processor, size = measured(words, asked.repeats)
            spread = f"{statistics.median(wall):.2f} ({min(wall):.2f} to {max(wall):.2f})"
            print(
                f"| `{name}` | {spread} | {statistics.median(processor):.2f} | {size / 1000:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
