"""Feeds readers with mutants of real files: only our errors may come out, quickly and in little memory."""

from __future__ import annotations

import argparse
import multiprocessing
import random
import resource
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from fuzz_targets import Target, targets
from screen import Screen

from torchrelay.errors import RelayError

MEMORY_BYTES = 512 << 20
SECS = 1.0
_MOST = 5
"""Findings after which a target is left."""


@dataclass
class Report:
    """What came of one target."""

    name: str
    inputs: int = 0
    accepted: int = 0
    refused: int = 0
    secs: float = 0.0
    slowest_secs: float = 0.0
    findings: list[tuple[bytes, str]] = field(default_factory=list)


class _SlowError(Exception):
    """An input took too long."""


def _too_slow(signum: int, frame: FrameType | None) -> None:
    raise _SlowError(f"took more than {SECS:g} s")


def fuzz(target: Target, secs: float, seed: int) -> Report:
    """Feed a target for so long. In this process: it gets a limit of memory."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, resource.RLIM_INFINITY))
    signal.signal(signal.SIGALRM, _too_slow)
    rng, report, begin = random.Random(f"{target.name} {seed}"), Report(target.name), time.monotonic()
    while report.secs < secs and len(report.findings) < _MOST:
        data = target.mutate(rng, rng.choice(target.seeds), target.seeds)
        before = time.monotonic()
        _feed(target, data, report)
        after = time.monotonic()
        report.slowest_secs, report.secs = max(report.slowest_secs, after - before), after - begin
    return report


def _feed(target: Target, data: bytes, report: Report) -> None:
    report.inputs += 1
    try:
        try:
            _read(target, data)
        except _SlowError:  # the machine may have been busy elsewhere: once more counts
            _read(target, data)
        report.accepted += 1
    except RelayError:
        report.refused += 1
    except BaseException:
        report.findings.append((data, traceback.format_exc()))


def _read(target: Target, data: bytes) -> None:
    signal.setitimer(signal.ITIMER_REAL, SECS)
    try:
        target.read(data)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def run(names: Sequence[str], secs: float, seed: int, processes: int = 2) -> list[Report]:
    """Each target in a process of its own."""
    context = multiprocessing.get_context(
        "spawn"
    )  # who forks beside threads may get a lock that nobody frees
    with context.Pool(processes, maxtasksperchild=1) as pool:
        return pool.starmap(_by_name, [(name, secs, seed) for name in names], chunksize=1)


def _by_name(name: str, secs: float, seed: int) -> Report:
    return fuzz(targets()[name], secs, seed)


def show(screen: Screen, reports: Sequence[Report]) -> None:
    """A table, and every finding."""
    rows = [
        [
            *(one.name, str(one.inputs), str(one.accepted), str(one.refused), str(len(one.findings))),
            *(f"{one.secs:.0f} s", f"{one.slowest_secs * 1000:.0f} ms"),
        ]
        for one in reports
    ]
    screen.table(["target", "inputs", "accepted", "refused", "findings", "time", "slowest"], rows)
    for one in reports:
        for data, text in one.findings:
            screen.line(f"{one.name}: {data[:400]!r}\n{text}")


def main() -> int:
    """Fuzz; the exit code is 1 where anything but a typed error came out."""
    parser = argparse.ArgumentParser(prog="scripts/campaigns/fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="config, log, manifest, header, archive")
    parser.add_argument("--secs", type=float, default=3600.0, help="per target")
    parser.add_argument(
        "--seed", type=int, default=int(time.time()), help="printed; gives the same inputs again"
    )
    parser.add_argument("--keep", type=Path, help="a folder for inputs that were findings")
    options = parser.parse_args()
    known = list(targets())
    if unknown := set(options.targets) - set(known):
        parser.error(f"no target: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    screen = Screen()
    screen.line(f"seed {options.seed}")
    reports = run(options.targets or known, options.secs, options.seed)
    show(screen, reports)
    found = [(one.name, data) for one in reports for data, _ in one.findings]
    if options.keep and found:
        options.keep.mkdir(parents=True, exist_ok=True)
        for number, (name, data) in enumerate(found):
            (options.keep / f"{name}-{number}").write_bytes(data)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
