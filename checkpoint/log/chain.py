"""Read the chain of records of a log from its tail, verify it, and append to it.

Reading needs no write access. A damaged newest record is skipped; a record without a valid predecessor is an
error; both are reported.

A writer loses a slot in three ways:

- A writer of a higher generation has it: this one is fenced.
- Another writer has it: its change is applied and ours computed again.
- The storage failed before anything was created: the error propagates.

A creation whose answer was lost is read back and recognised by its nonce.

Old slots are deleted after newer ones are durable, oldest first, so that an interrupted thinning leaves one
range of slots for the next.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import field, replace
from datetime import datetime, timezone

from torchrelay.checkpoint.format import canonical_json
from torchrelay.checkpoint.format.canonical_json import read_sealed, sealed_bytes
from torchrelay.checkpoint.format.names import ATTEMPT_NAME, DATA, manifest_path
from torchrelay.checkpoint.format.position import CommittedPosition, Key, State
from torchrelay.checkpoint.log.record import (
    JOB_PATH,
    LOG,
    BaseRef,
    JobFile,
    Link,
    Record,
    check_job,
    decode,
    decode_base,
    decode_link,
    encode,
    encode_base,
    read_job,
    readable_records,
    repeated_in,
    slot_path,
    whole_entries,
)
from torchrelay.checkpoint.log.state import LostBase, lost_bases, read_history
from torchrelay.checkpoint.log.view import STRIDE, LogView, chain_end, find_tail, floor
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.errors import DamagedError, StorageError, UsageError
from torchrelay.records import Json, dataclass

HINT = f"{LOG}/HINT"
HINT_LIMIT_BYTES = 4096
_ATTEMPTS = 8
"""A reader beside a busy writer may find slots deleted; it then looks for the tail again."""


@dataclass(frozen=True)
class Base:
    """A verified base file; `lost` if it was recreated in memory instead."""

    ref: BaseRef
    entries: dict[Key, CommittedPosition] = field(repr=False)
    lost: LostBase | None = None


@dataclass(frozen=True)
class Tail:
    """The end of a log: its state, and the next slot and its predecessor."""

    job: JobFile
    view: LogView
    next_slot: int = 0
    previous_sha256: str | None = None
    base: Base | None = None

    @property
    def stepped_back(self) -> bool:
        """Whether records after the one with the state are damaged."""
        return self.next_slot != self.view.slot + 1


class _MovedError(Exception):
    """The log was thinned while it was read."""


def open_log(storage: Storage, job_name: str | None = None) -> LogView:
    """Read the current state of the log; an empty view without a job.

    With a `job_name` a directory of another job raises UsageError. Raises DamagedError if no record can be
    trusted, FormatError for a newer version's log, StorageError if it cannot be read.
    """
    if (job := read_job(storage)) is None:
        return LogView()
    tail = read_tail(storage, job)
    if job_name is not None:
        check_job(storage, tail.job, job_name)
    return tail.view


def read_tail(storage: Storage, job: JobFile) -> Tail:
    """Find and verify the end of the log of `job`; returns the right job if `job.json` is wrong."""
    try:
        return _tail_of(storage, job)
    except DamagedError:
        other = _outvoted(storage, job)
        if other is None:
            raise
        return _tail_of(storage, other)


def _outvoted(storage: Storage, job: JobFile) -> JobFile | None:
    """The job that log and epochs agree on, if `job.json` is intact and names another; else None.

    The log alone does not decide, because it could be the copy from another directory.
    """
    record = next(readable_records(storage), None)
    if record is None or record.job == job.uuid:
        return None
    entries = record.state.entries
    if not any(_is_there(storage, one) for one in reversed(entries)) and (
        entries or any(map(ATTEMPT_NAME.fullmatch, storage.list(DATA)))
    ):
        return None
    damage = f"{JOB_PATH} belongs to another job ({job.name!r}, uuid {job.uuid}) than log and epochs"
    return replace(repeated_in(record.job, record.state.holder), damage=damage)


def _is_there(storage: Storage, entry: CommittedPosition) -> bool:
    with suppress(FileNotFoundError):
        path = manifest_path(entry.attempt_name)
        found = canonical_json.sha256(storage.read_range(path, 0, storage.stat(path) or 0))
        return found == entry.manifest_sha256
    return False


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
    """The slot that HINT names; not verified, None if malformed."""
    with suppress(OSError):  # the log itself will report the error
        match = re.fullmatch(rb"([0-9]{1,20})\n", storage.read_range(HINT, 0, HINT_LIMIT_BYTES))
        return int(match[1]) if match else None
    return None


def advance(storage: Storage, tail: Tail) -> tuple[Tail, Record | None]:
    """Read the record that another writer put at `tail.next_slot`; None if it is damaged (a lost slot)."""
    slot = tail.next_slot
    data = _bytes_of(storage, slot)
    if data is None:
        raise StorageError(f"{storage.url}/{slot_path(slot)} exists but cannot be found: try again")
    after = replace(tail, next_slot=slot + 1, previous_sha256=canonical_json.sha256(data))
    try:
        record = decode(data, slot=slot, job=tail.job.uuid)
    except DamagedError as error:
        notices = (*tail.view.notices, f"{error}; the slot is left unchanged")
        return replace(after, view=replace(tail.view, notices=notices)), None
    return _with_record(storage, after, record, tail.view.notices), record


def _read_from(storage: Storage, job: JobFile, newest: int) -> Tail:
    newest_bytes = _bytes_of(storage, newest)
    if newest_bytes is None:
        raise _MovedError
    record, notices = _newest_valid(storage, job, newest)
    job = job.as_repeated(record.state.holder)
    # Two intact records that contradict each other mean that the log is a mixture of two histories. A missing
    # or damaged predecessor is a notice, because the newer record has everything that is live.
    doubts: list[str] = []
    link: Link | None = Link(record.generation, record.previous_sha256)
    for slot in range(record.slot - 1, chain_end(record.slot) - 1, -1):
        data, newer, link = _bytes_of(storage, slot), link, None
        if data is None:
            _check_not_moved(storage, newest)
            doubts.append(f"{slot_path(slot)} is missing; newer records do not need it")
            continue
        try:
            link = decode_link(data, slot=slot, job=job.uuid)
        except DamagedError as error:
            doubts.append(f"{error}; newer records do not need it")
        else:
            _check_link(storage, newer, link, canonical_json.sha256(data), slot)
    empty = Tail(job, LogView(), newest + 1, canonical_json.sha256(newest_bytes))
    try:
        return _with_record(storage, empty, record, (*notices, *doubts))
    except DamagedError:
        _check_not_moved(storage, newest)  # thinning deletes old base files too
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
        f"{storage.url}/{LOG} has no record that can be trusted "
        f"({damage[-1] if damage else 'none exists'}): restore it from a copy"
    )


def _with_record(storage: Storage, tail: Tail, record: Record, notices: tuple[str, ...]) -> Tail:
    """The tail with the state of `record` and the entries of its base file."""
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
    """The tail after lost files were written again."""
    base = None if tail.base is None else replace(tail.base, lost=None)
    left = tuple(one for one in tail.view.notices if one not in tail.view.derived)
    view = replace(tail.view, notices=left, derived=())
    return replace(tail, job=replace(tail.job, damage=""), view=view, base=base)


def _read_base(storage: Storage, record: Record, ref: BaseRef, known: Base | None) -> Base:
    if known is not None and (known.ref.name, known.ref.sha256) == (ref.name, ref.sha256):
        return replace(known, ref=ref)
    try:
        data = storage.read_range(ref.path, 0, ref.nbytes + 1)
        if len(data) < ref.nbytes:  # an answer may be truncated; damage counts when seen twice
            data = storage.read_range(ref.path, 0, ref.nbytes + 1)
        return Base(ref, {entry.key: entry for entry in decode_base(data, ref)})
    except (DamagedError, FileNotFoundError) as error:
        history = read_history(storage, record.job, record.slot)
        lost = {one.ref.name: one for one in lost_bases(storage, history)}.get(ref.name)
        if lost is None or lost.data is None:
            why = f"{storage.url}/{ref.path} is missing: restore it from a copy"
            raise (error if isinstance(error, DamagedError) else DamagedError(why)) from None
        return Base(ref, {entry.key: entry for entry in decode_base(lost.data, ref)}, lost)


def _check_not_moved(storage: Storage, newest: int) -> None:
    """Raise if the log continued after `newest`, which explains a deleted slot."""
    following = (newest + 1, floor(newest) + STRIDE)  # the first may be deleted, the second never
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


INLINE = 64
"""Maximum of live entries (and deleted ones of the base) inside a record."""
_REBASED_INLINE = INLINE // 2
"""Entries inside a record after a new base file: room until the next one."""


@dataclass(frozen=True)
class RecordDraft:
    """A future record: its kind, and its change, computed from the state in the slot that it gets.

    `generation` None means that of the slot before (guests), or the slot itself for a takeover. `change`
    returns None if there is nothing to write.
    """

    kind: str
    change: Callable[[State], tuple[State, Mapping[str, Json]] | None]
    generation: int | None = None


class OvertakenError(Exception):
    """The log belongs to a writer of a higher generation."""


def append(storage: Storage, tail: Tail, draft: RecordDraft) -> tuple[Tail, Record | None]:
    """Write a record after `tail`, or after records that came first, and make it durable.

    Returns the end of the log, and our record if there was something to write.

    Raises OvertakenError, with nothing changed, if a writer of a higher generation than the draft's exists.
    Guests are never overtaken; takeovers by any earlier record of another writer.
    """
    while True:
        if overtaken(storage, tail):
            tail = read_tail(storage, tail.job)  # maybe only guests have marked epochs
            storage.sync_dir(LOG)
            _give_way(tail, draft)
        changed = draft.change(tail.view.state)
        if changed is None:
            return tail, None
        record, base = _compose(storage, tail, draft, *changed)
        data = encode(record)
        more_marks = len(changed[0].marks) > len(tail.view.state.marks)
        if more_marks and 2 * len(data) > canonical_json.LIMIT_BYTES:
            raise UsageError(  # the other half is for records that writers must append
                f"{storage.url} has so many tags and pins that a record of its log takes {len(data)} "
                "bytes: delete some first (torchrelay ckpt tag --delete, torchrelay ckpt pin --delete)"
            )
        if _create(storage, record.slot, data):
            if _is_void(storage, tail, record.slot):
                continue
            storage.sync_dir(LOG)
            view = replace(tail.view, state=changed[0], slot=record.slot, generation=record.generation)
            previous = canonical_json.sha256(data)
            return Tail(tail.job, view, record.slot + 1, previous, base), record
        tail, other = advance(storage, tail)
        storage.sync_dir(LOG)  # the previous record must survive a power cut
        if other is not None:
            _give_way(tail, draft)
        elif draft.kind == "takeover":
            raise OvertakenError(f"generation {tail.view.generation} has the log")


def _give_way(tail: Tail, draft: RecordDraft) -> None:
    if draft.kind == "takeover" or (draft.generation is not None and tail.view.generation > draft.generation):
        raise OvertakenError(f"generation {tail.view.generation} has the log")


def overtaken(storage: Storage, tail: Tail) -> bool:
    """Whether the log continued so far that our next slot may have been deleted already.

    That takes 256 newer slots. The 256th of them exists, or was deleted as well, after as many more.
    """
    beyond = tail.next_slot + STRIDE
    return any(storage.stat(slot_path(slot)) is not None for slot in (beyond, floor(beyond) + STRIDE))


def _is_void(storage: Storage, tail: Tail, slot: int) -> bool:
    """Whether a slot that we could create had a record that was deleted since: ours is then deleted."""
    void = slot % STRIDE != 0 and overtaken(storage, tail)
    if void:
        storage.delete(slot_path(slot))
    return void


def _create(storage: Storage, slot: int, data: bytes) -> bool:
    """Create the slot's file; False if another writer's record exists."""
    path = slot_path(slot)
    try:
        storage.link_exclusive(path, data)
    except OSError as error:
        # The name exists, or the answer is ambiguous: its content decides.
        try:
            found = storage.read_range(path, 0, len(data) + 1)
        except FileNotFoundError:
            found = None
        if found is None and isinstance(error, FileExistsError):
            raise StorageError(f"{storage.url}/{path} exists and is not a regular file: remove it") from error
        if found is None:
            raise
        return found == data  # the nonce makes our bytes unique
    return True


def _compose(
    storage: Storage, tail: Tail, draft: RecordDraft, state: State, payload: Mapping[str, Json]
) -> tuple[Record, Base | None]:
    inline, base = _split(storage, state.entries, tail.base)
    generation = tail.view.generation if draft.generation is None else draft.generation
    record = Record(
        slot=tail.next_slot,
        generation=tail.next_slot if draft.kind == "takeover" else generation,
        kind=draft.kind,
        nonce=secrets.token_hex(8),
        job=tail.job.uuid,
        previous_sha256=tail.previous_sha256,
        written=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        payload=payload,
        state=replace(state, entries=inline),
        base=base.ref if base else None,
    )
    return record, base


def _split(
    storage: Storage, entries: tuple[CommittedPosition, ...], base: Base | None
) -> tuple[tuple[CommittedPosition, ...], Base | None]:
    """Divide live entries between the record and a base file: the known one while it fits, else a new one."""
    if base is not None:
        live = {entry.key for entry in entries}
        inline = tuple(entry for entry in entries if base.entries.get(entry.key) != entry)
        gone = tuple(key for key in base.entries if key not in live)
        if len(inline) <= INLINE and len(gone) <= INLINE:
            return inline, Base(replace(base.ref, gone=gone), base.entries)
    if len(entries) <= INLINE:
        return entries, None
    # Sorted by branch, then position: the last ones change next.
    return entries[-_REBASED_INLINE:], _write_base(storage, entries[:-_REBASED_INLINE])


def _write_base(storage: Storage, entries: tuple[CommittedPosition, ...]) -> Base:
    data = encode_base(entries)
    ref = BaseRef(f"base-{secrets.token_hex(8)}.json", len(data), canonical_json.sha256(data))
    storage.link_exclusive(ref.path, data)
    storage.sync_dir(LOG)  # durable before the record that refers to it
    return Base(ref, {entry.key: entry for entry in entries})


def thin(storage: Storage, job: JobFile, newest: int) -> None:
    """Delete what a log with the newest slot `newest` no longer keeps, base files included."""
    beyond: list[int] = []  # newest first: from the 257th newest down to the first missing one
    for slot in range(newest - STRIDE, 0, -1):
        if slot % STRIDE != 0:
            if storage.stat(slot_path(slot)) is None:
                break
            beyond.append(slot)
    for slot in reversed(beyond):
        base = None
        with suppress(StorageError, FileNotFoundError):
            base = _read_base_of(storage, job, slot)
        if base is not None and not any(
            _may_need(storage, job, one, base) for one in (slot + 1, floor(slot))
        ):
            storage.delete(base)
        storage.delete(slot_path(slot))


def _may_need(storage: Storage, job: JobFile, slot: int, base: str) -> bool:
    try:
        return _read_base_of(storage, job, slot) == base
    except FileNotFoundError:
        return False
    except StorageError:
        return True


def _read_base_of(storage: Storage, job: JobFile, slot: int) -> str | None:
    record = decode(sealed_bytes(storage, slot_path(slot)), slot=slot, job=job.uuid)
    return record.base.path if record.base else None
