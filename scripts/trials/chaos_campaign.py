"""Hours of `torchrelay chaos` in rounds; each finished round is a line of a file, so it can be stopped.

The seed of a round is its number, so no round repeats another, and each can be repeated alone.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchrelay.chaos.builtin import Wish, built_in
from torchrelay.chaos.strikes import SHOWN, Tally
from torchrelay.errors import RelayError

PROGRAMME = {
    "kill": 50_000,
    "errno": 20_000,
    "read": 10_000,
    "stall": 2_000,
    "flip": 160_000,
    "truncate": 20_000,
    "ext4": 10_000,
    "xfs": 10_000,
    "btrfs": 10_000,
}
ROUND = {"kill": 600, "errno": 600, "read": 600, "stall": 200, "flip": 4000, "truncate": 2000}
"""Trials of a round; of a file system CUTS. A round takes a minute or less where it is quiet."""
CUTS = 120
POWER = ("ext4", "xfs", "btrfs")


def main() -> int:
    """Resume the campaign; return 1 if any round, of today or before, has findings."""
    chosen = _arguments()
    targets = _targets(chosen.only)
    rounds = _read(chosen.state)
    until = time.monotonic() + chosen.hours * 3600
    skipped: set[str] = set()
    while time.monotonic() < until:
        left = {kind: count - _tried(rounds, kind) for kind, count in targets.items() if kind not in skipped}
        kind = max(left, key=lambda one: left[one] / targets[one], default=None)
        if kind is None or left[kind] <= 0:
            break
        done = _round(kind, 1 + max((one["seed"] for one in rounds), default=0), left[kind], chosen)
        if done["skipped"]:
            print(f"SKIPPED {kind}: {done['skipped']}", flush=True)
            skipped.add(kind)
            continue
        rounds.append(done)
        _append(chosen.state, done)
        print(f"seed {done['seed']}: {kind} {done['tried']} in {done['seconds']:.0f} s", flush=True)
        for finding in done["findings"]:
            print(json.dumps(finding), flush=True)
    _print(rounds, targets)
    return int(any(one["findings"] for one in rounds))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/campaigns/chaos", description=__doc__)
    parser.add_argument("--hours", type=float, default=1e6, help="stop after the round in which they end")
    parser.add_argument("--only", help="kill=1000,ext4=500: these kinds alone, so many trials in all")
    parser.add_argument("--state", type=Path, default=Path("chaos-campaign.jsonl"))
    parser.add_argument("--workers", type=int, default=2)
    return parser.parse_args()


def _targets(text: str | None) -> dict[str, int]:
    if not text:
        return dict(PROGRAMME)
    found = {kind: int(count) for kind, _, count in (part.partition("=") for part in text.split(","))}
    if unknown := found.keys() - PROGRAMME.keys():
        raise SystemExit(f"chaos-campaign: there is no kind {', '.join(unknown)}")
    return found


def _round(kind: str, seed: int, left: int, chosen: argparse.Namespace) -> dict[str, Any]:
    power = kind in POWER
    name = "power" if power else kind
    wish = Wish((name,), min(left, CUTS if power else ROUND[kind]), seed, workers=chosen.workers)
    if power:
        wish = replace(wish, file_systems=(kind,))
    wish = replace(wish, keep=chosen.state.absolute().with_suffix(".kept"))
    begun = time.monotonic()
    with built_in(wish) as target:
        tally = target.run(name)
    return {
        "kind": kind,
        "seed": seed,
        "tried": _count(tally),
        "came": {one.value: sum(tally.count(kind, one) for kind in tally.kinds) for one in SHOWN},
        "seconds": round(time.monotonic() - begun, 1),
        "findings": tally.json()["findings"],
        "skipped": " ".join(tally.skipped.values()),
    }


def _count(tally: Tally) -> int:
    return sum(tally.count(kind) for kind in tally.kinds)


def _tried(rounds: list[dict[str, Any]], kind: str) -> int:
    return sum(one["tried"] for one in rounds if one["kind"] == kind)


def _read(path: Path) -> list[dict[str, Any]]:
    """The rounds so far; a last line that was torn is left out."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n") and line.strip()]


def _append(path: Path, one: dict[str, Any]) -> None:
    if path.exists() and not path.read_bytes().endswith(b"\n"):
        path.write_text("".join(json.dumps(known) + "\n" for known in _read(path)))
    with open(path, "a") as file:
        file.write(json.dumps(one) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _print(rounds: list[dict[str, Any]], targets: dict[str, int]) -> None:
    """The table: trials by what came of them, and the seconds that they took."""
    names = [one.value for one in SHOWN]
    print("| kind | tried | of |", " | ".join(names), "| seconds |")
    print("|---" * (4 + len(names)) + "|")
    for kind, target in targets.items():
        mine = [one for one in rounds if one["kind"] == kind]
        came = [sum(one["came"][name] for one in mine) for name in names]
        secs = sum(one["seconds"] for one in mine)
        print("|", " | ".join(map(str, (kind, _tried(rounds, kind), target, *came, round(secs)))), "|")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RelayError as error:
        sys.exit(f"chaos-campaign: {error}")
