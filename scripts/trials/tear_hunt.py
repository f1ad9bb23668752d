"""Hunts for torn epochs: many asynchronous saves right behind fused steps, each compared with its truth.

The copies are held up at random by some milliseconds, as by a busy machine. First the guard is taken
out, to prove that the hunt finds what it looks for; then it is put back. Sparse writers change some rows
of large weights in forward: a save that sees that commits nothing, and the weight is copied at the boundary
from then on.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch
from warnings import catch_warnings, simplefilter

import torch
from tear_job import SparseWriters, Trainee, Truth, committed, torn, train

import torchrelay
from torchrelay.checkpoint.save.staging import Copier, StagedCopies

LONGEST_SECS = 0.005
CHUNK = 50
"""Epochs of one run; its directory is deleted before the next."""


@contextmanager
def unguarded() -> Iterator[None]:
    """Disable waiting for the late copies and comparing them with their sources."""
    with patch.multiple(StagedCopies, pass_gate=lambda self: None, compare=lambda self: None):
        yield


def main() -> int:
    """Hunt; the exit code is 1 for a torn epoch, or a hunt that finds none where there must be some."""
    parser = argparse.ArgumentParser(prog="scripts/campaigns/tear-hunt", description=__doc__)
    parser.add_argument("--saves", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--verify", choices=("samples", "full"), default="samples")
    options = parser.parse_args()
    with unguarded(), slow_copies(options.seed):
        blind = hunt(CHUNK, options.seed, options.verify, reuse=False)
    print(f"without the guard: {blind.torn} of {blind.compared} epochs torn")
    with slow_copies(options.seed), catch_warnings():
        simplefilter("ignore", UserWarning)  # each failed save warns; they are counted
        found = hunt(options.saves, options.seed, options.verify)
    print(f"with the guard: {found.torn} of {found.compared} epochs torn, {found.failed} saves failed")
    return int(found.torn > 0 or blind.torn == 0 or found.failed > found.runs)


@contextmanager
def slow_copies(seed: int) -> Iterator[None]:
    """Hold every late copy up at random."""
    dice, copy = random.Random(seed), Copier.copy_late

    def held_up(self: Copier, target: torch.Tensor, source: torch.Tensor) -> None:
        time.sleep(dice.random() * LONGEST_SECS)
        copy(self, target, source)

    with patch.object(Copier, "copy_late", held_up):
        yield


@dataclass
class Found:
    """What a hunt saw. At most the first save of a run may fail: then the writers are known."""

    torn: int = 0
    compared: int = 0
    failed: int = 0
    runs: int = 0


def hunt(saves: int, seed: int, verify: str, *, reuse: bool = True) -> Found:
    """Make so many saves and compare each that was committed.

    With reuse a torn tensor may look like damage instead, by the blocks that were hashed at the boundary.
    """
    found = Found()
    for first in range(0, saves, CHUNK):
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            torchrelay.seed(seed + first)
            truth: Truth = train(
                run,
                min(CHUNK, saves - first),
                trainee=Trainee(seed + first, sparse=SparseWriters(by_hand=True)),
                asynchronous=True,
                verify_staging=verify,
                reuse=reuse,
            )
            kept = committed(run, truth)
            found.runs += 1
            found.compared += len(kept)
            found.failed += len(truth) - len(kept)
            found.torn += sum(bool(torn(run, epoch, expected)) for epoch, expected in kept.items())
    return found


if __name__ == "__main__":
    sys.exit(main())
