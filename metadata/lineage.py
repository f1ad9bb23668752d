"""`lineage/` of a run directory: the runs that a run was built on, as they were when they were read.

The same record stands in `lineage/<alias>/stage.json` and, without the list of files, in the value
`upstream.lineage` of every checkpoint of the run, there under the path of aliases that leads to the stage
(`expert/encoder`).

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
    """One stage: which run, which epoch of it, what was taken. `asked` is what the user wrote of it.

    `path` is where it lay then, for people; nothing ever looks there again. `applied` are the warm starts
    from it, `kept` the blobs of it that are in every checkpoint of this run, by the names they had there.
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
        """The record as it is stored."""
        found = asdict(self)
        metrics = {name: finite(value) for name, value in self.metrics.items()}
        return {**found, "metrics": metrics, "applied": list(self.applied), "kept": list(self.kept)}


def check_alias(alias: Any) -> str:
    """Return an alias that may name a folder and a part of a blob's name; raises UsageError."""
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
"""Folders of a run that say what it was; checkpoints, metrics and logs are not among them."""
_UNFINISHED = ".tmp-"
"""Also what this very capture makes, where one run lies below a folder of another."""
LARGEST_BYTES = 1 << 30
"""Larger files are left out, by name; texts and archives of source are far below."""
_NO_FILE = (errno.EINVAL, errno.ENXIO, errno.ENODEV, errno.ELOOP)


@dataclass(frozen=True)
class LineageStage:
    """What is to be kept of one stage: its record, what its epoch held, where its run lies, if one does."""

    alias: str
    record: StageRecord
    blobs: Sequence[Mapping[str, Any]]
    run: Path | None


def capture(run: Path, stages: Sequence[LineageStage]) -> None:
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


_CAPTURED = re.compile(r"captured\.([0-9]{1,9})\.json")
_DEPTH = 64


@dataclass(frozen=True)
class KnownStage:
    """A stage as a run remembers it: the aliases that lead to it, where its files lie, its record."""

    aliases: tuple[str, ...]
    folder: Path
    record: Mapping[str, Any] = field(repr=False)

    @property
    def path(self) -> str:
        """How people call it: `expert/encoder`."""
        return "/".join(self.aliases)

    @property
    def files(self) -> tuple[str, ...]:
        """The copied files of the stage itself, without those of the stages that it was built on."""
        files = self.record.get("files")
        names = sorted(files) if isinstance(files, dict) else []
        return tuple(name for name in names if not name.startswith(f"{FOLDER}/"))

    @property
    def overrides(self) -> tuple[str, ...]:
        """What the command line of the stage's last start put over its configuration."""
        found = [(int(match[1]), name) for name in self.files if (match := _CAPTURED.fullmatch(name))]
        if not found:
            return ()
        said = (read_json(self.folder / max(found)[1]) or {}).get("overrides")
        return tuple(map(str, said)) if isinstance(said, list) else ()


def stages_of(run: Path) -> list[KnownStage]:
    """All stages that a run was built on, each before those that it was built on itself.

    Empty where there are none. Raises DamagedError for a record that is none.
    """
    return list(_below(run, ()))


def find_stage(run: Path, path: str) -> KnownStage:
    """The stage that `expert/encoder` names; raises UsageError saying which there are."""
    known = stages_of(run)
    for stage in known:
        if stage.path == path.strip("/"):
            return stage
    names = ", ".join(stage.path for stage in known) or "none"
    raise UsageError(f"{run} was built on no stage {path!r:.80}; there is {names}")


def _below(folder: Path, above: tuple[str, ...]) -> Iterator[KnownStage]:
    if len(above) > _DEPTH:
        raise DamagedError(f"{folder} is nested deeper than {_DEPTH} stages, which torchrelay never wrote")
    for path in sorted((folder / FOLDER).glob(f"*/{STAGE}")):
        record = read_json(path)
        if record is None or not isinstance(record.get("epoch"), int):
            raise DamagedError(f"{path} is no record of a stage: restore it from a copy of the run")
        stage = KnownStage((*above, path.parent.name), path.parent, record)
        yield stage
        yield from _below(path.parent, stage.aliases)
