"""Runs of one program: their directories, identities and results. Imports no torch.

Fields of `program.json`:

- program, origin: the program's name, and the file or module that it came from
- code_id, config_id: the identity of the run; other ids make other runs
- created, message: time of creation, and the user's comment
- launch: the launch that created it, so that a repeated launch resumes it
- limits: limits of the newest launch, not part of the identity
- amended: earlier code ids, replaced by `amend`

Test results are one file per epoch and code, so that tests and a running training do not interfere. Results
of other code or configurations than the run's (`test --ignore`) have the configuration in their name and do
not belong to the run. `results/evaluated.jsonl` lists the files that `eval` read and wrote.

Metric streams: `train` and `val` are the run's metrics below these names, `test` its test results. Individual
values are in `values.jsonl`; a line makes older lines of that stream from its epoch on obsolete, so that
values logged again after a crash count once.
"""

from __future__ import annotations

import os
import re
import secrets
import string
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, field, fields, replace
from pathlib import Path
from typing import Any

from torchrelay.errors import DamagedError, RelayError, StorageError, UsageError
from torchrelay.metadata.fs import (
    append_lines,
    read_json,
    read_lines,
    replace_file,
    sync_directory,
    write_json,
)
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.records import dataclass

FILE = "program.json"
FORMAT = {"major": 1, "minor": 0, "features": []}
_TEXTS = ("program", "origin", "message", "launch")


@dataclass(frozen=True)
class Identity:
    """Identity of a run: digests of its code (None, if unreadable, is unique) and configuration."""

    code_id: str | None
    config_id: str | None

    def same(self, other: Identity) -> bool:
        """Return True if a launch with one identity may resume a run of the other."""
        return self.code_id is not None and self == other


@dataclass(frozen=True)
class ProgramRecord:
    """Content of `program.json`."""

    program: str
    origin: str
    code_id: str | None
    config_id: str | None
    created: float
    message: str = ""
    launch: str = ""
    limits: Mapping[str, Any] = field(default_factory=dict)
    amended: tuple[Mapping[str, Any], ...] = ()

    @property
    def identity(self) -> Identity:
        """Identity of the run, after the newest amendment."""
        return Identity(self.code_id, self.config_id)

    @property
    def is_of_program(self) -> bool:
        """True if a class in a Python file made the run, False if only a configuration did."""
        return self.origin.endswith(".py")


def read_note(run: Path) -> ProgramRecord | None:
    """Read `program.json`; None if the directory is not a run of a program. Raises DamagedError."""
    found = read_json(run / FILE)
    if found is None:
        return None
    known = {one.name for one in fields(ProgramRecord)}
    values = {name: value for name, value in found.items() if name in known}
    amended = values.pop("amended", [])
    right = all(isinstance(values.get(name, ""), str) for name in _TEXTS)
    right &= all(isinstance(values.get(name), str | None) for name in ("code_id", "config_id"))
    right &= {"program", "origin", "code_id", "config_id", "created"} <= values.keys()
    right &= type(values.get("created")) in (int, float) and isinstance(values.get("limits", {}), dict)
    if not right or not isinstance(amended, list):
        raise DamagedError(f"{run / FILE} is damaged: restore it from a copy")
    amended = [one for one in amended if isinstance(one, dict) and isinstance(one.get("code_id"), str | None)]
    return ProgramRecord(**values, amended=tuple(amended))


def write_note(run: Path, note: ProgramRecord) -> None:
    """Write `program.json`; raises StorageError."""
    write_json(run / FILE, {"format": FORMAT, **asdict(note), "amended": list(note.amended)})


FOLDER = "results"
_EVALUATED = "evaluated.jsonl"
Evaluated = dict[Path, dict[str, bool]]
"""Absolute paths of files that `eval` read or wrote, with their digests and whether `eval` wrote them."""
_NAME = re.compile(r"test-e([0-9]{8,})-([0-9a-z]{1,12})(-[0-9a-z]{1,12})?\.json")
_NO_CODE, _NO_CONFIG = "unknown", "none"
_SHORT = 12


def result_path(
    run: Path, epoch: int, code_id: str | None, config_id: str | None = None, *, own: bool = True
) -> Path:
    """Return the path of the test result of an epoch and code."""
    other = "" if own else f"-{(config_id or _NO_CONFIG)[:_SHORT]}"
    return run / FOLDER / f"test-e{epoch:08d}-{(code_id or _NO_CODE)[:_SHORT]}{other}.json"


