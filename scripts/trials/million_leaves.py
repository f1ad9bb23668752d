"""Measure the cost of a state with very many leaves: each step in its own process, time and memory."""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STEPS = ("save", "resume", "ls", "show", "verify", "open")


def main() -> int:
    """Run the steps one after another; 1 if one of them fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--leaves", type=int, default=1_000_000)
    parser.add_argument("--kind", choices=["module", "dict"], default="module")
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.step:
        return _step(chosen)
    with tempfile.TemporaryDirectory(prefix="million-leaves-") as directory:
        for step in STEPS:
            words = [sys.executable, __file__, "--step", step, "--run", str(Path(directory) / "run")]
            words += ["--leaves", str(chosen.leaves), "--kind", chosen.kind]
            if subprocess.run(words, check=False).returncode:
                print(f"{step} failed")
                return 1
    return 0


def _step(chosen: argparse.Namespace) -> int:
    before = 0.0
    if chosen.step in ("save", "resume"):
        blobs = _state(chosen.kind, chosen.leaves)
        before, began = time.process_time(), time.monotonic()
        done = _train(chosen.run, blobs, 1 if chosen.step == "save" else 2)
        code = 0 if done else 1
    else:
        began = time.monotonic()
        code = _look(chosen.step, chosen.run)
    spent, waited = time.process_time() - before, time.monotonic() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"{chosen.step:8}{spent:8.1f} s processor{waited:8.1f} s{peak:8,} MiB", flush=True)
    return code


def _state(kind: str, count: int) -> dict[str, Any]:
    import torch

    elements = torch.randn(count)
    if kind == "dict":
        return {"table": {f"item_{7919 * i % count:07x}": elements[i : i + 1].clone() for i in range(count)}}
    module = torch.nn.Module()
    parameters = [torch.nn.Parameter(elements[i : i + 1].clone()) for i in range(count)]
    module.many = torch.nn.ParameterList(parameters)
    return {"model": module}


def _train(run: str, blobs: dict[str, Any], epochs: int) -> bool:
    from torchrelay import Job, JobRunner, max_epochs

    job = Job("many", blobs=blobs)

    @job.epoch
    def nothing(ctx: Any) -> None:
        """Only what is saved is looked at."""

    job.stop_when(max_epochs(epochs))
    return JobRunner(job, run).train().committed == epochs


def _look(step: str, run: str) -> int:
    if step == "open":
        from torchrelay import open_checkpoint

        opened = open_checkpoint(run)
        return 0 if len(opened.load_tensors(opened.leaves[0].name)) == 1 else 1
    from torchrelay.tools.cli.main import main as command

    return command(["ckpt", step, f"{run}@1" if step == "show" else run])


if __name__ == "__main__":
    sys.exit(main())
