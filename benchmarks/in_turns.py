"""Measure this checkout and an older one in turns: what a change costs.

    python benchmarks/in_turns.py BEFORE --workload W6 [--rounds 5] [--scale 0.5] [--saves 4]
        [--engine "torchrelay epoch"] [--only save]

The steps of a workload of `benchmarks/run`, each in fresh processes of both checkouts, the first one of a
round in turns too. Both load the files that the older checkout saved. A ratio is this checkout's seconds by
those of the older one in the same round; above 1 this one is slower.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]

from bench.launch import measure  # noqa: E402 - the path comes first
from bench.plan import WORKLOADS, Step, Workload  # noqa: E402
from bench.task import Asked  # noqa: E402

CAP_SECS = 300.0


def asked_of_process() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("before", type=Path, metavar="BEFORE", help="the older checkout")
    parser.add_argument("--workload", required=True, choices=sorted(WORKLOADS)[:6])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=0.5, help="part of the workload's full size")
    parser.add_argument("--saves", type=int, default=4, help="saves of each process, the first one included")
    parser.add_argument("--engine", default="torchrelay epoch")
    parser.add_argument(
        "--only", choices=("save", "cold load", "warm load"), help="these rows, and the saves they need"
    )
    return parser.parse_args()


def rows_of(
    asked: argparse.Namespace, workload: Workload, step: Step, folder: Path
) -> dict[str, list[tuple[float, float]]]:
    """By row of the table the seconds of each round, of the older checkout and of this one."""
    checkouts = [asked.before.resolve(), HERE.parent]
    found: dict[str, list[tuple[float, float]]] = {}
    for number in range(asked.rounds):
        told = {}
        for checkout in checkouts if number % 2 == 0 else checkouts[::-1]:
            files = folder / step.files
            if "save" in step.actions:
                files = folder / f"{step.files}-{checkouts.index(checkout)}"
                shutil.rmtree(files, ignore_errors=True)
            task = Asked(
                workload.name,
                asked.engine,
                step.actions,
                asked.scale,
                str(files),
                str(folder / "answers.json"),
                asked.saves,
                step.layout,
            )
            paths = [str(checkout / "benchmarks"), str(checkout / "src")]
            told[checkout] = measure(task, workload.module, step.ranks, CAP_SECS, paths=paths)
        before, since = (told[one] for one in checkouts)
        for action in before:
            pair = before[action]["secs"], since[action]["secs"]
            found.setdefault(f"{step.title}{action}", []).append(pair)
    if "save" in step.actions:  # what is loaded was saved by the older one
        (folder / f"{step.files}-0").rename(folder / step.files)
        shutil.rmtree(folder / f"{step.files}-1")
    return found


def main() -> None:
    """Print a row for each action."""
    asked = asked_of_process()
    workload = WORKLOADS[asked.workload]
    print("| operation | rounds | before | since | median of the ratios |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        for step in workload.steps:
            if asked.only is not None and not {"save", asked.only} & set(step.actions):
                continue  # loads need what was saved
            for row, pairs in rows_of(asked, workload, step, Path(folder)).items():
                columns = [sorted(column) for column in zip(*pairs, strict=True)]
                told = [f"{one[0]:.3g} to {one[-1]:.3g}" for one in columns]
                ratio = median(since / before for before, since in pairs)
                print(f"| {row} | {len(pairs)} | {told[0]} | {told[1]} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
