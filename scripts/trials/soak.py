"""Thousands of epochs in one run, killed now and then: memory, descriptors, threads, disk must not grow."""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from screen import Screen
from soak_job import EVERY, KEPT, read
from storm_checks import Watched, lines_of

from torchrelay.checkpoint.load.verify import verify_epoch
from torchrelay.checkpoint.storage.local import LocalStorage

JOB = Path(__file__).with_name("soak_job.py")
WARM = 100
"""Epochs of a process before which it may still grow: allocators, caches, the first deletions."""
MIB = 1 << 20
MOST_SLOTS = 600
"""Files in log/: the newest 256 slots, up to 256 more until they are thinned, base files."""


@dataclass(frozen=True)
class Stay:
    """What one process held from its hundredth epoch to its end."""

    epochs: int
    rss_mib_per_1000: float
    files: tuple[int, int]
    threads: tuple[int, int]


def run_until(command: Sequence[str], outside: Path, epoch: int | None) -> int:
    """Run the job to its end, or kill it once an epoch was acknowledged; the code it ended with."""
    with open(outside / "said", "ab") as said:
        process = subprocess.Popen(
            command, stdout=said, stderr=said, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    while process.poll() is None and epoch is not None:
        if (_acknowledged(outside) or 0) >= epoch:
            process.send_signal(signal.SIGKILL)
        time.sleep(0.01)
    return process.wait()


def _acknowledged(outside: Path) -> int | None:
    return max((line["epoch"] for line in lines_of(outside / "oracle")[-3:]), default=None)


def stays(lines: Sequence[dict[str, int]]) -> list[Stay]:
    """What each process held; the slope of its memory by least squares."""
    found = []
    for _, group in itertools.groupby(lines, key=lambda line: line["pid"]):
        own = list(group)
        own = [line for line in own if line["epoch"] >= own[0]["epoch"] + WARM]
        if len(own) < 3:
            continue
        mean = sum(line["epoch"] for line in own) / len(own)
        spread = sum((line["epoch"] - mean) ** 2 for line in own)
        slope = sum((line["epoch"] - mean) * line["rss"] for line in own) / spread
        found.append(
            Stay(
                own[-1]["epoch"] - own[0]["epoch"] + EVERY,
                slope * 1000 / MIB,
                (min(line["files"] for line in own), max(line["files"] for line in own)),
                (min(line["threads"] for line in own), max(line["threads"] for line in own)),
            )
        )
    return found


def violations(watched: Watched, lines: Sequence[dict[str, int]], epochs: int) -> list[str]:
    """Everything that grew, or was lost."""
    wrong = []
    for stay in stays(lines):
        # One process needs some hundred epochs before a slope means anything.
        if stay.epochs >= 400 and stay.rss_mib_per_1000 > 1.0:
            wrong.append(f"memory grew by {stay.rss_mib_per_1000:.2f} MiB in 1,000 epochs")
        if stay.files[1] - stay.files[0] > 6 or stay.threads[1] - stay.threads[0] > 4:
            wrong.append(f"descriptors {stay.files}, threads {stay.threads}")
    newest = [line for line in lines if line["epoch"] > WARM]
    wrong += [f"epoch {line['epoch']}: {line['tries']} tries" for line in newest if line["tries"] > KEPT + 2]
    wrong += [
        f"epoch {line['epoch']}: {line['slots']} slots" for line in newest if line["slots"] > MOST_SLOTS
    ]
    view = watched.view()
    if max(view.epochs(), default=None) != epochs:
        wrong.append(f"the newest epoch is {max(view.epochs(), default=None)} instead of {epochs}")
    storage = LocalStorage(watched.run / "checkpoints")
    wrong += [
        f"epoch {one.position}: {proof.reason}"
        for one in view.entries
        if not (proof := verify_epoch(storage, one, level="full")).verified
    ]
    return wrong


def soak(
    folder: Path, epochs: int, kills: int, seed: int, *, asynchronous: bool, screen: Screen
) -> list[str]:
    """Run it all; returns what was not as promised."""
    rng, watched = random.Random(seed), Watched(folder / "run", folder / "outside")
    watched.outside.mkdir(parents=True)
    command = [sys.executable, str(JOB), str(watched.run), str(watched.outside), str(epochs)]
    command += ["--asynchronous"] if asynchronous else []
    wrong = []
    for epoch in [*sorted(rng.sample(range(1, epochs), kills)), None]:
        code = run_until(command, watched.outside, epoch)
        acknowledged, newest = watched.acknowledged() or 0, watched.newest() or 0
        if newest < acknowledged:
            wrong.append(f"epoch {acknowledged} was acknowledged, the newest is {newest}")
        if code not in (0, -signal.SIGKILL):
            said = (watched.outside / "said").read_text(errors="replace")
            wrong.append(f"the job ended with {code}: {said[-1000:]}")
        screen.line(f"{f'killed behind epoch {epoch}' if code else 'finished'}: newest epoch {newest}")
    lines = read(watched.outside)
    for stay in stays(lines):
        screen.line(
            f"a process of {stay.epochs} epochs: {stay.rss_mib_per_1000:+.3f} MiB per 1,000 epochs, "
            f"descriptors {stay.files[0]} to {stay.files[1]}, threads {stay.threads[0]} to {stay.threads[1]}"
        )
    disk, tries, slots = (max(line[what] for line in lines) for what in ("disk", "tries", "slots"))
    screen.line(f"disk at most {disk / MIB:.1f} MiB in {tries} tries, {slots} log files")
    return wrong + violations(watched, lines, epochs)


def main() -> int:
    """Soak; the exit code is 1 where something grew or was lost."""
    parser = argparse.ArgumentParser(prog="scripts/campaigns/soak", description=__doc__)
    parser.add_argument("--epochs", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--asynchronous", action="store_true", help="save in the background")
    options = parser.parse_args()
    if options.epochs < 2 or not 0 <= options.kills < options.epochs:
        parser.error("--epochs is a number from 2, --kills one below it")
    screen = Screen()
    screen.line(f"seed {options.seed}")
    with tempfile.TemporaryDirectory(prefix="torchrelay-soak-") as folder:
        wrong = soak(
            Path(folder), options.epochs, options.kills, options.seed,
            asynchronous=options.asynchronous, screen=screen,
        )  # fmt: skip
    for one in wrong:
        screen.line(f"WRONG {one}")
    screen.line(f"{options.epochs} epochs, {options.kills} kills, {len(wrong)} findings")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
