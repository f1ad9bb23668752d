"""The command: rounds of the chosen workloads, then a page, JSON and plots in the output folder."""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.figures import Figure, figures_of
from bench.others import run_other
from bench.plan import OTHERS, WORKLOADS, Workload, engines_of, likely_secs
from bench.plots import draw
from bench.rounds import Measuring, Record
from bench.table import Head, as_json, page

RESULTS = Path(__file__).resolve().parent.parent / "results"
EXAMPLES = """examples:
  benchmarks/run --small                             all workloads, some minutes on 2 cores
  benchmarks/run --rounds 5                          the full sizes; needs 24 GiB of memory and 30 GB of disk
  benchmarks/run --only W1,W3 --rounds 5 --scale 0.5  two workloads at half size
  benchmarks/run --only W1 --engines torchrelay safetensors  two engines
The same command with the same --output resumes where it was stopped."""


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line, with what --small means put in."""
    parser = argparse.ArgumentParser(
        prog="benchmarks/run",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", default="", help="workloads, W1,W3; all of W1 to W9 without")
    parser.add_argument(
        "--engines",
        nargs="+",
        default=[],
        help="by name, or by how names begin: torchrelay 'torch.save, no CRC'",
    )
    parser.add_argument("--rounds", type=int, help="5; small: 1")
    parser.add_argument("--scale", type=float, help="part of the full sizes, 1.0; small: 0.0625")
    parser.add_argument("--cap", type=float, help="seconds that one start may take, 180; small: 40")
    parser.add_argument("--saves", type=int, help="saves per process, the first and later ones: 3; small: 2")
    parser.add_argument("--threads", type=int, help="compute threads of a process; its share of the cores")
    parser.add_argument("--small", action="store_true", help="small sizes, fewer variants of the peers")
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path("/var/tmp"),
        help="where the files go: the device that is measured; /var/tmp",
    )
    parser.add_argument("--output", type=Path, help="folder of the results; benchmarks/results/<date>")
    parser.add_argument("--estimate", action="store_true", help="only say how long it would take")
    given = parser.parse_args(arguments)
    small = {"rounds": 1, "scale": 0.0625, "cap": 40.0, "saves": 2}
    usual = {"rounds": 5, "scale": 1.0, "cap": 180.0, "saves": 3}
    for name, value in (small if given.small else usual).items():
        if getattr(given, name) is None:
            setattr(given, name, value)
    given.only = [name.strip() for name in given.only.split(",") if name.strip()]
    for name in given.only:
        if name not in WORKLOADS and name not in OTHERS:
            parser.error(f"no workload {name!r}: there are {', '.join([*WORKLOADS, *OTHERS])}")
    if given.rounds < 1 or given.saves < 1 or given.scale <= 0 or given.cap <= 0:
        parser.error("--rounds, --saves, --scale and --cap are above 0")
    if given.threads is not None and given.threads < 1:
        parser.error("--threads is above 0")
    if not given.directory.is_dir():
        parser.error(f"--directory {given.directory} is not a folder: give one on the device to be measured")
    if problem := unknown_engine(given.engines, given.only):
        parser.error(problem)
    return given


def unknown_engine(named: Sequence[str], only: Sequence[str]) -> str:
    """What is wrong with the first name that means no engine of the chosen workloads; empty if all do."""
    chosen = [one for one in WORKLOADS.values() if not only or one.name in only]
    for name in named if chosen else ():
        if not any(engines_of(one, [name], small=False) for one in chosen):
            known = dict.fromkeys(engine for one in chosen for engine in one.engines)
            return f"no engine {name!r}: there are {', '.join(known)}"
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; the exit code is 0 also where an engine failed, because that is a result."""
    arguments = sys.argv[1:] if arguments is None else arguments
    given = parsed(arguments)
    chosen = [one for one in WORKLOADS.values() if not given.only or one.name in given.only]
    engines = {one.name: engines_of(one, given.engines, small=given.small) for one in chosen}
    chosen = [one for one in chosen if engines[one.name]]
    say_estimate(chosen, engines, given)
    if given.estimate:
        return 0
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    output: Path = given.output or RESULTS / (today + ("-small" if given.small else ""))
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"benchmarks/run: error: cannot make --output {output}: {error.strerror}", file=sys.stderr)
        return 2
    way = {name: getattr(given, name) for name in ("scale", "saves", "cap", "small", "engines", "threads")}
    record = Record(output / "rounds.jsonl", way)
    scratch = Path(tempfile.mkdtemp(prefix="bench-", dir=given.directory)).resolve()
    head = Head.of_now(shlex.join(["benchmarks/run", *arguments]), way, scratch)
    try:
        measure_rounds(chosen, engines, record, given, scratch)
        others = measure_others(given, scratch, output)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        print(write(output, head, record, given.scale, read_others(output)), file=sys.stderr)
    print((output / "table.md").read_text())
    return 0 if record.rounds or others else 1