def read_result(
    run: Path, epoch: int, code_id: str | None, config_id: str | None = None, *, own: bool = True
) -> dict[str, Any] | None:
    """Read a test result; None if there is none. Raises DamagedError, StorageError."""
    found = read_json(result_path(run, epoch, code_id, config_id, own=own))
    return None if found is None else _sound(found)


def write_result(run: Path, epoch: int, code_id: str | None, content: Mapping[str, Any]) -> Path:
    """Write a test result, replacing an older one of the same epoch and code; raises StorageError."""
    own = content.get("own", True) is not False
    path = result_path(run, epoch, code_id, content.get("config_id"), own=own)
    _make_folder(path.parent)
    write_json(path, content)
    return path


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise StorageError(f"cannot create {folder}: {error.strerror}") from error


def results(run: Path) -> list[dict[str, Any]]:
    """Return all test results by epoch and time; raises DamagedError, StorageError."""
    folder = run / FOLDER
    names = sorted(one.name for one in folder.iterdir()) if folder.is_dir() else []
    found = [read_json(folder / name) for name in names if _NAME.fullmatch(name)]
    return sorted((_sound(one) for one in found if one is not None), key=_when)


def newest_result(run: Path) -> dict[str, Any] | None:
    """Return the newest of the run's own test results of the highest epoch."""
    found = [one for one in results(run) if one.get("own", True) is not False]
    return found[-1] if found else None


def newest_test(run: Path) -> dict[str, Any] | None:
    """Return epoch and metrics of `newest_result` as one dictionary."""
    found = newest_result(run)
    return None if found is None else {"epoch": found.get("epoch"), **found["metrics"]}


def _sound(result: dict[str, Any]) -> dict[str, Any]:
    """Replace invalid tables of a result by empty ones."""
    tables = {name: result.get(name) for name in ("metrics", "values")}
    sound = {name: one if isinstance(one, dict) else {} for name, one in tables.items()}
    return {**result, "run": str(result.get("run")), **sound}


def _when(result: Mapping[str, Any]) -> tuple[int, float]:
    epoch, time = result.get("epoch"), result.get("time")
    return (epoch if type(epoch) is int else 0), (time if type(time) in (int, float) else 0.0)  # type: ignore[return-value]


def evaluated(run: Path) -> Evaluated:
    """Return the files that `eval` read and wrote with epochs of the run; raises StorageError."""
    found: Evaluated = {}
    for line in read_lines(run / FOLDER / _EVALUATED):
        name, digest, written = line.get("name"), line.get("sha256"), line.get("written") is True
        if isinstance(name, str) and isinstance(digest, str) and name.isprintable():
            known = found.setdefault(Path(os.path.normpath(run.resolve() / name)), {})
            known[digest] = known.get(digest, False) or written
    return found


def note_evaluated(run: Path, files: Evaluated) -> None:
    """Record files that `eval` read and wrote, by relocatable names; raises StorageError."""
    known, here = evaluated(run), run.resolve()
    lines = [
        {"name": os.path.relpath(path, here), "sha256": digest, "written": written}
        for path, digests in sorted(files.items())
        for digest, written in digests.items()
        if written > known.get(path, {}).get(digest, -1)
    ]
    if lines:
        _make_folder(run / FOLDER)
        append_lines(run / FOLDER / _EVALUATED, *lines)


ASIDE = ".retrained"
"""Directory for earlier contents of runs that were retrained."""
_ATTEMPTS = 20


@dataclass(frozen=True)
class ProgramRun:
    """A run and its `program.json`."""

    path: Path
    note: ProgramRecord

    @property
    def id(self) -> str:
        """Name of its directory."""
        return self.path.name


@dataclass(frozen=True)
class Found:
    """The runs of a directory, oldest first, and those with an unreadable `program.json`, with the reason."""

    runs: tuple[ProgramRun, ...] = ()
    unread: Mapping[Path, RelayError] = field(default_factory=dict)


