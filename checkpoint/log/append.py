"""Appends to the log.

Three ways to lose a slot: a writer of a higher generation has it (we are fenced), anybody else has
it (their change is taken over and ours computed again), or the storage failed before anything was
created (the error passes). A creation whose answer was lost is read back and known by its nonce.

Called after the newer slots are durable. Oldest first, so that an interrupted thinning leaves one
stretch of slots that the next one finishes.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from torchrelay.checkpoint.format import canonical_json
from torchrelay.checkpoint.format.canonical_json import sealed_bytes
from torchrelay.checkpoint.format.manifest.position import Entry, State
from torchrelay.checkpoint.log.job_file import JobFile
from torchrelay.checkpoint.log.reader import Base, Tail, advance, read_tail
from torchrelay.checkpoint.log.record import LOG, BaseRef, Record, decode, encode, encode_base, slot_path
from torchrelay.checkpoint.log.view import STRIDE, floor
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.errors import StorageError, UsageError
from torchrelay.records import dataclass

Json = Any

INLINE = 64
"""Live entries (and gone ones of the base) that a record may hold itself."""
_REBASED_INLINE = INLINE // 2
"""How many stay inline when a new base file is written: the room until the next one."""


@dataclass(frozen=True)
class Draft:
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


def append(storage: Storage, tail: Tail, draft: Draft) -> Appended:
    """Write a record behind `tail`, or behind whatever came first, and make it durable.

    Raises OvertakenError, without having changed anything, when a writer of a higher generation than
    the draft's is there; guests give way to nobody, takeovers to whoever was first.
    """
    while True:
        if overtaken(storage, tail):
            tail = _read_anew(storage, tail, draft)
        changed = draft.change(tail.view.state)
        if changed is None:
            return Appended(tail, None)
        record, base = _compose(storage, tail, draft, *changed)
        data = encode(record)
        if len(changed[0].marks) > len(tail.view.marks) and 2 * len(data) > canonical_json.LIMIT_BYTES:
            raise UsageError(  # the other half is for what writers must be able to append
                f"{storage.url} has so many tags and pins that a record of its log takes {len(data)} bytes: "
                "take some away first (torchrelay tag --delete, torchrelay unpin)"
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


def _read_anew(storage: Storage, tail: Tail, draft: Draft) -> Tail:
    """The end of a log that went on by very many records: perhaps only guests have marked epochs."""
    tail = read_tail(storage, tail.job)
    storage.sync_dir(LOG)
    _give_way(tail, draft)
    return tail


def _give_way(tail: Tail, draft: Draft) -> None:
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
    storage: Storage, tail: Tail, draft: Draft, state: State, payload: Mapping[str, Json]
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
    storage: Storage, entries: tuple[Entry, ...], base: Base | None
) -> tuple[tuple[Entry, ...], Base | None]:
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


def _write_base(storage: Storage, entries: tuple[Entry, ...]) -> Base:
    data = encode_base(entries)
    ref = BaseRef(f"base-{secrets.token_hex(8)}.json", len(data), canonical_json.sha256(data))
    storage.link_exclusive(ref.path, data)
    storage.sync_dir(LOG)  # durable before the record that refers to it
    return Base(ref, {entry.key: entry for entry in entries})


def thin(storage: Storage, job: JobFile, newest: int) -> None:
    """Delete what a log whose newest slot is `newest` keeps no longer, base files included."""
    for slot in reversed(_beyond(storage, newest)):
        base = _base_of(storage, job, slot)
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


def _base_of(storage: Storage, job: JobFile, slot: int) -> str | None:
    """The base file that a slot's record refers to; None also for a record that cannot be read."""
    try:
        return _read_base_of(storage, job, slot)
    except (StorageError, FileNotFoundError):
        return None


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
