"""`job.json`: which job a checkpoint directory belongs to.

Created once, exclusively, before anything else. The uuid binds every log record to this directory, so
that files of another one never pass for its own. Every record repeats what the file says (`holder`), so
that one which is lost or damaged is read from the log, and written again by the log's next owner.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from torchrelay.checkpoint.format.canonical_json import (
    Fields,
    check_stamp,
    read_sealed,
    seal,
    sealed_bytes,
    sha256,
    stamp,
    unseal,
)
from torchrelay.checkpoint.format.names import DATA, TRY, manifest_path
from torchrelay.checkpoint.log.record import LOG, Record, decode, slot_path
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.errors import DamagedError, UsageError
from torchrelay.records import dataclass

PATH = "job.json"
_SLOT = re.compile(r"([0-9]{20})\.json", re.ASCII)


@dataclass(frozen=True)
class JobFile:
    """The job of a directory. `named` is False when the job had no name: then the directory's is used.

    `damage` says what is wrong with `job.json` where the log told the rest.
    """

    name: str
    uuid: str
    created: str
    named: bool = True
    damage: str = field(default="", compare=False)

    @property
    def notices(self) -> tuple[str, ...]:
        """What people should know of the file."""
        said = "the log tells the same, and the next start or torchrelay ckpt repair writes it again"
        return (f"{self.damage}; {said}",) if self.damage else ()

    def repeated(self) -> dict[str, Any]:
        """What the log's holder says of it; the uuid stands in every record besides."""
        return {"job": self.name, "created": self.created, "named": self.named}

    def as_repeated(self, holder: Mapping[str, Any]) -> JobFile:
        """The job as the log's holder tells it, with `damage` where the file says something else."""
        if "named" not in holder:  # written before the log repeated the file
            return self
        told = _repeated_in(self.uuid, holder)
        if told == self:
            return self
        return replace(told, damage=self.damage or f"{PATH} is not as the log repeats it")


def read_job(storage: Storage) -> JobFile | None:
    """The job that the directory belongs to, None where none was begun.

    Where the file is lost or damaged the log tells it (see `JobFile.damage`). Raises FormatError for a
    file of another version, DamagedError where no record of the log can be trusted either.
    """
    data = _bytes_of(storage)
    if data is None and storage.stat(slot_path(0)) is not None:
        data = _bytes_of(storage)  # whoever began the job since then created this file before the slot
        if data is None:
            return _told_by_log(storage, f"{PATH} is missing")
    if data is None:
        return None
    try:
        fields = Fields(unseal("job", data, PATH), PATH)
        check_stamp(fields.values.get("format"), what=f"{storage.url}/{PATH}")
        return JobFile(fields.text("name"), fields.text("uuid"), fields.text("created"), fields.flag("named"))
    except DamagedError as error:
        return _told_by_log(storage, str(error))


def outvoted(storage: Storage, job: JobFile) -> JobFile | None:
    """The job that log and epochs agree on, where `job.json` is whole and names another; else None.

    The log alone does not decide: that could be the one that was copied here from somewhere else.
    """
    record = next(_records(storage), None)
    if record is None or record.job == job.uuid:
        return None
    entries = record.state.entries
    if not any(_is_there(storage, one.try_name, one.manifest_sha256) for one in reversed(entries)) and (
        entries or any(map(TRY.fullmatch, storage.list(DATA)))
    ):
        return None
    damage = f"{PATH} is that of another job ({job.name!r}, uuid {job.uuid}), log and epochs are not"
    return replace(_repeated_in(record.job, record.state.holder), damage=damage)


def _is_there(storage: Storage, try_name: str, manifest_sha256: str) -> bool:
    with suppress(FileNotFoundError):
        path = manifest_path(try_name)
        return sha256(storage.read_range(path, 0, storage.stat(path) or 0)) == manifest_sha256
    return False


def _told_by_log(storage: Storage, damage: str) -> JobFile | None:
    """What the newest record that can be read says of the job; None where there is no record at all."""
    record = next(_records(storage), None)
    if record is not None:
        return replace(_repeated_in(record.job, record.state.holder), damage=damage)
    if any(map(_SLOT.fullmatch, storage.list(LOG))):
        raise DamagedError(
            f"{storage.url}: {damage}, and no record of its log can be trusted: restore {PATH} or the log "
            "from a copy, or choose another directory"
        )
    return None


