"""Run by torchrun: runs of the `owned_job` as it is told, one after another.

    owned.py RUNS        RUNS is JSON: [[run directory, kind, epochs, keywords], ...]

Each rank writes what it has after each run to <run directory>.<number of the run>.rank-<n>.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from owned_job import run

import torchrelay
from torchrelay.runners.training.exit import run_and_leave


def main() -> None:
    """Run what the command line asks for."""
    session = torchrelay.init()
    for number, (directory, kind, epochs, keywords) in enumerate(json.loads(sys.argv[1])):
        told = run(session, Path(directory), kind, epochs, **keywords)
        path = Path(f"{directory}.{number}.rank-{session.env.rank}.json")
        path.write_text(json.dumps(told))


if __name__ == "__main__":
    run_and_leave(main)
