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
NOTES = """\
- Fresh processes make every measurement. Engines take turns within a round, and each round begins with
  another engine.
- A save is timed until the contents and names of all its files are durable. The harness syncs every
  file and directory of every engine within the measured time.
- `save` is the first save of a process, `save again` the median of the following ones, which are
  deleted.
- Loads fill tensors that were resident before. Everything that was loaded is compared.
- Before a cold load the files are read once, so that the cache of a virtual disk has them for every
  engine. Then they are removed from the page cache, which the kernel confirms for every page.
- Before a warm load they are removed as well, and read from beginning to end. So they get into the
  cache in the same way for every engine.
- `ratio` is the best peer's median divided by that of this line: above 1 this line is faster. The range
  is that of the ratios within rounds.
- `limit` is the share of what the device achieved right before: writes and cold reads with O_DIRECT and
  4 threads (writes with fsync), warm reads from the page cache with all cores.
- `least` is what the same processes needed right after for the same bytes alone.
  - Loads: read from the same files, as cold or warm, into the same memory, and hashed with xxh3-128
    (warm: the fastest of three tries). Of a tensor that is cut into columns each process reads and
    hashes whole blocks, and copies its share. Nothing is looked up, decoded or compared.
  - Saves: random bytes, written directly to one file per process until durable. Nothing is copied,
    hashed or described.
- Before each load and its `least`, the free memory that they may need is touched and released, because
  the host of a virtual machine may have reclaimed it.
- `extra memory` is the peak of RSS above what the processes had before, of all ranks together. It
  includes touched pages of mapped files.

Every engine has the fastest public settings that were found for it, and as many compute threads as
there are cores for each process:

- torch.save with and without CRC; `mmap` and `safe_open` for parts.
- DCP with one and with two threads, with plan caching, and with its stagers.
- Orbax and torchsnapshot with their defaults.
- torchrelay verifies everything that it reads. Only the line "unverified" loads with
  `verify="headers"`.

In W7:

- `gate` is how much longer than without saves the optimizer's step takes after a save.
- `first save` is blocked time and gate of the first save; `slowdown` is the total cost of a save for
  the loop.
- `noise` is the spread of the steps without saves, over as many steps as lie between two saves.
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
    """The versions of all packages; missing ones are marked."""
    found = {"Python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    import torchrelay

    return {**found, "torchrelay": torchrelay.__version__}
