"""All long programmes, in rounds that take turns; each finished one is a line of a file, for the next start.

The seed of a round is its number. Kills at system calls, errors and power cuts have a programme of their own
(`chaos_campaign`), which notes its rounds beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TRIALS = Path(__file__).resolve().parent
PATIENCE_SECS = 4 * 3600


@dataclass(frozen=True)
class Programme:
    """`total` trials of a kind, `round` of them at a time; `command` gets their number and a seed."""

    name: str
    total: int
    round: int
    command: Sequence[str]

    def words(self, amount: int, seed: int, state: Path) -> list[str]:
        """The command of one round."""
        known = {"amount": str(amount), "seed": str(seed), "state": str(state.with_suffix(".chaos.jsonl"))}
        script, *words = (word.format(**known) for word in self.command)
        return [sys.executable, str(TRIALS / script), *words]


_SEED = ("--seed", "{seed}")
PROGRAMMES = (
    Programme("chaos, hours", 12, 1, ("chaos_campaign.py", "--hours", "{amount}", "--state", "{state}")),
    Programme(
        "kill storms across hosts", 1_000, 20,
        ("kill_storm.py", "--hosts", "2", "--ranks", "4", "--kills", "{amount}", *_SEED),
    ),
    Programme(
        "kill storms under torchrun", 1_000, 20,
        ("kill_storm.py", "--launcher", "torchrun", "--kills", "{amount}", *_SEED),
    ),
    Programme("hangs", 200, 10, ("hang_hunt.py", "--cases", "{amount}", *_SEED)),
    Programme("soak, epochs", 10_000, 10_000, ("soak.py", "--epochs", "{amount}", *_SEED)),
    Programme("walk, steps", 2_000_000, 100_000, ("random_walk.py", "--steps", "{amount}", *_SEED)),
    Programme("fuzzing, seconds a target", 17_280, 960, ("fuzzing.py", "--secs", "{amount}", *_SEED)),
    Programme("torn saves", 10_000, 1_000, ("tear_hunt.py", "--saves", "{amount}", *_SEED)),
    Programme("pairs of meshes", 100_000, 10_000, ("mesh_hunt.py", "--pairs", "{amount}", *_SEED)),
    Programme("worlds of store faults", 2_000, 100, ("store_storm.py", "--worlds", "{amount}", *_SEED)),
    Programme("seeded bugs, rounds", 1, 1, ("seeding.py",)),
)  # fmt: skip


def main() -> int:
    """Resume the campaign; return 1 if any round, of today or before, was not as promised."""
    parser = argparse.ArgumentParser(prog="scripts/campaigns/all", description=__doc__)
    parser.add_argument("--hours", type=float, default=1e6, help="begin no round after these")
    parser.add_argument("--only", action="append", metavar="WORD", help="programmes whose name has it")
    parser.add_argument("--most", type=int, help="at most so many trials in a round")
    parser.add_argument("--state", type=Path, default=Path("campaign.jsonl"))
    options = parser.parse_args()
    chosen = [one for one in PROGRAMMES if not options.only or any(word in one.name for word in options.only)]
    if not chosen:
        parser.error(f"no programme: there are {'; '.join(one.name for one in PROGRAMMES)}")
    rounds = read(options.state)
    until = time.monotonic() + options.hours * 3600
    while time.monotonic() < until and (one := least_done(chosen, rounds)) is not None:
        amount = min(one.round, one.total - tried(rounds, one), options.most or one.round)
        done = play(one, amount, 1 + sum(told["name"] == one.name for told in rounds), options.state)
        rounds.append(done)
        append(options.state, done)
        print(
            f"{'as promised' if done['rc'] == 0 else 'NOT AS PROMISED'} {one.name}: {done['said']}",
            flush=True,
        )
    for one in chosen:
        bad = sum(told["name"] == one.name and told["rc"] != 0 for told in rounds)
        print(f"{one.name}: {tried(rounds, one):,} of {one.total:,}, {bad} rounds not as promised")
    return int(any(told["rc"] for told in rounds))


def least_done(programmes: Sequence[Programme], rounds: Sequence[dict[str, Any]]) -> Programme | None:
    """The programme of which the smallest part is done; None when all are."""
    left = [one for one in programmes if tried(rounds, one) < one.total]
    return min(left, key=lambda one: tried(rounds, one) / one.total, default=None)


def tried(rounds: Sequence[dict[str, Any]], one: Programme) -> int:
    """The trials of a programme so far."""
    return sum(told["amount"] for told in rounds if told["name"] == one.name)


def play(one: Programme, amount: int, seed: int, state: Path) -> dict[str, Any]:
    """Run a round; what it printed last is what it came to."""
    began = time.time()
    words = one.words(amount, seed, state)
    try:
        done = subprocess.run(
            words, check=False, capture_output=True, text=True, timeout=PATIENCE_SECS,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        code, said = done.returncode, (done.stdout.strip() or done.stderr.strip()).splitlines()
    except subprocess.TimeoutExpired:
        code, said = 124, ["took too long"]
    told = said[-1:] if code == 0 else said[-30:]
    secs = round(time.time() - began, 1)
    return {
        "name": one.name,
        "amount": amount,
        "seed": seed,
        "rc": code,
        "secs": secs,
        "said": "\n".join(told),
    }


def read(path: Path) -> list[dict[str, Any]]:
    """The finished rounds; a line that was cut off is taken out of the file."""
    if not path.exists():
        return []
    whole, end, cut = path.read_text().rpartition("\n")
    if cut:
        path.write_text(whole + end)
    return [json.loads(line) for line in whole.splitlines()]


def append(path: Path, line: dict[str, Any]) -> None:
    """Note a round."""
    with open(path, "a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    sys.exit(main())
