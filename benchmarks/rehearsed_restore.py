"""What planning the restore costs before the first save of a structure.

    python benchmarks/rehearsed_restore.py [--beside CHECKOUT] [--leaves 1000 50000] [--rounds 5]
        [--asynchronous]

Each round starts fresh processes, those of this checkout and of `--beside` (an older one) in turns. A
process trains a model with Adam whose leaves are so many small tensors. The first one saves epoch 0 (no
optimizer state yet), 1 (all of it: another structure) and 2 to 4 (the same structure); another resumes and
saves 5 (first of its process) to 8. `start` is what a resume does between its load and its first epoch, where
older code rehearsed a save. Figures are milliseconds of the main thread's processor time, medians and ranges,
of a save's call until it is acknowledged; asynchronous ones, until the boundary returns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PHASES = ("epoch 0", "epoch 1", "epochs 2 to 4", "start", "epoch 5", "epochs 6 to 8")


def process(run_dir: str, leaves: int, epochs: int, *, asynchronous: bool) -> dict[str, list[float]]:
    """Train to an epoch; return the processor milliseconds of each save, and of the start."""
    import torch

    import torchrelay
    from torchrelay import Job, JobRunner, max_epochs
    from torchrelay.checkpoint.manager.engine import Engine

    torch.set_num_threads(1)
    torchrelay.seed(0)
    names = [f"p{index:06d}" for index in range(leaves // 4)]  # with three of Adam's for each
    model = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.ones(8)) for name in names})
    optimizer = torch.optim.Adam(model.parameters())
    job = Job("rehearsed", blobs={"model": model, "optimizer": optimizer})

    @job.epoch
    def train(ctx: Any) -> None:
        for _ in range(2):  # from one step alone nobody knows that the program clears its gradients
            for parameter in model.parameters():
                parameter.grad = torch.ones(8)
            optimizer.step()

    job.stop_when(max_epochs(epochs))
    found: dict[str, list[float]] = {"saves": [], "start": []}

    def timed(name: str, into: str) -> None:
        plain = getattr(Engine, name, None)

        def call(self: Any, *given: Any, **more: Any) -> Any:
            began = time.thread_time()
            try:
                return plain(self, *given, **more)  # type: ignore[misc]
            finally:
                found[into].append((time.thread_time() - began) * 1e3)

        if plain is not None:
            setattr(Engine, name, call)

    timed("save", "saves")
    timed("rehearse", "start")
    JobRunner(job, run_dir, best=None, asynchronous=asynchronous).train()
    return found


def measure(checkout: Path, leaves: int, *, asynchronous: bool) -> dict[str, float]:
    """Two processes of a checkout: a fresh run, and its resume."""
    told = []
    with tempfile.TemporaryDirectory() as folder:
        for epochs in (4, 8):
            asked = [__file__, "--process", f"{folder}/run", str(leaves), str(epochs), str(asynchronous)]
            env = os.environ | {"PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}
            done = subprocess.run(
                [sys.executable, *asked], check=False, env=env, capture_output=True, text=True, timeout=600
            )
            if done.returncode:
                raise SystemExit(done.stderr)
            told.append(json.loads(done.stdout.splitlines()[-1]))
    fresh, later = told[0]["saves"], told[1]["saves"]
    start = sum(told[1]["start"])
    cut = statistics.median(fresh[2:]), statistics.median(later[1:])
    return dict(zip(PHASES, (fresh[0], fresh[1], cut[0], start, later[0], cut[1]), strict=True))


def main() -> None:
    """Measure and print a table."""
    if sys.argv[1:2] == ["--process"]:
        run_dir, leaves, epochs, asynchronous = sys.argv[2:]
        told = process(run_dir, int(leaves), int(epochs), asynchronous=asynchronous == "True")
        print(json.dumps(told))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--beside", type=Path, default=None)
    parser.add_argument("--leaves", type=int, nargs="+", default=[1000, 50000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--asynchronous", action="store_true")
    asked = parser.parse_args()
    checkouts = {"this code": Path(__file__).resolve().parents[1]}
    if asked.beside is not None:
        checkouts = {"code before": asked.beside.resolve(), **checkouts}
    print(f"| leaves | code | {' | '.join(PHASES)} |\n|---|---|{'---|' * len(PHASES)}")
    for leaves in asked.leaves:
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
        for index in range(asked.rounds):
            for name in list(checkouts)[:: 1 if index % 2 == 0 else -1]:
                rounds[name].append(measure(checkouts[name], leaves, asynchronous=asked.asynchronous))
        for name, found in rounds.items():
            cells = []
            for phase in PHASES:
                times = sorted(one[phase] for one in found)
                cells.append(f"{statistics.median(times):.1f} ({times[0]:.1f} to {times[-1]:.1f})")
            print(f"| {leaves} | {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
