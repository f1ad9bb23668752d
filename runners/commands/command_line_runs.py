"""`torchrelay ls RUNS`: the runs in a directory, a line each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrelay.checkpoint.load.open import best_of_run
from torchrelay.errors import RelayError
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.records import dataclass
from torchrelay.runners.commands.run_notes import best_of
from torchrelay.runners.monitoring.console import Output, finite, human_number, printable, time_text
from torchrelay.runners.monitoring.status import NOT_BEGUN, Standing, standing

_COLUMNS = ("run", "job", "state", "epoch", "best", "updated")


@dataclass(frozen=True)
class RunLine:
    """One run as its own notes tell it; `problem` says why they could not be read."""

    name: str
    job: str | None = None
    state: str | None = None
    epoch: int | None = None
    metric: str | None = None
    best: tuple[float, int] | None = None
    updated: float | None = None
    problem: str | None = None
    stands: Standing = NOT_BEGUN

    def cells(self) -> tuple[str, ...]:
        """As a row of the table."""
        best = (
            "-" if self.best is None else f"{self.metric}={human_number(self.best[0])} (epoch {self.best[1]})"
        )
        return (
            self.name,
            self.job or "?",
            "unreadable" if self.problem else self.stands.shown,
            "-" if self.epoch is None else str(self.epoch),
            best,
            "-" if self.updated is None else time_text(self.updated),
        )

    def json(self) -> dict[str, Any]:
        """As an object of `ls --json`."""
        return {
            "run": self.name,
            "job": self.job,
            "state": self.stands.state(self.state),
            "stands": self.stands.word,
            "why": self.stands.why,
            "epoch": self.epoch,
            "metric": self.metric,
            "best": None if self.best is None else finite(self.best[0]),
            "best_epoch": None if self.best is None else self.best[1],
            "updated": self.updated,
            "problem": self.problem,
        }


def list_runs(paths: Sequence[Path], output: Output) -> int:
    """Print them; a run whose notes are damaged has its line too, and the reason goes to stderr."""
    lines = [_line(path) for path in paths]
    if output.json:
        output.value({"runs": [line.json() for line in lines]})
        return 0
    output.table(_COLUMNS, [line.cells() for line in lines])
    for line in lines:
        if line.problem:
            output.notice(f"{line.name}: {printable(line.problem)}")
    return 0


def _newest_saved(status: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> int | None:
    """What a run that has ended says; of one that runs, or broke off, what it noted behind its epochs."""
    epoch = status.get("committed")
    if type(epoch) is int:
        return epoch
    saved = [line["epoch"] for line in lines if line.get("saved") is True]
    return saved[-1] if saved else None


def _line(path: Path) -> RunLine:
    run = RunDirectory(path)
    try:
        identity, status, best = run.identity() or {}, run.status(), best_of_run(path)
        updated, state, lines = status.get("updated"), status.get("state"), run.metrics()
        return RunLine(
            run.name,
            identity.get("job"),
            state if isinstance(state, str) else None,
            _newest_saved(status, lines),
            None if best is None else best[0],
            None if best is None else best_of(lines, best),
            updated if type(updated) in (int, float) else None,
            stands=standing(path),
        )
    except RelayError as error:
        return RunLine(run.name, problem=str(error))
