"""Hunts for pairs of meshes of which one does not read back what the other wrote."""

from __future__ import annotations

import argparse
import random
import sys
import time
from unittest.mock import patch

from mesh_pairs import PAIRS, Unlike, unlike_pairs

from torchrelay.checkpoint.load.reads import boxes

CHUNK = 500
"""Pairs between two lines; each chunk has a seed of its own, by which it can be run again."""


def main() -> int:
    """Hunt; the exit code is 1 where a pair came back unlike."""
    parser = argparse.ArgumentParser(prog="scripts/campaigns/mesh-hunt", description=__doc__)
    parser.add_argument("--pairs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.pairs < 1:
        parser.error("--pairs is a number from 1")
    begin, failures = time.monotonic(), 0
    for first in range(0, options.pairs, CHUNK):
        seed, count = options.seed + first // CHUNK, min(CHUNK, options.pairs - first)
        found = hunt(count, seed)
        failures += len(found)
        for one in found:
            print(f"seed {seed}: {one}")
        done = first + count
        print(f"seed {seed}: {done} pairs, {failures} failures, {time.monotonic() - begin:.0f} s", flush=True)
    return int(failures > 0)


def hunt(pairs: int, seed: int) -> list[Unlike]:
    """So many pairs, some larger than a block; the memory for slabs is large or tiny in turns.

    Tiny ones are read together or, as those of large entries, one after the other.
    """
    rng, found, placed = random.Random(seed), [], boxes._Placed
    for number in range(0, pairs, PAIRS):
        large = number // PAIRS % 2 == 0
        boxes.moves.cache_clear()  # they depend on it
        passing = not large and rng.random() < 0.5
        with (
            patch.object(boxes, "SLAB_BYTES", (2 << 20) if large else 64),
            patch.object(placed, "is_large", property(lambda one: True) if passing else placed.is_large),
        ):
            found += unlike_pairs(rng, large=large)
    return found


if __name__ == "__main__":
    sys.exit(main())
