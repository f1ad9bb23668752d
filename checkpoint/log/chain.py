"""The chain of records that a log is: read from its tail, checked, and appended to.

Reads only, so it works where nothing may be written. A damaged newest record is stepped over, a
record that no valid predecessor explains is an error; either way it is said.

Three ways to lose a slot: a writer of a higher generation has it (we are fenced), anybody else has
it (their change is taken over and ours computed again), or the storage failed before anything was
created (the error passes). A creation whose answer was lost is read back and known by its nonce.

Called after the newer slots are durable. Oldest first, so that an interrupted thinning leaves one
stretch of slots that the next one finishes.
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
from torchrelay.checkpoint.format.names import DATA, TRY, manifest_path
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
"""A reader beside a busy writer finds slots thinned away under it; it then looks for the tail again."""


@dataclass(frozen=True)
class Base:
    """A base file that was read and proved; `lost` where it was made again instead, in memory."""

    ref: BaseRef
    entries: dict[Key, CommittedPosition] = field(repr=False)
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
    if (job := read_job(storage)) is None:
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
        told = _outvoted(storage, job)
        if told is None:
            raise
        return _tail_of(storage, told)


def _outvoted(storage: Storage, job: JobFile) -> JobFile | None:
    """The job that log and epochs agree on, where `job.json` is whole and names another; else None.

    The log alone does not decide: that could be the one that was copied here from somewhere else.
    """
    record = next(readable_records(storage), None)
    if record is None or record.job == job.uuid:
        return None
    entries = record.state.entries
    if not any(_is_there(storage, one) for one in reversed(entries)) and (
        entries or any(map(TRY.fullmatch, storage.list(DATA)))
    ):
        return None
    damage = f"{JOB_PATH} is that of another job ({job.name!r}, uuid {job.uuid}), log and epochs are not"
    return replace(repeated_in(record.job, record.state.holder), damage=damage)


def _is_there(storage: Storage, entry: CommittedPosition) -> bool:
    with suppress(FileNotFoundError):
        path = manifest_path(entry.try_name)
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
    """The slot that HINT names. It is unproved: anything odd is no hint."""
    with suppress(OSError):  # a hint that cannot be read is no hint; the log itself will say what is wrong
        match = re.fullmatch(rb"([0-9]{1,20})\n", storage.read_range(HINT, 0, HINT_LIMIT_BYTES))
        return int(match[1]) if match else None
    return None


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
        data, newer, link = _bytes_of(storage, slot), link, None
        if data is None:
            _check_not_moved(storage, newest)
            notices.append(f"{slot_path(slot)} is missing; newer records do not need it")
            continue
        try:
            link = decode_link(data, slot=slot, job=job.uuid)
        except DamagedError as error:
            notices.append(f"{error}; newer records do not need it")
        else:
            _check_link(storage, newer, link, canonical_json.sha256(data), slot)
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


INLINE = 64
"""Live entries (and gone ones of the base) that a record may hold itself."""
_REBASED_INLINE = INLINE // 2
"""How many stay inline when a new base file is written: the room until the next one."""


@dataclass(frozen=True)
class RecordDraft:
    """A record to be: its kind, and what it changes, computed from the state in whatever slot it gets.

    `generation` None means: that of the slot before (guests), or the slot itself for a takeover.
    `change` returns None when there is nothing to write.
    """

    kind: str
    change: Callable[[State], tuple[State, Mapping[str, Json]] | None]
    generation: int | None = None


@dataclass(frozen=True)
class Appended:
    """What came of a draft: the end of the log, and our record if one was written."""

    tail: Tail
    record: Record | None


class OvertakenError(Exception):
    """The log belongs to a writer of a higher generation."""

    def __init__(self, tail: Tail) -> None:
        super().__init__(f"generation {tail.view.generation} has the log")
        self.tail = tail


def append(storage: Storage, tail: Tail, draft: RecordDraft) -> Appended:
    """Write a record behind `tail`, or behind whatever came first, and make it durable.

    Raises OvertakenError, without having changed anything, when a writer of a higher generation than
    the draft's is there; guests give way to nobody, takeovers to whoever was first.
    """
    while True:
        if overtaken(storage, tail):
            tail = read_tail(storage, tail.job)  # perhaps only guests have marked epochs
            storage.sync_dir(LOG)
            _give_way(tail, draft)
        changed = draft.change(tail.view.state)
        if changed is None:
            return Appended(tail, None)
        record, base = _compose(storage, tail, draft, *changed)
        data = encode(record)
        if len(changed[0].marks) > len(tail.view.marks) and 2 * len(data) > canonical_json.LIMIT_BYTES:
            raise UsageError(  # the other half is for what writers must be able to append
                f"{storage.url} has so many tags and pins that a record of its log takes {len(data)} bytes: "
                "take some away first (torchrelay ckpt tag --delete, torchrelay ckpt pin --delete)"
            )
        if _create(storage, record.slot, data):
            if _is_void(storage, tail, record.slot):
                continue
            storage.sync_dir(LOG)
            view = replace(tail.view, state=changed[0], slot=record.slot, generation=record.generation)
            previous = canonical_json.sha256(data)
            return Appended(Tail(tail.job, view, record.slot + 1, previous, base), record)
        tail, other = advance(storage, tail)
        storage.sync_dir(LOG)  # what we stand on must not be lost to a power cut
        if other is not None:
            _give_way(tail, draft)
        elif draft.kind == "takeover":
            raise OvertakenError(tail)


def _give_way(tail: Tail, draft: RecordDraft) -> None:
    if draft.kind == "takeover" or (draft.generation is not None and tail.view.generation > draft.generation):
        raise OvertakenError(tail)


def overtaken(storage: Storage, tail: Tail) -> bool:
    """Whether the log went on so far that our next slot may have been thinned away already.

    That takes 256 newer slots. Of them the 256th exists, or it was thinned away as well, by as many more.
    """
    beyond = tail.next_slot + STRIDE
    return any(storage.stat(slot_path(slot)) is not None for slot in (beyond, floor(beyond) + STRIDE))


def _is_void(storage: Storage, tail: Tail, slot: int) -> bool:
    """A slot that we could create may have been filled before and thinned since: its record is deleted."""
    void = slot % STRIDE != 0 and overtaken(storage, tail)
    if void:
        storage.delete(slot_path(slot))
    return void


def _create(storage: Storage, slot: int, data: bytes) -> bool:
    """Create the slot's file; False when somebody else's record is there."""
    path = slot_path(slot)
    try:
        storage.link_exclusive(path, data)
    except OSError as error:
        # The name was taken, or the answer is doubtful: what lies there decides.
        try:
            found = storage.read_range(path, 0, len(data) + 1)
        except FileNotFoundError:
            found = None
        if found is None and isinstance(error, FileExistsError):
            raise StorageError(
                f"{storage.url}/{path} is in the way and is no regular file: remove it"
            ) from error
        if found is None:
            raise
        return found == data  # the nonce makes our bytes like no other's
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
    # Sorted by branch, then position: the last ones are those that change next.
    return entries[-_REBASED_INLINE:], _write_base(storage, entries[:-_REBASED_INLINE])


def _write_base(storage: Storage, entries: tuple[CommittedPosition, ...]) -> Base:
    data = encode_base(entries)
    ref = BaseRef(f"base-{secrets.token_hex(8)}.json", len(data), canonical_json.sha256(data))
    storage.link_exclusive(ref.path, data)
    storage.sync_dir(LOG)  # durable before the record that refers to it
    return Base(ref, {entry.key: entry for entry in entries})


def thin(storage: Storage, job: JobFile, newest: int) -> None:
    """Delete what a log whose newest slot is `newest` keeps no longer, base files included."""
    for slot in reversed(_beyond(storage, newest)):
        base = None
        with suppress(StorageError, FileNotFoundError):
            base = _read_base_of(storage, job, slot)
        if base is not None and not any(
            _may_need(storage, job, one, base) for one in (slot + 1, floor(slot))
        ):
            storage.delete(base)
        storage.delete(slot_path(slot))


def _beyond(storage: Storage, newest: int) -> list[int]:
    """Slots to delete, newest first: down from the 257th newest to the first one that is gone."""
    found: list[int] = []
    for slot in range(newest - STRIDE, 0, -1):
        if slot % STRIDE == 0:
            continue
        if storage.stat(slot_path(slot)) is None:
            break
        found.append(slot)
    return found


def _may_need(storage: Storage, job: JobFile, slot: int, base: str) -> bool:
    """Whether a slot's record refers to a base file, or cannot be read, so that nobody knows."""
    try:
        return _read_base_of(storage, job, slot) == base
    except FileNotFoundError:
        return False
    except StorageError:
        return True


def _read_base_of(storage: Storage, job: JobFile, slot: int) -> str | None:
    record = decode(sealed_bytes(storage, slot_path(slot)), slot=slot, job=job.uuid)
    return record.base.path if record.base else None