def measure_rounds(
    chosen: Sequence[Workload],
    engines: dict[str, list[str]],
    record: Record,
    given: argparse.Namespace,
    scratch: Path,
) -> None:
    """All rounds that are not there yet, round by round, so that a stopped run has something of each."""
    measuring = Measuring(scratch, given.scale, given.cap, given.saves, given.small, given.threads)
    begin = time.monotonic()
    missing = [
        (number, one) for number in range(given.rounds) for one in chosen if not record.has(one.name, number)
    ]
    left = {
        (number, one): likely_secs(one, len(engines[one.name]), given.scale, small=given.small)
        for number, one in missing
    }
    for number, one in missing:
        found = measuring.round(one, engines[one.name], number, record.of(one.name))
        record.add(found)
        left.pop((number, one))
        for later, same in left:
            if same is one:
                left[later, same] = found.secs
        told = f"{(time.monotonic() - begin) / 60:.1f} min, about {sum(left.values()) / 60:.0f} more"
        print(f"{one.name} round {number + 1} is finished: {told}", file=sys.stderr, flush=True)


def measure_others(given: argparse.Namespace, scratch: Path, output: Path) -> dict[str, str]:
    """Run W8 and W9 once, unless an earlier process did."""
    found = read_others(output)
    for name in OTHERS:
        wanted = name in given.only or not (given.only or given.engines)
        if wanted and found.get(name, "failed").startswith(("failed", "skipped")):
            print(f"{name} ...", file=sys.stderr, flush=True)
            found[name] = run_other(name, given.scale, scratch, small=given.small)
            (output / "others.json").write_text(json.dumps(found, indent=1))
    return found


def read_others(output: Path) -> dict[str, str]:
    """What W8 and W9 printed in this run."""
    path = output / "others.json"
    found: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    return found


def write(output: Path, head: Head, record: Record, scale: float, others: dict[str, str]) -> str:
    """The page, the JSON, the plots; where they are."""
    figures: list[Figure] = []
    for workload in WORKLOADS.values():
        if rounds := record.of(workload.name):
            figures += figures_of(workload, rounds, scale)
    plots = draw(output, figures)
    (output / "table.md").write_text(page(head, record.rounds, figures, others, plots))
    told = as_json(head, record.rounds, figures, others)
    (output / "results.json").write_text(json.dumps(told, indent=1) + "\n")
    return f"{output / 'table.md'}, results.json, {', '.join(plots) or 'no plots (matplotlib is missing)'}"


def say_estimate(
    chosen: Sequence[Workload], engines: dict[str, list[str]], given: argparse.Namespace
) -> None:
    """How long this will take, before it begins."""
    secs = {
        one.name: likely_secs(one, len(engines[one.name]), given.scale, small=given.small) for one in chosen
    }
    told = ", ".join(f"{name} {one / 60:.1f}" for name, one in secs.items())
    total = sum(secs.values()) * given.rounds / 60
    print(
        f"About {total:.0f} minutes for {given.rounds} rounds (minutes a round: {told}), less what is there; "
        f"no start of processes takes longer than {given.cap:g} s.",
        file=sys.stderr,
        flush=True,
    )
