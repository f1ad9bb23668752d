"""`job.json` of a place: whose it is, whether log and epochs agree, and one job in two places."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from torchrelay.checkpoint.format.canonical_json import sha256
from torchrelay.checkpoint.format.names import DATA, TRY, manifest_path
from torchrelay.checkpoint.log.record import (
    JOB_PATH,
    LOG,
    SLOT,
    JobFile,
    encode_job,
    open_job,
    read_job,
    readable_records,
    repeated_in,
    slot_path,
)
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.errors import UsageError


def outvoted(storage: Storage, job: JobFile) -> JobFile | None:
    """The job that log and epochs agree on, where `job.json` is whole and names another; else None.

    The log alone does not decide: that could be the one that was copied here from somewhere else.
    """
    record = next(readable_records(storage), None)
    if record is None or record.job == job.uuid:
        return None
    entries = record.state.entries
    if not any(_is_there(storage, one.try_name, one.manifest_sha256) for one in reversed(entries)) and (
        entries or any(map(TRY.fullmatch, storage.list(DATA)))
    ):
        return None
    damage = f"{JOB_PATH} is that of another job ({job.name!r}, uuid {job.uuid}), log and epochs are not"
    return replace(repeated_in(record.job, record.state.holder), damage=damage)


def _is_there(storage: Storage, try_name: str, manifest_sha256: str) -> bool:
    with suppress(FileNotFoundError):
        path = manifest_path(try_name)
        return sha256(storage.read_range(path, 0, storage.stat(path) or 0)) == manifest_sha256
    return False


def write_again(storage: Storage, job: JobFile) -> None:
    """Put back a file that was lost or damaged. Only for the owner of the log, from what that says."""
    storage.replace(JOB_PATH, encode_job(job))
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
        target.link_exclusive(JOB_PATH, encode_job(job) if job else b"")
    target.sync_dir("")


def has_job(directory: Path) -> bool:
    """Whether a local directory holds checkpoints: by `job.json`, or by a log that has lost it."""
    if (directory / JOB_PATH).is_file():
        return True
    with suppress(OSError):
        return any(SLOT.fullmatch(path.name) for path in (directory / LOG).iterdir())
    return False


def holds_job(storage: Storage) -> bool:
    """The same of any storage."""
    return storage.stat(JOB_PATH) is not None or storage.stat(slot_path(0)) is not None