def _records(storage: Storage) -> Iterator[Record]:
    """The records of whatever job that can be read, newest first. This lists, so it is for damage only."""
    slots = {int(match[1]) for match in map(_SLOT.fullmatch, storage.list(LOG)) if match}
    for slot in sorted(slots, reverse=True):
        with suppress(DamagedError, FileNotFoundError):
            yield decode(sealed_bytes(storage, slot_path(slot)), slot=slot, job=None)


def _repeated_in(job_uuid: str, holder: Mapping[str, Any]) -> JobFile:
    """Logs of older versions do not say whether the job had a name: then one without may use them, too."""
    created = holder.get("created", holder.get("since", ""))
    return JobFile(str(holder.get("job", "")), job_uuid, str(created), holder.get("named") is True)


def _bytes_of(storage: Storage) -> bytes | None:
    try:
        return read_sealed("job", lambda: sealed_bytes(storage, PATH))
    except FileNotFoundError:
        return None


def check_job(storage: Storage, job: JobFile, name: str | None) -> JobFile:
    """Refuse a directory that belongs to another job (UsageError).

    A job without a name may use a directory that was begun without one, wherever it was moved to.
    """
    if job.name == (name or directory_name(storage)) or (name is None and not job.named):
        return job
    mine = f"job {name!r}" if name else "a job without a name"
    raise UsageError(
        f"{storage.url} belongs to job {job.name!r}, not to {mine}: "
        f"choose another directory, or call the job {job.name!r}"
    )


def open_job(storage: Storage, name: str | None) -> JobFile:
    """Read and check the directory's job, or begin it: whoever is first to create the file decides."""
    return check_job(storage, begin_job(storage, name), name)


def begin_job(storage: Storage, name: str | None) -> JobFile:
    """The same; a job that is there already is not compared with the name."""
    found = read_job(storage)
    if found is not None:
        return found
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    job = JobFile(name or directory_name(storage), str(uuid.uuid4()), created, named=name is not None)
    storage.mkdir("")
    try:
        storage.link_exclusive(PATH, _encode(job))
    except FileExistsError:
        found = read_job(storage)
        if found is not None:
            return found
        # Damaged before anything was written. Of two that get here slot 0 decides, the other one follows.
        storage.replace(PATH, _encode(job))
    storage.sync_dir("")
    return job


def write_again(storage: Storage, job: JobFile) -> None:
    """Put back a file that was lost or damaged. Only for the owner of the log, from what that says."""
    storage.replace(PATH, _encode(job))
    storage.sync_dir("")


def same_job(one: Storage, other: Storage) -> None:
    """Refuse two places that belong to different jobs (UsageError), also such of one name."""
    jobs = read_job(one), read_job(other)
    if jobs[0] is not None and jobs[1] is not None and jobs[0].uuid != jobs[1].uuid:
        raise UsageError(
            f"{one.url} and {other.url} belong to two jobs, or to one that was begun twice: choose an empty "
            "directory for one of them"
        )


def share_job(near: Storage, far: Storage, name: str | None) -> None:
    """Make both places those of one job: where one has begun none, it gets the other's file.

    Raises what `open_job` and `same_job` raise.
    """
    if read_job(near) is None:
        open_job(far, name)
        _copy(far, near)
    elif read_job(far) is None:
        _copy(near, far)
    same_job(near, far)


def _copy(source: Storage, target: Storage) -> None:
    job = read_job(source)
    target.mkdir("")
    with suppress(FileExistsError):
        target.link_exclusive(PATH, _encode(job) if job else b"")
    target.sync_dir("")


def has_job(directory: Path) -> bool:
    """Whether a local directory holds checkpoints: by `job.json`, or by a log that has lost it."""
    if (directory / PATH).is_file():
        return True
    with suppress(OSError):
        return any(_SLOT.fullmatch(path.name) for path in (directory / LOG).iterdir())
    return False


def holds_job(storage: Storage) -> bool:
    """The same of any storage."""
    return storage.stat(PATH) is not None or storage.stat(slot_path(0)) is not None


def directory_name(storage: Storage) -> str:
    """What a nameless job is called: the last part of the place it is stored in."""
    return storage.url.rstrip("/").rpartition("/")[2]


def _encode(job: JobFile) -> bytes:
    fields = {"name": job.name, "uuid": job.uuid, "created": job.created, "named": job.named}
    return seal("job", {"format": stamp(), **fields})
