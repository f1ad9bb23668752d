"""Hunts for torn epochs: many asynchronous saves right behind fused steps, each compared with its truth.

The copies are held up at random by some milliseconds, as by a busy machine. First the guard is taken
out, to prove that the hunt finds what it looks for; then it is put back.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from tear_job import Truth, torn, train

from torchrelay.checkpoint.asynchronous.copying import Copier
from torchrelay.checkpoint.asynchronous.stage import Stage

LONGEST_SECS = 0.005
CHUNK = 50
"""Epochs of one run; its directory is deleted before the next."""


@contextmanager
def unguarded() -> Iterator[None]:
    """Nobody waits for the late copies, and nobody looks at their sources again."""
    with patch.multiple(Stage, pass_gate=lambda self: None, compare=lambda self: None):
        yield


def main() -> int:
    """Hunt; the exit code is 1 for a torn epoch, or a hunt that finds none where there must be some."""
    parser = argparse.ArgumentParser(prog="scripts/tear-hunt", description=__doc__)
    parser.add_argument("--saves", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--verify", choices=("samples", "full"), default="samples")
    options = parser.parse_args()
    with unguarded(), slow_copies(options.seed):
        blind, of = hunt(CHUNK, options.seed, options.verify, reuse=False)
    print(f"without the guard: {blind} of {of} epochs torn")
    with slow_copies(options.seed):
        found, of = hunt(options.saves, options.seed, options.verify)
    print(f"with the guard: {found} of {of} epochs torn")
    return int(found > 0 or blind == 0)


@contextmanager
def slow_copies(seed: int) -> Iterator[None]:
    """Hold every late copy up at random."""
    dice, copy = random.Random(seed), Copier.copy_late

    def held_up(self: Copier, target: torch.Tensor, source: torch.Tensor) -> None:
        time.sleep(dice.random() * LONGEST_SECS)
        copy(self, target, source)

    with patch.object(Copier, "copy_late", held_up):
        yield


def hunt(saves: int, seed: int, verify: str, *, reuse: bool = True) -> tuple[int, int]:
    """Make so many saves; how many are torn, of how many that were committed and compared.

    With reuse what is torn may be damage instead: blocks that were hashed at the boundary tell.
    """
    count = compared = 0
    for first in range(0, saves, CHUNK):
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            truth: Truth = train(
                run,
                min(CHUNK, saves - first),
                seed=seed + first,
                asynchronous=True,
                verify_staging=verify,
                reuse=reuse,
            )
            for epoch, expected in truth.items():
                compared += 1
                count += bool(torn(run, epoch, expected))
    return count, compared


if __name__ == "__main__":
    sys.exit(main())
