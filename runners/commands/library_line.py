"""What a run is to its library: id, state, comment, key metric, code, configuration. Reads no checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchrelay.checkpoint.load.open import best_of_run
from torchrelay.errors import RelayError
from torchrelay.metadata.code.capture import captures, code_id_of
from torchrelay.metadata.experiments import Note, newest_result, read_note
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.records import dataclass
from torchrelay.runners.commands.run_library import experiment_of, shown
from torchrelay.runners.commands.run_notes import best_of
from torchrelay.runners.monitoring.console import finite, human_number
from torchrelay.runners.monitoring.status import standing


@dataclass(frozen=True)
class LibraryLine:
    """One run; `problem` says why its notes could not be read. `best` is value and epoch of `metric`."""

    id: str
    path: Path
    experiment: str
    state: str = "unreadable"
    why: str = ""
    epoch: int | None = None
    metric: str | None = None
    best: tuple[float, int] | None = None
    tested: Mapping[str, Any] | None = None
    message: str = ""
    code_id: str | None = None
    config_id: str | None = None
    amended: tuple[str | None, ...] = ()
    created: float | None = None
    problem: str | None = None

    @property
    def key_metric(self) -> str:
        """The best value of the run's own metric, else what its newest test measured."""
        if self.best is not None:
            return f"{self.metric}={human_number(self.best[0])} (epoch {self.best[1]})"
        found = (self.tested or {}).get("metrics") or {}
        shown = [f"{name}={_short(value)}" for name, value in sorted(found.items())]
        return f"test {', '.join(shown[:2])} (epoch {(self.tested or {}).get('epoch')})" if shown else "-"

    def json(self) -> dict[str, Any]:
        """As an object of `runs ls --json`."""
        tested = self.tested
        return {
            "id": self.id,
            "path": shown(self.path),
            "experiment": self.experiment,
            "state": self.state,
            "why": self.why,
            "epoch": self.epoch,
            "metric": self.metric,
            "best": None if self.best is None else finite(self.best[0]),
            "best_epoch": None if self.best is None else self.best[1],
            "test": None
            if tested is None
            else {"epoch": tested.get("epoch"), **(tested.get("metrics") or {})},
            "message": self.message,
            "code_id": self.code_id,
            "config_id": self.config_id,
            "amended": list(self.amended),
            "created": self.created,
            "problem": self.problem,
        }


def library_line(path: Path, root: Path) -> LibraryLine:
    """Read what a run notes of itself; never raises for what its files are like."""
    experiment = experiment_of(path, root)
    try:
        return _read(path, experiment)
    except RelayError as error:
        return LibraryLine(path.name, path, experiment, problem=str(error))


def _read(path: Path, experiment: str) -> LibraryLine:
    run, note, stands = RunDirectory(path), read_note(path), standing(path)
    best = best_of_run(path)
    code_id, config_id = _ids(path, note)
    problems: list[str] = []
    created = run.known_identity(problems.append).get("created")
    return LibraryLine(
        path.name,
        path,
        experiment,
        stands.word,
        stands.why,
        stands.epoch,
        None if best is None else best[0],
        None if best is None else best_of(run.metrics(), best),
        newest_result(path),
        "" if note is None else note.message,
        code_id,
        config_id,
        () if note is None else tuple(one.get("code_id") for one in note.amended),
        created if type(created) in (int, float) else None,
        problem=problems[0] if problems else None,
    )


def _ids(path: Path, note: Note | None) -> tuple[str | None, str | None]:
    """What the run is of; of a run without such a note, what its newest start was."""
    if note is not None:
        return note.code_id, note.config_id
    starts = captures(path)
    if not starts:
        return None, None
    config_id = starts[-1].get("config_id")
    return code_id_of(starts[-1]), config_id if isinstance(config_id, str) else None


def _short(value: Any) -> str:
    return human_number(value) if isinstance(value, float) else str(value)
