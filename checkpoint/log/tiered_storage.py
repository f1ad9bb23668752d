"""Combine a local storage with a remote one behind it, and check that both belong to one job.

Only attempts are looked up remotely. The log, the job file and all else are read in the local directory
alone, because a mixture of two logs would mix two histories.

`tier.json` is a hint: if it is lost or damaged, files are uploaded again and every epoch counts as `local`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import field, replace
from pathlib import Path
from typing import NoReturn, TypeVar, cast

from torchrelay.checkpoint.format.canonical_json import seal, sealed_bytes, unseal
from torchrelay.checkpoint.format.names import DATA
from torchrelay.checkpoint.log.record import JOB_PATH, encode_job, open_job, read_job
from torchrelay.checkpoint.log.view import LogView
from torchrelay.checkpoint.storage.base import LongReads, ReadHandle, SeparateReads, Storage
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.checkpoint.storage.local_io import LocalReadHandle
from torchrelay.checkpoint.storage.open import NOTES as PATH
from torchrelay.checkpoint.storage.open import storage_of
from torchrelay.errors import UsageError
from torchrelay.records import dataclass

T = TypeVar("T")


class TierStorage(LocalStorage):
    """A local directory that also shows the attempts in `data/` of a remote one.

    An attempt is written once and has one name in both, so a file of that name has the same bytes in both, or
    is damaged or unfinished in one of them, which verification detects.
    """

    def __init__(self, local: str | Path, remote: Storage) -> None:
        super().__init__(local)
        self.remote = remote
        self.local = LocalStorage(local)
        """The same directory without the remote one."""
        self.remote_only: set[str] = set()
        """Attempts that are read remotely from now on: their local files are damaged."""

    def stat(self, path: str) -> int | None:
        """The local size, else the remote one."""
        if self._reads_locally(path):
            size = super().stat(path)
            if size is not None or not _in_attempt(path):
                return size
        return self.remote.stat(path)

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        """Read locally, else remotely."""
        return self._read(path, lambda storage: storage.read_range(path, offset, length))

    def read_into(self, path: str, offset: int, destination: memoryview) -> int:
        """Read locally, else remotely."""
        return self._read(path, lambda storage: storage.read_into(path, offset, destination))

    def open_read(self, path: str) -> LocalReadHandle:
        """Open locally, else remotely."""

        def open_in(storage: Storage) -> ReadHandle:
            return storage.open_read(path) if isinstance(storage, LongReads) else SeparateReads(storage, path)

        return cast(LocalReadHandle, self._read(path, open_in))  # it has the methods that are used

    def _read(self, path: str, read: Callable[[Storage], T]) -> T:
        if self._reads_locally(path):
            try:
                return read(self.local)
            except FileNotFoundError:
                if not _in_attempt(path):
                    raise
        return read(self.remote)

    def _reads_locally(self, path: str) -> bool:
        return not (_in_attempt(path) and path.split("/")[1] in self.remote_only)


def _in_attempt(path: str) -> bool:
    """Whether a path is inside an attempt."""
    return path.startswith(f"{DATA}/") and path.count("/") == 2


@dataclass(frozen=True)
class Notes:
    """State of a local directory.

    Attributes:
        remote: URL of the remote.
        holder: nonce of our writer of the remote log.
        replicated: attempts that the remote has.
        sent: files of attempts in flight that are complete and durable there: size and SHA-256 by path.
        generation: that of the remote log when this local log was last taken with it.
        part: another host has the local log of the run, and this directory has only a part of each epoch.
    """

    remote: str = ""
    holder: str | None = None
    replicated: frozenset[str] = frozenset()
    sent: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    generation: int = -1
    part: bool = False

    def made(self, remote: LogView) -> bool:
        """Whether the remote log was last taken over from this local directory."""
        return self.holder is not None and remote.state.holder.get("nonce") == self.holder


def read_notes(local: Storage) -> Notes | None:
    """Read the notes; None without them, or if they are damaged."""
    try:
        stored = unseal("tier", sealed_bytes(local, PATH), PATH)
        holder = stored["holder"]
        return Notes(
            str(stored["far"]),
            holder if isinstance(holder, str) else None,
            frozenset(str(name) for name in stored["replicated"]),
            {str(path): (int(size), str(digest)) for path, (size, digest) in stored["sent"].items()},
            int(stored.get("generation", -1)),
            stored.get("part") is True,
        )
    except (OSError, LookupError, TypeError, ValueError, AttributeError):
        return None


def refuse_part(local: Storage) -> None:
    """Raise UsageError for a local directory that has files of only some hosts' ranks."""
    notes = read_notes(local)
    if notes is None and local.stat(PATH) is not None:
        raise UsageError(
            f"{local.url}/{PATH} is damaged, so it is unknown whether the log of its epochs is on another "
            "host: start the run, which writes it again"
        )
    if notes is not None and notes.part:
        raise UsageError(
            f"{local.url} has only a part of the epochs of {notes.remote}, and their log is on another host: "
            "do this there"
        )


