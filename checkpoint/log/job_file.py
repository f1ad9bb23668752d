"""`job.json`: which job a checkpoint directory belongs to.

Created once, exclusively, before anything else; never changed. The uuid binds every log record to
this directory, so that files of another one never pass for its own.
"""

from __future__ import annotations

import uuid
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone

from torchrelay.checkpoint.disk.fields import Fields
from torchrelay.checkpoint.disk.sealed import read_sealed, seal, unseal
from torchrelay.checkpoint.disk.version import check_stamp, stamp
from torchrelay.checkpoint.log.record import LOG
from torchrelay.checkpoint.storage import Storage
from torchrelay.errors import DamagedError, UsageError

PATH = "job.json"
LIMIT_BYTES = 64 * 2**10


@dataclass(frozen=True)
class JobFile:
    """The job of a directory. `named` is False when the job had no name: then the directory's is used."""

    name: str
    uuid: str
    created: str
    named: bool = True


def read_job(storage: Storage) -> JobFile | None:
    """The job that the directory belongs to, None where none was begun.

    Raises DamagedError or FormatError for a file that cannot be trusted, and DamagedError for a log
    without one.
    """
    data = _bytes_of(storage)
    if data is None and storage.stat(f"{LOG}/{0:020d}.json") is not None:
        data = _bytes_of(storage)  # whoever began the job since then created this file before the slot
        if data is None:
            raise DamagedError(
                f"{storage.url} has a log but no {PATH}: restore it from a copy, or choose another directory"
            )
    if data is None:
        return None
    what = f"{storage.url}/{PATH}"
    try:
        fields = Fields(unseal("job", data, what), what)
    except DamagedError as error:
        raise DamagedError(f"{error}; restore it from a copy, or choose another directory") from error
    check_stamp(fields.values.get("format"), what=what)
    return JobFile(fields.text("name"), fields.text("uuid"), fields.text("created"), fields.flag("named"))


def _bytes_of(storage: Storage) -> bytes | None:
    try:
        return read_sealed("job", lambda: storage.read_range(PATH, 0, LIMIT_BYTES + 1))
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
    found = read_job(storage)
    if found is not None:
        return check_job(storage, found, name)
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    job = JobFile(name or directory_name(storage), str(uuid.uuid4()), created, named=name is not None)
    storage.mkdir("")
    try:
        storage.link_exclusive(PATH, _encode(job))
    except FileExistsError:
        return open_job(storage, name)
    storage.sync_dir("")
    return job


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
    data = _bytes_of(source)
    target.mkdir("")
    with suppress(FileExistsError):
        target.link_exclusive(PATH, data or b"")
    target.sync_dir("")


def directory_name(storage: Storage) -> str:
    """What a nameless job is called: the last part of the place it is stored in."""
    return storage.url.rstrip("/").rpartition("/")[2]


def _encode(job: JobFile) -> bytes:
    fields = {"name": job.name, "uuid": job.uuid, "created": job.created, "named": job.named}
    return seal("job", {"format": stamp(), **fields})
