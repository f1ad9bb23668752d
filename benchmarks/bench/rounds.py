"""Rounds: every engine once per step, in an order that turns; one JSON line for each finished round."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.launch import NotMeasuredError, measure
from bench.limits import limits
from bench.plan import GIB, Step, Workload, grouped, missing_package
from bench.task import Asked

Cells = dict[str, dict[str, dict[str, Any]]]
"""By engine and action: the figures, or `failed` with the reason."""


@dataclass(frozen=True)
class Round:
    """One round of a workload. `limits` are those of the device right before it."""

    workload: str
    number: int
    order: tuple[str, ...]
    limits: dict[str, float]
    cells: Cells
    secs: float


@dataclass
class Record:
    """The finished rounds of a run, kept in a file, so that a run can resume where it was stopped.

    The first line says how the rounds were measured; rounds of another way are not mixed with them.
    """

    path: Path
    way: dict[str, Any]
    rounds: list[Round] = field(default_factory=list)

    def __post_init__(self) -> None:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        if not lines:
            self.path.write_text(json.dumps(self.way) + "\n")
            return
        if json.loads(lines[0]) != self.way:
            raise SystemExit(
                f"{self.path} holds rounds that were measured otherwise ({lines[0]}): choose another --output"
            )
        for line in lines[1:]:
            try:
                told = json.loads(line)
            except ValueError:  # the end of a run that was killed
                continue
            self.rounds.append(Round(**{**told, "order": tuple(told["order"])}))

    def has(self, workload: str, number: int) -> bool:
        """Whether this round was finished, now or by an earlier process."""
        return any(one.workload == workload and one.number == number for one in self.rounds)

    def of(self, workload: str) -> list[Round]:
        """The rounds of a workload."""
        return [one for one in self.rounds if one.workload == workload]

    def add(self, found: Round) -> None:
        """Keep a finished round."""
        self.rounds.append(found)
        with self.path.open("a") as file:
            file.write("\n" if not self.path.read_bytes().endswith(b"\n") else "")
            file.write(json.dumps(asdict(found)) + "\n")


@dataclass(frozen=True)
class Measuring:
    """How rounds are measured."""

    scratch: Path
    scale: float
    cap_secs: float
    saves: int
    small: bool
    threads: int | None = None

    def round(
        self, workload: Workload, engines: Sequence[str], number: int, earlier: Sequence[Round]
    ) -> Round:
        """Measure every engine; skip and report those that exceeded the cap in an earlier round."""
        begin = time.monotonic()
        order = turned(engines, number)
        cells: Cells = {engine: {} for engine in order}
        slow = {engine: given_up(engine, earlier) for engine in order}
        device = limits(self.scratch, min(GIB, int(workload.nbytes * self.scale)))
        for step in grouped(workload.steps, small=self.small):
            for engine in order:
                if reason := slow[engine] or unusable(engine, step, cells[engine]):
                    found = {action: {"failed": reason} for action in step.actions}
                else:
                    found = self._cell(workload, engine, step)
                _say(workload, number, engine, step, found)
                cells[engine] |= {step.title + action: told for action, told in found.items()}
        for folder in self.scratch.iterdir():
            shutil.rmtree(folder, ignore_errors=True)
        return Round(workload.name, number, tuple(order), device, cells, time.monotonic() - begin)

    def _cell(self, workload: Workload, engine: str, step: Step) -> dict[str, dict[str, Any]]:
        folder = self.scratch / f"{engine.replace(' ', '-').replace(',', '')}-{step.files}"
        if step.actions[0] in ("save", "train"):
            shutil.rmtree(folder, ignore_errors=True)
        asked = Asked(
            workload.name,
            engine,
            step.actions,
            self.scale,
            str(folder),
            str(self.scratch / "answers.json"),
            saves=self._saves(workload),
            layout=step.layout,
            step_secs=0.1 if self.small else 0.7,
        )
        try:
            return measure(asked, workload.module, step.ranks, self.cap_secs, self.threads)
        except NotMeasuredError as error:
            reason = str(error).replace(str(self.scratch), "<scratch>")
            return {action: {"failed": reason, "slow": error.slow} for action in step.actions}
        finally:
            if workload.module == "training":
                shutil.rmtree(folder, ignore_errors=True)

    def _saves(self, workload: Workload) -> int:
        if workload.module == "training":
            return 2 if self.small else 4
        return self.saves


def turned(engines: Sequence[str], number: int) -> list[str]:
    """Rotate the engines: the first one finds the device in another state than the others."""
    first = number % len(engines)
    return [*engines[first:], *engines[:first]]


def given_up(engine: str, earlier: Sequence[Round]) -> str | None:
    """Why an engine is not tried again."""
    for one in earlier:
        for action, told in one.cells.get(engine, {}).items():
            if told.get("slow"):
                return f"{action} took {told['failed']} in round {one.number + 1}; not tried again"
    return None


def unusable(engine: str, step: Step, before: dict[str, dict[str, Any]]) -> str | None:
    """Why there is nothing to start: not installed, or nothing was saved."""
    package = missing_package(engine)
    if package is not None:
        return f"skipped: {package} is not installed"
    if "save" in step.actions or "train" in step.actions:
        return None
    failed = [
        told["failed"] for action, told in before.items() if action.endswith("save") and "failed" in told
    ]
    return f"nothing was saved ({failed[0]})" if failed else None


def _say(workload: Workload, number: int, engine: str, step: Step, found: dict[str, dict[str, Any]]) -> None:
    told = ", ".join(
        f"{step.title}{action} " + (f"{one['secs']:.3f} s" if "secs" in one else one["failed"])
        for action, one in found.items()
    )
    print(f"{workload.name} round {number + 1} {engine}: {told}", file=sys.stderr, flush=True)
