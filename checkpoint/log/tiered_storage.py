"""A storage of two places: written locally, uploaded to a remote one; and whether places are of one job.

Only what belongs to tries is looked for far. The log, the job file and everything else of the near
directory are its own, for two logs that showed through each other would be a mixture of two histories.

It is a note, not a proof: lost or damaged, files are sent again and every epoch counts as `local`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import field, replace
from pathlib import Path
from typing import NoReturn, cast

from torchrelay.checkpoint.format.canonical_json import seal, sealed_bytes, unseal
from torchrelay.checkpoint.format.names import DATA
from torchrelay.checkpoint.log.record import JOB_PATH, encode_job, open_job, read_job
from torchrelay.checkpoint.log.view import LogView
from torchrelay.checkpoint.storage.base import LongReads, ReadHandle, SingleWriter, Storage, reads_of
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.checkpoint.storage.local_io import LocalReadHandle
from torchrelay.checkpoint.storage.open import NOTES as PATH
from torchrelay.checkpoint.storage.open import storage_of
from torchrelay.errors import UsageError
from torchrelay.records import dataclass


class TierStorage(LocalStorage):
    """A local directory whose `data/` shows, behind it, that of `far`.

    A try is write-once and has one name in both places, so a file of that name has the same bytes in both, or
    it is damaged or unfinished in one of them: proofs tell.
    """

    def __init__(self, near: str | Path, far: Storage, *, single_writer: SingleWriter = None) -> None:
        super().__init__(near, single_writer=single_writer)
        self.far = far
        self.near = LocalStorage(near, single_writer=single_writer)
        """The same directory alone."""
        self._from_far: frozenset[str] = frozenset()

    def prefer_far(self, tries: Iterable[str]) -> None:
        """Read these tries far only from now on: their near files are damaged."""
        self._from_far |= frozenset(tries)

    def prefer_near(self, tries: Iterable[str]) -> None:
        """Read these tries near again."""
        self._from_far -= frozenset(tries)

    def prefers_far(self, try_name: str) -> bool:
        """Whether a try is read far only."""
        return try_name in self._from_far

    def stat(self, path: str) -> int | None:
        """The size near, else far."""
        if self._near_counts(path):
            size = super().stat(path)
            if size is not None or not _in_try(path):
                return size
        return self.far.stat(path)

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        """From near, else from far."""
        if self._near_counts(path):
            try:
                return self.near.read_range(path, offset, length)
            except FileNotFoundError:
                if not _in_try(path):
                    raise
        return self.far.read_range(path, offset, length)

    def read_into(self, path: str, offset: int, destination: memoryview) -> int:
        """From near, else from far."""
        if self._near_counts(path):
            try:
                return self.near.read_into(path, offset, destination)
            except FileNotFoundError:
                if not _in_try(path):
                    raise
        return self.far.read_into(path, offset, destination)

    def open_read(self, path: str) -> LocalReadHandle:
        """Near, else far: a handle of the place that has the file."""
        if self._near_counts(path):
            try:
                return super().open_read(path)
            except FileNotFoundError:
                if not _in_try(path):
                    raise
        far: ReadHandle
        far = self.far.open_read(path) if isinstance(self.far, LongReads) else reads_of(self.far, path)
        return cast(LocalReadHandle, far)  # the same methods; nobody asks for more

    def _near_counts(self, path: str) -> bool:
        return not (_in_try(path) and path.split("/")[1] in self._from_far)


def _in_try(path: str) -> bool:
    return path.startswith(f"{DATA}/") and path.count("/") == 2


@dataclass(frozen=True)
class Notes:
    """`far`: where it is. `holder`: the nonce of our writer of its log. `replicated`: tries that it has.

    `sent`: files of tries that are under way, complete and durable there: size and SHA-256 by path.
    `generation`: that of the far log when this near log was taken with it the last time. `part`: another
    place has the near log of the run since then, and what lies here is not all of any epoch.
    """

    far: str = ""
    holder: str | None = None
    replicated: frozenset[str] = frozenset()
    sent: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    generation: int = -1
    part: bool = False

    def made(self, far: LogView) -> bool:
        """Whether the far log was last taken over from this near place."""
        return self.holder is not None and far.holder.get("nonce") == self.holder


def read_notes(near: Storage) -> Notes | None:
    """None where the directory is no near place, or where its note cannot be trusted."""
    try:
        told = unseal("tier", sealed_bytes(near, PATH), PATH)
        holder = told["holder"]
        return Notes(
            str(told["far"]),
            holder if isinstance(holder, str) else None,
            frozenset(str(name) for name in told["replicated"]),
            {str(path): (int(size), str(digest)) for path, (size, digest) in told["sent"].items()},
            int(told.get("generation", -1)),
            told.get("part") is True,
        )
    except (OSError, LookupError, TypeError, ValueError, AttributeError):
        return None


def refuse_part(near: Storage) -> None:
    """Refuse to decide by a near directory that has files of some hosts' ranks only (UsageError)."""
    notes = read_notes(near)
    if notes is None and near.stat(PATH) is not None:
        raise UsageError(
            f"{near.url}/{PATH} is damaged, so nobody can tell whether the log of its epochs is on another "
            "host: start the run, which writes it anew, or do this at the far place"
        )
    if notes is not None and notes.part:
        raise UsageError(
            f"{near.url} has a part of the epochs of {notes.far} only, and their log is on another host: "
            "do this there, or at the far place"
        )


