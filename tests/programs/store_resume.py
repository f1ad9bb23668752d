"""Run by torchrun, with checkpoints in a store, killed once: `store_resume.py URL FOLDER [external]`.

Every attempt builds its objects from another seed. Each rank writes what its run ended in.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from exact_job import train
from killing import Kill, Killer

import torchrelay
from torchrelay import MultiNodeCheckpointManager
from torchrelay.runners.training.exit import run_and_leave

KILL = Kill(2, 7, 1)


def main() -> None:
    """Train once without and once with a kill, in the same epochs."""
    url, folder, promise = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    session = torchrelay.init()
    attempt, rank = session.env.restart_count, session.env.rank
    if attempt:
        whole = train(session, folder / "whole", seed=5, epochs=3)
        (folder / f"whole-{rank}.json").write_text(json.dumps(asdict(whole)))
    manager = MultiNodeCheckpointManager(url, single_writer="external" if promise else None)
    killed = train(
        session, manager, seed=5 + attempt, epochs=3,
        killer=Killer(folder / "kills", (KILL,)), runner={"resume": "must" if attempt else "auto"},
    )  # fmt: skip
    (folder / f"killed-{rank}.json").write_text(json.dumps(asdict(killed)))


if __name__ == "__main__":
    run_and_leave(main)
