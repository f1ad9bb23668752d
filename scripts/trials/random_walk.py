"""Walks at random through everything that can happen to a job's directory, against a dictionary."""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "protocol"))

from walking import STEPS_OF_A_WORLD, Unlike, walk

CHUNK = 10 * STEPS_OF_A_WORLD
"""Steps between two lines; each world has a seed of its own, by which it can be run again."""


def main() -> int:
    """Walk; the exit code is 1 where the log and the dictionary differed."""
    parser = argparse.ArgumentParser(prog="scripts/campaigns/random-walk", description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("--steps is a number from 1")
    warnings.simplefilter("ignore")
    begin, failures = time.monotonic(), 0
    for first in range(0, options.steps, CHUNK):
        seed, count = options.seed + first // STEPS_OF_A_WORLD, min(CHUNK, options.steps - first)
        try:
            walk(count, seed)
        except Unlike as error:
            failures += 1
            print(error)
        took = time.monotonic() - begin
        print(f"from seed {seed}: {first + count} steps, {failures} failures, {took:.0f} s", flush=True)
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
