"""`lineage/` of a run directory: records and copies of the runs that a run was built on.

The same record stands in `lineage/<alias>/stage.json` and, without the list of files, in the value
`upstream.lineage` of every checkpoint of the run, there under the path of aliases that leads to the stage
(`expert/encoder`).

    lineage/<alias>/stage.json         the record, what the epoch held, the other files with their SHA-256
    lineage/<alias>/run.json ...       copied: identity and launches of the run, its config/ and code/
    lineage/<alias>/lineage/<alias>/   the stages that this one was built on, copied with it

The folder is created under a temporary name and renamed, so a crash leaves all of it or nothing. A different
existing one is kept as `lineage.1` and so on, because its epochs may still exist.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, field
from itertools import count
from pathlib import Path
from typing import Any

from torchrelay.errors import DamagedError, StorageError, UsageError
from torchrelay.metadata.fs import finite, open_regular, read_json, sync_directory, write_json, write_new
from torchrelay.records import dataclass

FORMAT = {"major": 1, "minor": 0, "features": []}
_ALIAS = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")


@dataclass(frozen=True)
class StageRecord:
    """One stage: the run, where it was then, its epoch, and what was used; `asked` is the user's text.

    `applied` are the warm starts from it, `kept` its blobs that are part of every checkpoint of this run.
    """

    asked: str
    path: str
    job: str | None
    run_id: str | None
    epoch: int
    branch: int
    created: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    total_steps: int = 0
    seed: int | None = None
    applied: tuple[Mapping[str, Any], ...] = ()
    kept: tuple[str, ...] = ()

    def json(self) -> dict[str, Any]:
        """Return the stored form."""
        found = asdict(self)
        metrics = {name: finite(value) for name, value in self.metrics.items()}
        return {**found, "metrics": metrics, "applied": list(self.applied), "kept": list(self.kept)}


def check_alias(alias: Any) -> str:
    """Return the alias if it is valid as a folder and part of a blob's name; raises UsageError."""
    if isinstance(alias, str) and _ALIAS.fullmatch(alias) and alias != "lineage":
        return alias
    raise UsageError(
        f"{alias!r:.80} cannot be the alias of an upstream: use up to 63 letters, digits, _ and - beginning "
        "with a letter or digit, such as 'expert'; 'lineage' is taken"
    )


FOLDER = "lineage"
STAGE = "stage.json"
_TEMPORARY = ".tmp-lineage-"
_COPIED = ("config", "code", FOLDER)
"""Copied folders of a run, without checkpoints, metrics and logs."""
_UNFINISHED = ".tmp-"
"""Also excludes this capture, if one run is inside a folder of another."""
LARGEST_BYTES = 1 << 30
"""Larger files are not copied; texts and source archives are much smaller."""
_NO_FILE = (errno.EINVAL, errno.ENXIO, errno.ENODEV, errno.ELOOP)


@dataclass(frozen=True)
class LineageStage:
    """A stage to record: its record, the contents of its epoch, and the location of its run, if any."""

    alias: str
    record: StageRecord
    blobs: Sequence[Mapping[str, Any]]
    run: Path | None


def capture(run: Path, stages: Sequence[LineageStage]) -> None:
    """Write `lineage/` of a run, as the holder of its log; raises StorageError."""
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
            now, before = (
                {path.parent.name: read_json(path) for path in at.glob(f"*/{STAGE}")} for at in (fresh, place)
            )
            if now == before:
                shutil.rmtree(fresh)
                return
            names = (run / f"{FOLDER}.{number}" for number in count(1))
            place.rename(next(path for path in names if not path.exists()))
        fresh.rename(place)
        sync_directory(run)
    except OSError as error:
        shutil.rmtree(fresh, ignore_errors=True)
        raise StorageError(
            f"the lineage of {run} could not be written: {error.filename or fresh}: {error.strerror}; fix "
            "the storage"
        ) from error


def _write_stage(folder: Path, stage: LineageStage) -> None:
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
    """Read a regular file; None for other kinds, files that are too large, and deleted files."""
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
    """Yield the files to copy from a run, by name, in order."""
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


_CAPTURED = re.compile(r"captured\.([0-9]{1,9})\.json")
_DEPTH = 64


@dataclass(frozen=True)
class KnownStage:
    """A recorded stage: its aliases, the folder of its files, and its record."""

    aliases: tuple[str, ...]
    folder: Path
    record: Mapping[str, Any] = field(repr=False)

    @property
    def path(self) -> str:
        """Path of aliases, such as `expert/encoder`."""
        return "/".join(self.aliases)

    @property
    def files(self) -> tuple[str, ...]:
        """Copied files of the stage, without those of its own upstream stages."""
        files = self.record.get("files")
        names = sorted(files) if isinstance(files, dict) else []
        return tuple(name for name in names if not name.startswith(f"{FOLDER}/"))

    @property
    def overrides(self) -> tuple[str, ...]:
        """Overrides on the command line of the stage's last launch."""
        found = [(int(match[1]), name) for name in self.files if (match := _CAPTURED.fullmatch(name))]
        if not found:
            return ()
        said = (read_json(self.folder / max(found)[1]) or {}).get("overrides")
        return tuple(map(str, said)) if isinstance(said, list) else ()


def stages_of(run: Path) -> list[KnownStage]:
    """Return all stages that a run was built on, each before its own upstream stages; raises DamagedError."""
    return list(_below(run, ()))


def find_stage(run: Path, path: str) -> KnownStage:
    """Find the stage with a path such as `expert/encoder`; raises UsageError with the known ones."""
    known = stages_of(run)
    for stage in known:
        if stage.path == path.strip("/"):
            return stage
    names = ", ".join(stage.path for stage in known) or "none"
    raise UsageError(f"{run} was not built on a stage {path!r:.80}; known are {names}")


def _below(folder: Path, above: tuple[str, ...]) -> Iterator[KnownStage]:
    if len(above) > _DEPTH:
        raise DamagedError(f"{folder} is nested deeper than {_DEPTH} stages")
    for path in sorted((folder / FOLDER).glob(f"*/{STAGE}")):
        record = read_json(path)
        if record is None or not isinstance(record.get("epoch"), int):
            raise DamagedError(f"{path} is not a valid record of a stage: restore it from a copy of the run")
        stage = KnownStage((*above, path.parent.name), path.parent, record)
        yield stage
        yield from _below(path.parent, stage.aliases)
