"""Test results of a run: a file each, `results/test-e<epoch>-<code>.json`.

Results of other code or of another configuration than the run's (`test --ignore`) lie beside them, with the
configuration in their name: they are no results of the run. `results/evaluated.jsonl` names the files that
`eval` read and wrote by an epoch of the run.

Files of their own, so that tests beside a running training take nothing from each other or from it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchrelay.errors import StorageError
from torchrelay.metadata.files import append_lines, read_json, read_lines, replace_file, write_json

FOLDER = "results"
_EVALUATED = "evaluated.jsonl"
Evaluated = dict[Path, dict[str, bool]]
"""Absolute paths of files that `eval` read or wrote, each with the digests that they had, and whether the
content was a result of `eval`."""
_NAME = re.compile(r"test-e([0-9]{8,})-([0-9a-z]{1,12})(-[0-9a-z]{1,12})?\.json")
_NO_CODE, _NO_CONFIG = "unknown", "none"
_SHORT = 12


def result_path(
    run: Path, epoch: int, code_id: str | None, config_id: str | None = None, *, own: bool = True
) -> Path:
    """Where the result of an epoch under some code lies."""
    other = "" if own else f"-{(config_id or _NO_CONFIG)[:_SHORT]}"
    return run / FOLDER / f"test-e{epoch:08d}-{(code_id or _NO_CODE)[:_SHORT]}{other}.json"


def read_result(
    run: Path, epoch: int, code_id: str | None, config_id: str | None = None, *, own: bool = True
) -> dict[str, Any] | None:
    """None where there is none; raises DamagedError, StorageError."""
    found = read_json(result_path(run, epoch, code_id, config_id, own=own))
    return None if found is None else _sound(found)


def write_result(run: Path, epoch: int, code_id: str | None, content: Mapping[str, Any]) -> Path:
    """Store a result, in place of an older one of the same epoch and code; raises StorageError."""
    own = content.get("own", True) is not False
    path = result_path(run, epoch, code_id, content.get("config_id"), own=own)
    try:
        path.parent.mkdir(exist_ok=True)
    except OSError as error:
        raise StorageError(f"cannot make {path.parent}: {error.strerror}") from error
    write_json(path, content)
    return path


def results(run: Path) -> list[dict[str, Any]]:
    """All of them in the order of their epochs, then of the time; raises DamagedError, StorageError."""
    folder = run / FOLDER
    names = sorted(one.name for one in folder.iterdir()) if folder.is_dir() else []
    found = [read_json(folder / name) for name in names if _NAME.fullmatch(name)]
    return sorted((_sound(one) for one in found if one is not None), key=_when)


def newest_result(run: Path) -> dict[str, Any] | None:
    """The newest one of the highest epoch that is the run's own."""
    found = [one for one in results(run) if one.get("own", True) is not False]
    return found[-1] if found else None


def _sound(result: dict[str, Any]) -> dict[str, Any]:
    """With tables where tables belong, whoever wrote the file."""
    tables = {
        name: one if isinstance(one := result.get(name), dict) else {} for name in ("metrics", "values")
    }
    return {**result, "run": str(result.get("run")), **tables}


def _when(result: Mapping[str, Any]) -> tuple[int, float]:
    epoch, time = result.get("epoch"), result.get("time")
    return (epoch if type(epoch) is int else 0), (time if type(time) in (int, float) else 0.0)  # type: ignore[return-value]


def evaluated(run: Path) -> Evaluated:
    """What `eval` read and wrote by an epoch of the run; raises StorageError."""
    found: Evaluated = {}
    for line in read_lines(run / FOLDER / _EVALUATED):
        name, digest, written = line.get("name"), line.get("sha256"), line.get("written") is True
        if isinstance(name, str) and isinstance(digest, str) and name.isprintable():
            known = found.setdefault(Path(os.path.normpath(run.resolve() / name)), {})
            known[digest] = known.get(digest, False) or written
    return found


def note_evaluated(run: Path, files: Evaluated) -> None:
    """Note what `eval` read and wrote, by names that a move of all leaves true; raises StorageError."""
    known, here = evaluated(run), run.resolve()
    lines = [
        {"name": os.path.relpath(path, here), "sha256": digest, "written": written}
        for path, digests in sorted(files.items())
        for digest, written in digests.items()
        if written > known.get(path, {}).get(digest, -1)
    ]
    if lines:
        folder = run / FOLDER
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise StorageError(f"cannot make {folder}: {error.strerror}") from error
        append_lines(folder / _EVALUATED, lines)


def carry_evaluated(before: Path, run: Path) -> None:
    """A run that begins again knows what `eval` wrote by the one before it, which lay at the same path."""
    notes = before / FOLDER / _EVALUATED
    with suppress(OSError, StorageError):  # without it such files look like source
        if notes.is_file():
            (run / FOLDER).mkdir(exist_ok=True)
            replace_file(run / FOLDER / _EVALUATED, notes.read_bytes())