def refuse_to_begin(near: Storage, far: Storage) -> None:
    """Refuse a far place without a job for a near directory with a part of some epochs (UsageError).

    Nobody here knows what these are: all of them, perhaps of a run that lives, would pass for left over.
    """
    notes = read_notes(near)
    if notes is not None and notes.part and read_job(far) is None:
        raise UsageError(
            f"{near.url} has a part of the epochs of {notes.far} only, and nothing was begun in {far.url}: "
            "choose another near directory for this run, or that place of the checkpoints"
        )


def only_near(near: Storage, view: LogView) -> frozenset[str]:
    """Tries of a near directory that are still to be sent, and the newest that was; none of other places.

    Without a note that can be trusted everything may still have to be sent.
    """
    if near.stat(PATH) is None:
        return frozenset()
    notes, line = read_notes(near) or Notes(), view.line()
    known = [number for number, entry in enumerate(line) if entry.try_name in notes.replicated]
    return frozenset(entry.try_name for entry in line[known[-1] if known else 0 :])


def forgotten(near: Storage, notes: Notes, path: str) -> Notes:
    """The notes without a file that is about to be made anew; durable when this returns, or StorageError.

    Space is reserved first, so that one which is cut off may have the size and the note of one that was lost.
    """
    if path not in notes.sent:
        return notes
    notes = replace(notes, sent={name: one for name, one in notes.sent.items() if name != path})
    write_notes(near, notes)
    return notes


def write_notes(near: Storage, notes: Notes) -> None:
    """Replace the note. Raises StorageError."""
    sent = {path: list(one) for path, one in notes.sent.items()}
    told = {
        "far": notes.far,
        "holder": notes.holder,
        "replicated": sorted(notes.replicated),
        "sent": sent,
        "generation": notes.generation,
        "part": notes.part,
    }
    near.replace(PATH, seal("tier", told))


def opened(directory: Path) -> LocalStorage:
    """The storage of a directory. Epochs of a near one whose files are far only would else look damaged."""
    near = LocalStorage(directory)
    notes = read_notes(near)
    return (
        near
        if notes is None or not notes.far
        else TierStorage(directory, storage_of(notes.far, "the far place"))
    )


def refuse_near(storage: Storage) -> NoReturn:
    """Refuse to write to a near directory as if it were the whole place of checkpoints (UsageError)."""
    notes = read_notes(storage)
    far = notes.far if notes is not None else "the far place"
    raise UsageError(
        f"{storage.url} is the near directory of {far}: give that as the place of the checkpoints, and "
        "tier=Tier(near=...) with this one"
    )


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
