"""Reading a log: find the tail, check it and its predecessors, tell what is live.

Reads only, so it works where nothing may be written. A damaged newest record is stepped over, a
record that no valid predecessor explains is an error; either way it is said.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import field, replace

from torchrelay.checkpoint.format import canonical_json
from torchrelay.checkpoint.format.canonical_json import read_sealed, sealed_bytes
from torchrelay.checkpoint.format.manifest.position import Entry, Key
from torchrelay.checkpoint.log.history import read_history
from torchrelay.checkpoint.log.job_file import JobFile, check_job, outvoted, read_job
from torchrelay.checkpoint.log.record import (
    LOG,
    BaseRef,
    Link,
    Record,
    decode,
    decode_base,
    decode_link,
    slot_path,
    whole_entries,
)
from torchrelay.checkpoint.log.state import LostBase, lost_bases
from torchrelay.checkpoint.log.view import STRIDE, LogView, chain_end, find_tail, floor
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.errors import DamagedError, StorageError
from torchrelay.records import dataclass

HINT = f"{LOG}/HINT"
HINT_LIMIT_BYTES = 4096
_ATTEMPTS = 8
"""A reader beside a busy writer finds slots thinned away under it; it then looks for the tail again."""


@dataclass(frozen=True)
class Base:
    """A base file that was read and proved; `lost` where it was made again instead, in memory."""

    ref: BaseRef
    entries: dict[Key, Entry] = field(repr=False)
    lost: LostBase | None = None


@dataclass(frozen=True)
class Tail:
    """The end of a log: what it says, and where and on what the next record stands."""

    job: JobFile
    view: LogView
    next_slot: int = 0
    previous_sha256: str | None = None
    base: Base | None = None

    @property
    def stepped_back(self) -> bool:
        """Whether records after the one that tells the state are damaged."""
        return self.next_slot != self.view.slot + 1


class _MovedError(Exception):
    """The log was thinned while it was read."""


def open_log(storage: Storage, job_name: str | None = None) -> LogView:
    """What the log says now; an empty view where no job has begun. Reads only.

    With a `job_name` a directory of another job is refused (UsageError). Raises DamagedError when no
    record can be trusted, FormatError for a newer version's log, StorageError when it cannot be read.
    """
    job = read_job(storage)
    if job is None:
        return LogView()
    tail = read_tail(storage, job)
    if job_name is not None:
        check_job(storage, tail.job, job_name)
    return tail.view


def read_tail(storage: Storage, job: JobFile) -> Tail:
    """Find and prove the end of the log of `job`; the tail's own job is right where `job.json` is not."""
    try:
        return _tail_of(storage, job)
    except DamagedError:
        told = outvoted(storage, job)
        if told is None:
            raise
        return _tail_of(storage, told)


def _tail_of(storage: Storage, job: JobFile) -> Tail:
    for _ in range(_ATTEMPTS):
        newest = find_tail(lambda slot: storage.stat(slot_path(slot)) is not None, read_hint(storage))
        if newest is None:
            return Tail(
                job, LogView(job_name=job.name, job_uuid=job.uuid, notices=job.notices, derived=job.notices)
            )
        with suppress(_MovedError):
            return _read_from(storage, job, newest)
    raise StorageError(f"{storage.url}/{LOG} changes faster than it can be read: try again later")


def read_hint(storage: Storage) -> int | None:
    """The slot that HINT names. It is unproved: anything odd is no hint."""
    try:
        data = storage.read_range(HINT, 0, HINT_LIMIT_BYTES)
    except OSError:  # a hint that cannot be read is no hint; the log itself will say what is wrong
        return None
    match = re.fullmatch(rb"([0-9]{1,20})\n", data)
    return int(match[1]) if match else None


def advance(storage: Storage, tail: Tail) -> tuple[Tail, Record | None]:
    """Read the record that somebody else put at `tail.next_slot`; None when it is damaged (a burnt slot)."""
    slot = tail.next_slot
    data = _bytes_of(storage, slot)
    if data is None:
        raise StorageError(f"{storage.url}/{slot_path(slot)} is taken but cannot be found: try again")
    after = replace(tail, next_slot=slot + 1, previous_sha256=canonical_json.sha256(data))
    try:
        record = decode(data, slot=slot, job=tail.job.uuid)
    except DamagedError as error:
        notices = (*tail.view.notices, f"{error}; the slot is left as it is")
        return replace(after, view=replace(tail.view, notices=notices)), None
    return _told_by(storage, after, record, tail.view.notices), record


def _read_from(storage: Storage, job: JobFile, newest: int) -> Tail:
    newest_bytes = _bytes_of(storage, newest)
    if newest_bytes is None:
        raise _MovedError
    record, notices = _newest_valid(storage, job, newest)
    job = job.as_repeated(record.state.holder)
    notices = (*notices, *_check_chain(storage, job, record, newest))
    empty = Tail(job, LogView(), newest + 1, canonical_json.sha256(newest_bytes))
    try:
        return _told_by(storage, empty, record, notices)
    except DamagedError:
        _check_not_moved(storage, newest)  # thinning takes old base files too
        raise


