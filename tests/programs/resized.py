"""Run by torchrun: saves or resumes the `resized_job` as it is told, one run after another.

    resized.py RUNS        RUNS is JSON: [[run directory, policy, keywords], ...]

Each rank writes what it saw of a run to <run directory>.rank-<n>.json.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from resized_job import run

import torchrelay
from torchrelay.runners.training.exit import run_and_leave


def main() -> None:
    """Run what the command line asks for."""
    session = torchrelay.init()
    for directory, policy, keywords in json.loads(sys.argv[1]):
        told = run(session, Path(directory), reshard=policy, **keywords)
        Path(f"{directory}.rank-{session.env.rank}.json").write_text(json.dumps(asdict(told)))


if __name__ == "__main__":
    run_and_leave(main)
