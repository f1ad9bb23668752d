"""The runs of one program: a directory of run directories, `<YYYYMMDD-HHMMSS>-<5 letters>` each."""

from __future__ import annotations

import secrets
import string
import time
from collections.abc import Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from torchrelay.errors import DamagedError, RelayError, StorageError, UsageError
from torchrelay.metadata.experiment.note import Note, read_note, write_note
from torchrelay.metadata.experiment.results import carry_evaluated
from torchrelay.metadata.files import sync_directory
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.records import dataclass

ASIDE = ".retrained"
"""Where earlier contents of runs that were trained again lie."""
_TRIES = 20


@dataclass(frozen=True)
class ProgramRun:
    """A run and its note."""

    path: Path
    note: Note

    @property
    def id(self) -> str:
        """The name of its directory."""
        return self.path.name


@dataclass(frozen=True)
class Found:
    """The runs of a directory, the oldest first, and those of which the note cannot be read, with why."""

    runs: tuple[ProgramRun, ...] = ()
    unread: Mapping[Path, RelayError] = field(default_factory=dict)


class RunStore:
    """Runs below one directory; creating the object touches nothing."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def look(self) -> Found:
        """All runs; directories that are none of programs are passed over. A damaged one stops no other."""
        if not self.directory.is_dir():
            return Found()
        runs: list[ProgramRun] = []
        unread: dict[Path, RelayError] = {}
        for path in sorted(self.directory.iterdir()):
            if path.name.startswith(".") or not path.is_dir():
                continue
            try:
                note = read_note(path)
            except (DamagedError, StorageError) as error:
                unread[path] = error
                continue
            if note is not None:
                runs.append(ProgramRun(path, note))
        return Found(tuple(sorted(runs, key=lambda run: (run.note.created, run.id))), unread)

    def runs(self) -> list[ProgramRun]:
        """The runs that can be read, the oldest first."""
        return list(self.look().runs)

    def find(self, wanted: str) -> ProgramRun:
        """A run by its id, by a part of it that no other has, or by its path.

        Raises UsageError; of a run whose note cannot be read, and that no other's name is, what it is.
        """
        there = self.look()
        runs = there.runs
        for path, error in there.unread.items():
            if path.name == wanted or (
                wanted and wanted in path.name and not any(wanted in run.id for run in runs)
            ):
                raise error
        exact = [run for run in runs if run.id == wanted]
        found = exact or [run for run in runs if wanted and wanted in run.id]
        if len(found) == 1:
            return found[0]
        note = read_note(Path(wanted)) if not found and Path(wanted).is_dir() else None
        if note is not None:
            return ProgramRun(Path(wanted).absolute(), note)
        what = f"{len(found)} runs have {wanted!r} in their ids" if found else f"there is no run {wanted!r}"
        known = ", ".join(run.id for run in (found or runs)[-5:]) or "none"
        raise UsageError(f"{what} in {self.directory}; there is {known}")

    def create(self, note: Note, best: tuple[str, str] | None, world_size: int) -> ProgramRun:
        """Make a run of a new id, with its identity; raises StorageError."""
        for _ in range(_TRIES):
            path = self.directory / _new_id(note.created)
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                continue
            except OSError as error:
                raise StorageError(f"cannot make the run {path}: {error.strerror}") from error
            return _begin(path, note, best, world_size)
        raise StorageError(f"cannot make a run in {self.directory}: every id is taken")

    def begin_again(
        self, run: ProgramRun, note: Note, best: tuple[str, str] | None, world_size: int
    ) -> tuple[ProgramRun, Path]:
        """Move all that a run has aside and begin it anew under its id; returns where the old one lies now.

        Nobody may write to the run meanwhile. Raises StorageError.
        """
        number = 1
        while (aside := self.directory / ASIDE / f"{run.id}.{number}").exists():
            number += 1
        try:
            aside.parent.mkdir(exist_ok=True)
            run.path.rename(aside)
            run.path.mkdir()
            sync_directory(self.directory)
        except OSError as error:
            raise StorageError(f"cannot move {run.path} to {aside}: {error.strerror}") from error
        begun = _begin(run.path, note, best, world_size)
        carry_evaluated(aside, run.path)
        return begun, aside


def update_note(run: ProgramRun, **changes: Any) -> ProgramRun:
    """Change fields of a run's note; raises StorageError."""
    note = replace(run.note, **changes)
    if note != run.note:
        write_note(run.path, note)
    return replace(run, note=note)


def listed(limits: Mapping[str, Any]) -> str:
    """Limits as people read them."""
    return ", ".join(f"{name} {value}" for name, value in limits.items() if value is not None)


def _begin(path: Path, note: Note, best: tuple[str, str] | None, world_size: int) -> ProgramRun:
    RunDirectory(path).create(note.program, best, world_size)
    write_note(path, note)
    return ProgramRun(path, note)


def _new_id(now: float) -> str:
    letters = "".join(secrets.choice(string.ascii_lowercase) for _ in range(5))
    return f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}-{letters}"