def _newest_valid(storage: Storage, job: JobFile, newest: int) -> tuple[Record, tuple[str, ...]]:
    """Step back from `newest` over damaged records to one that can be trusted."""
    damage: list[str] = []
    for slot in range(newest, -1, -1):
        data = _bytes_of(storage, slot)
        if data is None:
            _check_not_moved(storage, newest)
            break
        try:
            record = decode(data, slot=slot, job=job.uuid)
        except DamagedError as error:
            damage.append(str(error))
            continue
        return record, tuple(f"{one}; {slot_path(slot)} is used instead" for one in damage)
    raise DamagedError(
        f"{storage.url}/{LOG} has no record that can be trusted ({damage[-1] if damage else 'none there'}): "
        "restore it from a copy, or choose another directory"
    )


def _told_by(storage: Storage, tail: Tail, record: Record, notices: tuple[str, ...]) -> Tail:
    """The tail whose state is that of `record`, with the entries of its base file."""
    base = None if record.base is None else _read_base(storage, record, record.base, tail.base)
    notices = tuple(dict.fromkeys((*notices, *_derived(tail.job, base))))
    entries = whole_entries(record, tuple(base.entries.values()) if base else ())
    view = LogView(
        state=replace(record.state, entries=entries),
        slot=record.slot,
        generation=record.generation,
        job_name=tail.job.name,
        job_uuid=tail.job.uuid,
        notices=notices,
        derived=_derived(tail.job, base),
    )
    return replace(tail, view=view, base=base)


def _derived(job: JobFile, base: Base | None) -> tuple[str, ...]:
    return (*job.notices, *((base.lost.notice,) if base is not None and base.lost is not None else ()))


def mended(tail: Tail) -> Tail:
    """The tail after what its log told was written again."""
    base = None if tail.base is None else replace(tail.base, lost=None)
    left = tuple(one for one in tail.view.notices if one not in tail.view.derived)
    view = replace(tail.view, notices=left, derived=())
    return replace(tail, job=replace(tail.job, damage=""), view=view, base=base)


def _read_base(storage: Storage, record: Record, ref: BaseRef, known: Base | None) -> Base:
    if known is not None and (known.ref.name, known.ref.sha256) == (ref.name, ref.sha256):
        return replace(known, ref=ref)
    try:
        data = storage.read_range(ref.path, 0, ref.nbytes + 1)
        if len(data) < ref.nbytes:  # an answer may be cut short; damage is believed when it is seen twice
            data = storage.read_range(ref.path, 0, ref.nbytes + 1)
        return Base(ref, {entry.key: entry for entry in decode_base(data, ref)})
    except (DamagedError, FileNotFoundError) as error:
        history = read_history(storage, record.job, record.slot)
        lost = {one.ref.name: one for one in lost_bases(storage, history)}.get(ref.name)
        if lost is None or lost.data is None:
            why = f"{storage.url}/{ref.path} is missing: restore it from a copy"
            raise (error if isinstance(error, DamagedError) else DamagedError(why)) from None
        return Base(ref, {entry.key: entry for entry in decode_base(lost.data, ref)}, lost)


def _check_chain(storage: Storage, job: JobFile, record: Record, newest: int) -> tuple[str, ...]:
    """Check the predecessors of a record; returns what people should know.

    Raises DamagedError where two intact records contradict each other: then the log is a mixture of
    two histories. A predecessor that is missing or damaged by itself is a notice, because the newer
    record tells everything that is live.
    """
    notices: list[str] = []
    link: Link | None = Link(record.generation, record.previous_sha256)
    for slot in range(record.slot - 1, chain_end(record.slot) - 1, -1):
        data = _bytes_of(storage, slot)
        if data is None:
            _check_not_moved(storage, newest)
            notices.append(f"{slot_path(slot)} is missing; newer records do not need it")
            link = None
            continue
        try:
            older = decode_link(data, slot=slot, job=job.uuid)
        except DamagedError as error:
            notices.append(f"{error}; newer records do not need it")
            link = None
            continue
        _check_link(storage, link, older, canonical_json.sha256(data), slot)
        link = older
    return tuple(notices)


def _check_not_moved(storage: Storage, newest: int) -> None:
    """Raise when the log went on behind `newest`, which explains a slot that is gone."""
    following = (newest + 1, floor(newest) + STRIDE)  # the first may be thinned away, the second never
    if any(storage.stat(slot_path(slot)) is not None for slot in following):
        raise _MovedError


def _check_link(storage: Storage, newer: Link | None, older: Link, older_sha256: str, slot: int) -> None:
    if newer is None:
        return
    if newer.previous_sha256 != older_sha256 or newer.generation < older.generation:
        raise DamagedError(
            f"{storage.url}/{LOG}: {slot_path(slot + 1)} does not follow {slot_path(slot)}, although both "
            "are intact: files of two histories were mixed; restore the directory from a copy"
        )


def _bytes_of(storage: Storage, slot: int) -> bytes | None:
    try:
        return read_sealed("record", lambda: sealed_bytes(storage, slot_path(slot)))
    except FileNotFoundError:
        return None
