"""The page with the figures, in Markdown."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from bench.figures import OURS, Figure
from bench.plan import NOT_COMPARABLE, WORKLOADS
from bench.rounds import Round

PACKAGES = ("torch", "safetensors", "torchsnapshot", "orbax-checkpoint", "jax", "numpy", "xxhash")
NOTES = """Every measurement is made by fresh processes; within a round all engines take turns, and each
round begins with another one. A save is timed until the bytes and names of all its files are durable: the
harness calls fsync on every file and directory behind every engine, inside of the measured time. `save` is
the first save of a process, `save again` the median of the following ones, which are taken away. Loads end in
tensors that were resident before, and all that was loaded is compared. Before a cold load the files are read
once, so that a cache beneath a virtual disk has them for all engines alike, and taken out of the page cache;
the kernel is asked for every page whether it is gone. Before a warm one they are taken out as well and read
in from begin to end, so that the cache came by them in the same way for all engines. `ratio` is the
median of the best peer by that of this line: above 1 this line is quicker; behind it the range of the
same ratio within the rounds.
`limit` is the share of what the device did right before (writes and cold reads: O_DIRECT with 4 threads,
writes with fsync; warm: reads of the page cache with all cores). `least` is what the same processes needed
right after for as many bytes alone. Loads: read from the same files, as cold or as warm as before, into the
same memory, and hashed with xxh3-128 (warm: the quickest of three tries); of a tensor that is cut into
columns each process reads and hashes whole blocks, and copies its share. Nothing is looked up, decoded or
compared in it. Saves: random bytes written directly into one file of each process, until durable; nothing is
copied, hashed or described. Before each load and its `least` as much free memory as they may need is touched
and given back, for a virtual machine's host may have it.
`extra memory` is the peak of RSS above what the process had before, of all ranks together, touched pages of
mapped files included.

Tuning effort is the same for all: every engine has the quickest public settings that were found for it
(torch.save without CRC beside its default, `mmap` and `safe_open` for parts, DCP with one and with two
threads and with plan caching, its stagers, Orbax and torchsnapshot as they come), and as many compute
threads as there are cores for each process. torchrelay verifies all it reads, but for the line
"unverified", which loads with `verify="headers"`.

In W7 `gate` is how much longer than without saves the optimizer's step takes behind a save, `first save` is
blocked time and gate of the first one, `slowdown` is what a save costs the loop altogether; `noise` is how
far the steps without saves were apart, over as many steps as lie between two saves.
"""


@dataclass(frozen=True)
class Head:
    """Where, when and with what a run was made."""

    date: str
    command: str
    hardware: str
    versions: dict[str, str]
    way: dict[str, Any]

    @classmethod
    def of_now(cls, command: str, way: dict[str, Any], where: Path) -> Head:
        """Ask the machine."""
        date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
        return cls(date, command, hardware(where), versions(), way)


def page(
    head: Head,
    rounds: Sequence[Round],
    figures: Sequence[Figure],
    others: Mapping[str, str],
    plots: Sequence[str],
) -> str:
    """The whole page."""
    lines = [
        f"# Measured {head.date}",
        "",
        f"`{head.command}`",
        "",
        f"{head.hardware}; {', '.join(f'{name} {version}' for name, version in head.versions.items())}.",
        f"Sizes: {head.way['scale']:g} of the full ones. {limits_line(rounds)}",
        "",
        NOTES,
    ]
    for name, of_workload in groupby(figures, key=lambda one: one.workload):
        lines += _workload(name, list(of_workload), [one for one in rounds if one.workload == name])
    for name, told in others.items():
        lines += ["", f"## {name}", "", "```", told.rstrip(), "```"]
    for plot in plots:
        lines += ["", f"![{plot}]({plot})"]
    return "\n".join(lines) + "\n"


def limits_line(rounds: Sequence[Round]) -> str:
    """Medians and ranges of the device's limits, in GB/s."""
    told = []
    for what, title in (("write", "writes"), ("cold", "cold reads"), ("warm", "warm reads")):
        rates = [one.limits[what] / 1e9 for one in rounds]
        if rates:
            told.append(f"{title} {median(rates):.2f} ({min(rates):.2f} to {max(rates):.2f})")
    return f"The device before the rounds, GB/s: {', '.join(told)}."


def _workload(name: str, figures: Sequence[Figure], rounds: Sequence[Round]) -> list[str]:
    workload = WORKLOADS[name]
    lines = ["", f"## {name}: {workload.title}", "", f"{len(rounds)} rounds."]
    for action, of_action in groupby(figures, key=lambda one: one.action):
        lines += [
            "",
            f"### {name} {action}",
            "",
            "| engine | median s | range | n | ratio | limit | least s | extra memory MB | MB on disk |",
            "|---|---|---|---|---|---|---|---|---|",
            *(_line(one) for one in of_action),
        ]
    for engine, reason in NOT_COMPARABLE.get(name, {}).items():
        lines += ["", f"Not here: {engine}, which {reason}."]
    return lines


def _line(one: Figure) -> str:
    engine = f"**{one.engine}**" if one.engine.startswith(OURS) else one.engine
    if one.median is None:
        why = _cell(one.failed or "no figure")
        why = why if why.startswith("skipped") else f"failed: {why}"
        return f"| {engine} | {why} | - | 0 | - | - | - | - | - |"
    ratio = "-" if one.ratio is None else f"{one.ratio:.2f}"
    if one.ratios is not None:
        ratio += f" ({one.ratios[0]:.2f} to {one.ratios[1]:.2f})"
    least = "-" if one.least is None else _secs(one.least)
    some = f" (failed in other rounds: {_cell(one.failed)})" if one.failed else ""
    return (
        f"| {engine}{some} | {_secs(one.median)} | {_secs(min(one.secs))} to {_secs(max(one.secs))} "
        f"| {len(one.secs)} | {ratio} | {_share(one.limit)} | {least} "
        f"| {_mb(one.extra_memory)} | {_mb(one.bytes)} |"
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _secs(secs: float) -> str:
    return f"{secs:.4f}" if abs(secs) < 0.1 else f"{secs:.3f}"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _mb(nbytes: float | None) -> str:
    return "-" if nbytes is None else f"{nbytes / 1e6:,.0f}"


def as_json(
    head: Head, rounds: Sequence[Round], figures: Sequence[Figure], others: Mapping[str, str]
) -> dict[str, Any]:
    """The same for programs."""
    return {
        "head": asdict(head),
        "figures": [{**asdict(one), "median": one.median} for one in figures],
        "others": dict(others),
        "rounds": [asdict(one) for one in rounds],
    }


def hardware(where: Path) -> str:
    """Processors, memory, kernel, and the file system that is measured."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    told = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in told if line.startswith("model name")]
    processor = names[0] if names else platform.machine()
    machine = f"{os.cpu_count()} x {processor}, {memory:.0f} GiB, Linux {platform.release()}"
    return f"{machine}, files on {_file_system(where)}"


def _file_system(where: Path) -> str:
    """Kind of the file system that holds a path."""
    where = where.resolve()
    best, kind = "", "an unknown file system"
    for line in Path("/proc/mounts").read_text().splitlines():
        _, point, name, *_ = line.split()
        if (where == Path(point) or Path(point) in where.parents) and len(point) > len(best):
            best, kind = point, name
    return kind


def versions() -> dict[str, str]:
    """Of everything that takes part; what is missing is told as such."""
    found = {"Python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    import torchrelay

    return {**found, "torchrelay": torchrelay.__version__}