def refuse_to_begin(local: Storage, remote: Storage) -> None:
    """Raise UsageError for a remote without a job if the local directory has parts of epochs.

    They may be needed by a live run, and a new job would delete them as leftovers.
    """
    notes = read_notes(local)
    if notes is not None and notes.part and read_job(remote) is None:
        raise UsageError(
            f"{local.url} has only a part of the epochs of {notes.remote}, and {remote.url} has no job yet: "
            "choose another local directory for this run"
        )


def only_local(local: Storage, view: LogView) -> frozenset[str]:
    """Local attempts to be uploaded (all, without valid notes), and the newest uploaded one."""
    if local.stat(PATH) is None:
        return frozenset()
    notes, line = read_notes(local) or Notes(), view.line()
    known = [number for number, entry in enumerate(line) if entry.attempt_name in notes.replicated]
    return frozenset(entry.attempt_name for entry in line[known[-1] if known else 0 :])


def forgotten(local: Storage, notes: Notes, path: str) -> Notes:
    """The notes without a file that will be written again; durable when this returns, or StorageError.

    Otherwise a truncated new file, with reserved space, could match the size and note of the lost one.
    """
    if path not in notes.sent:
        return notes
    notes = replace(notes, sent={name: one for name, one in notes.sent.items() if name != path})
    write_notes(local, notes)
    return notes


def write_notes(local: Storage, notes: Notes) -> None:
    """Replace the notes. Raises StorageError."""
    sent = {path: list(one) for path, one in notes.sent.items()}
    stored = {
        "far": notes.remote,
        "holder": notes.holder,
        "replicated": sorted(notes.replicated),
        "sent": sent,
        "generation": notes.generation,
        "part": notes.part,
    }
    local.replace(PATH, seal("tier", stored))


def opened(directory: Path) -> LocalStorage:
    """The storage of a directory, with its remote, without which uploaded epochs would seem damaged."""
    local = LocalStorage(directory)
    notes = read_notes(local)
    return (
        local
        if notes is None or not notes.remote
        else TierStorage(directory, storage_of(notes.remote, "the remote of the checkpoints"))
    )


def refuse_local(storage: Storage) -> NoReturn:
    """Raise UsageError for a write to a local directory without its tier."""
    notes = read_notes(storage)
    remote = notes.remote if notes is not None else "the remote of the checkpoints"
    raise UsageError(
        f"{storage.url} is the local directory of {remote}: give that as the place of the checkpoints, and "
        "tier=Tier(near=...) with this one"
    )


def same_job(one: Storage, other: Storage) -> None:
    """Raise UsageError for two storages of different jobs, also of jobs with one name."""
    jobs = read_job(one), read_job(other)
    if jobs[0] is not None and jobs[1] is not None and jobs[0].uuid != jobs[1].uuid:
        raise UsageError(
            f"{one.url} and {other.url} belong to two jobs, or to one that was begun twice: choose an "
            "empty directory for one of them"
        )


def share_job(local: Storage, remote: Storage, name: str | None) -> None:
    """Make both storages belong to one job: one without a job gets the other's file."""
    if read_job(local) is None:
        open_job(remote, name)
        _copy(remote, local)
    elif read_job(remote) is None:
        _copy(local, remote)
    same_job(local, remote)


def _copy(source: Storage, target: Storage) -> None:
    job = read_job(source)
    target.mkdir("")
    with suppress(FileExistsError):
        target.link_exclusive(JOB_PATH, encode_job(job) if job else b"")
    target.sync_dir("")