class RunStore:
    """Runs below one directory; the constructor does not access files."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def look(self) -> Found:
        """Find all runs of programs; damaged runs are listed separately."""
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
        """Return the readable runs, oldest first."""
        return list(self.look().runs)

    def find(self, wanted: str) -> ProgramRun:
        """Find a run by its id, a unique part of it, or its path; raises UsageError."""
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
        what = f"{len(found)} runs have {wanted!r} in their ids" if found else f"no run {wanted!r}"
        known = ", ".join(run.id for run in (found or runs)[-5:]) or "none"
        raise UsageError(f"{what} in {self.directory}; known are {known}")

    def create(self, note: ProgramRecord, best: tuple[str, str] | None, world_size: int) -> ProgramRun:
        """Create a run with a new id and its identity; raises StorageError."""
        for _ in range(_ATTEMPTS):
            letters = "".join(secrets.choice(string.ascii_lowercase) for _ in range(5))
            at = time.strftime("%Y%m%d-%H%M%S", time.localtime(note.created))
            path = self.directory / f"{at}-{letters}"
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                continue
            except OSError as error:
                raise StorageError(f"cannot create the run {path}: {error.strerror}") from error
            return _begin(path, note, best, world_size)
        raise StorageError(f"cannot create a run in {self.directory}: all ids are taken")

    def begin_again(
        self, run: ProgramRun, note: ProgramRecord, best: tuple[str, str] | None, world_size: int
    ) -> tuple[ProgramRun, Path]:
        """Move the contents of a run aside, where they are then, and create it again with the same id.

        No process may write to the run meanwhile.
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
        notes = aside / FOLDER / _EVALUATED
        with suppress(OSError, StorageError):  # without the records of `eval`, its files look like source
            if notes.is_file():
                (run.path / FOLDER).mkdir(exist_ok=True)
                replace_file(run.path / FOLDER / _EVALUATED, notes.read_bytes())
        return begun, aside


def update_note(run: ProgramRun, **changes: Any) -> ProgramRun:
    """Update fields of `program.json`; raises StorageError."""
    note = replace(run.note, **changes)
    if note != run.note:
        write_note(run.path, note)
    return replace(run, note=note)


def listed(limits: Mapping[str, Any]) -> str:
    """Format limits for messages."""
    return ", ".join(f"{name} {value}" for name, value in limits.items() if value is not None)


def _begin(path: Path, note: ProgramRecord, best: tuple[str, str] | None, world_size: int) -> ProgramRun:
    RunDirectory(path).create(note.program, best, world_size)
    write_note(path, note)
    return ProgramRun(path, note)


VALUES = "values.jsonl"


def metric_rows(run: str | os.PathLike[str], stream: str) -> list[dict[str, Any]]:
    """Return rows `{"epoch": 3, "loss": 0.5, ...}` of a run directory, in epoch order.

    Individually logged values are lists. Epochs replaced by a rewind or after a crash are not included.

    Args:
        run: The run directory.
        stream: `train`, `val`, `test`, or another prefix before the `/` in names of metrics.

    Returns:
        A row per epoch.

    Raises:
        UsageError: The run does not exist.

    Example:
        metric_rows("runs/hello", "val")
    """
    path = Path(run)
    if not path.is_dir():
        raise UsageError(f"run directory {path} does not exist")
    if stream == "test":
        return [_test_row(one) for one in results(path)]
    lines = RunDirectory(path).metrics()
    rows: dict[int, dict[str, Any]] = {}
    for line in lines:
        metrics = known.items() if isinstance(known := line.get("metrics"), dict) else ()
        own = {name: one for name, one in metrics if name.startswith(f"{stream}/")}
        rows[line["epoch"]] = {name.removeprefix(f"{stream}/"): one for name, one in own.items()}
    for epoch, values in _values(path, stream).items():
        if epoch in rows:
            rows[epoch] |= values
    return [{"epoch": epoch, **row} for epoch, row in sorted(rows.items()) if row]


def _test_row(result: Mapping[str, Any]) -> dict[str, Any]:
    code = one[:_SHORT] if isinstance(one := result.get("code_id"), str) else None
    return {"epoch": result.get("epoch"), "code": code, **result["metrics"], **result["values"]}


def append_values(run: Path, epoch: int, stream: str, values: Mapping[str, list[float | str]]) -> None:
    """Append individual values of an epoch; raises StorageError."""
    append_lines(run / VALUES, {"epoch": epoch, "stream": stream, "values": values})


def _values(run: Path, stream: str) -> dict[int, dict[str, Any]]:
    kept: dict[int, dict[str, Any]] = {}
    for line in read_lines(run / VALUES):
        epoch, values = line.get("epoch"), line.get("values")
        if line.get("stream") != stream or type(epoch) is not int or not isinstance(values, dict):
            continue
        kept = {known: one for known, one in kept.items() if known < epoch} | {epoch: values}
    return kept
