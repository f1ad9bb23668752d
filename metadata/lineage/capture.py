"""`lineage/`: what is known of the stages that a run is built on, as it was when they were read.

    lineage/<alias>/stage.json         the record, what the epoch held, the other files with their SHA-256
    lineage/<alias>/run.json ...       copied: who the run was, what its starts were, its config/ and code/
    lineage/<alias>/lineage/<alias>/   the stages that this one was built on, copied with it

The folder is made beside its place and renamed, so a crash leaves all of it or none. One that says something
else is not overwritten: it becomes `lineage.1` and so on, for it tells of epochs that may still be there.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from torchrelay.errors import StorageError
from torchrelay.metadata.files import open_regular, read_json, sync_directory, write_json, write_new
from torchrelay.metadata.lineage.record import FORMAT, StageRecord
from torchrelay.records import dataclass

FOLDER = "lineage"
STAGE = "stage.json"
_TEMPORARY = ".tmp-lineage-"
_COPIED = ("config", "code", FOLDER)
"""Folders of a run that say what it was; checkpoints, metrics and logs are not among them."""
_UNFINISHED = ".tmp-"
"""Also what this very capture makes, where one run lies below a folder of another."""
LARGEST_BYTES = 1 << 30
"""Larger files are left out, by name; texts and archives of source are far below."""
_NO_FILE = (errno.EINVAL, errno.ENXIO, errno.ENODEV, errno.ELOOP)


@dataclass(frozen=True)
class Stage:
    """What is to be kept of one stage: its record, what its epoch held, where its run lies, if one does."""

    alias: str
    record: StageRecord
    blobs: Sequence[Mapping[str, Any]]
    run: Path | None


def capture(run: Path, stages: Sequence[Stage]) -> None:
    """Make `lineage/` of a run; raises StorageError. Only for who holds the run's log."""
    if not stages:
        return
    for left in run.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(left, ignore_errors=True)
    fresh, place = run / f"{_TEMPORARY}{secrets.token_hex(6)}", run / FOLDER
    try:
        fresh.mkdir()
        for stage in stages:
            _write_stage(fresh / stage.alias, stage)
        sync_directory(fresh)
        if place.exists():
            if _said(place) == _said(fresh):
                shutil.rmtree(fresh)
                return
            place.rename(_free(run))
        fresh.rename(place)
        sync_directory(run)
    except OSError as error:
        shutil.rmtree(fresh, ignore_errors=True)
        raise StorageError(
            f"the lineage of {run} could not be written: {error.filename or fresh}: {error.strerror}; free "
            "space or make it writable"
        ) from error


def _write_stage(folder: Path, stage: Stage) -> None:
    folder.mkdir()
    digests: dict[str, str] = {}
    left_out: list[str] = []
    for name, path in _files(stage.run) if stage.run is not None else ():
        data = _bytes_of(path)
        if data is None:
            left_out.append(name)
            continue
        digests[name] = hashlib.sha256(data).hexdigest()
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_new(folder / name, data)
    content = {"format": FORMAT, "alias": stage.alias, **stage.record.json(), "blobs": list(stage.blobs)}
    write_json(folder / STAGE, {**content, "files": digests, "left_out": left_out})
    for parent in {(folder / name).parent for name in digests}:
        sync_directory(parent)


def _bytes_of(path: Path) -> bytes | None:
    """What a file holds; None for links, pipes, devices, what is too large, and what went away meanwhile."""
    try:
        if path.is_symlink():
            return None
        with open_regular(path) as file:
            large = os.fstat(file.fileno()).st_size > LARGEST_BYTES
            data = None if large else file.read(LARGEST_BYTES + 1)
    except (FileNotFoundError, IsADirectoryError):
        return None
    except OSError as error:
        if error.errno in _NO_FILE:
            return None
        raise
    return data if data is not None and len(data) <= LARGEST_BYTES else None


def _files(run: Path) -> Iterator[tuple[str, Path]]:
    """What is copied of a run, by its name there, in order."""
    for path in sorted([run / "run.json", *run.glob("captured.*.json")]):
        if path.exists():
            yield path.name, path
    for top in _COPIED:
        for folder, folders, names in os.walk(run / top):
            folders[:] = sorted(one for one in folders if not one.startswith(_UNFINISHED))
            links = [name for name in folders if (Path(folder) / name).is_symlink()]
            for name in sorted([*names, *links]):
                if not name.startswith(_UNFINISHED):
                    path = Path(folder) / name
                    yield path.relative_to(run).as_posix(), path


def _said(place: Path) -> dict[str, Any]:
    return {path.parent.name: read_json(path) for path in sorted(place.glob(f"*/{STAGE}"))}


def _free(run: Path) -> Path:
    return next(path for number in count(1) if not (path := run / f"{FOLDER}.{number}").exists())
