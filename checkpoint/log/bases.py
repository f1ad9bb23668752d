"""Base files that are lost or damaged, made again byte for byte from what still tells of their entries.

A record states the size and the SHA-256 of its base file, so only the very bytes that were lost are
ever accepted. Sources: the record before the base began, whose entries are all known, and the manifests
below `data/`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

from torchrelay.checkpoint.format import canonical_json
from torchrelay.checkpoint.format.canonical_json import Fields
from torchrelay.checkpoint.format.log_state import Entry, Key, State
from torchrelay.checkpoint.format.manifest.codec import HINT_LIMIT_BYTES, decode
from torchrelay.checkpoint.format.manifest.schema import DATA, Manifest, manifest_path, try_directory
from torchrelay.checkpoint.format.names import TRY, parse_shard_file_name
from torchrelay.checkpoint.log import changes
from torchrelay.checkpoint.log.history import History
from torchrelay.checkpoint.log.record import (
    LOG,
    BaseRef,
    Record,
    decode_base,
    encode_base,
    entry_of,
    key_of,
    retirement_of,
    slot_path,
    whole_entries,
)
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.errors import DamagedError, RelayError, StorageError
from torchrelay.records import dataclass


@dataclass(frozen=True)
class LostBase:
    """A base file that records refer to and that is not what they state; `data` is None where it is lost."""

    ref: BaseRef
    reason: str
    data: bytes | None = None

    @property
    def notice(self) -> str:
        """What people should know where it can be made again."""
        said = "what it held is known, and the next start or torchrelay ckpt repair writes it again"
        return f"{self.reason}; {said}"


def lost_bases(storage: Storage, history: History) -> tuple[LostBase, ...]:
    """Look at every base file that a record refers to; raises StorageError where one cannot be read."""
    known: dict[str, tuple[Entry, ...]] = {}
    lost: list[LostBase] = []
    before: Record | None = None
    for record in history.records:
        ref = record.base
        if ref is not None and ref.name not in known and ref.name not in {one.ref.name for one in lost}:
            found, reason = _read(storage, ref)
            data = None
            if found is None:
                data = next(_matching(ref, _guesses(storage, record, before, known)), None)
                found = None if data is None else decode_base(data, ref)
                lost.append(LostBase(ref, reason, data))
            if found is not None:
                known[ref.name] = found
        before = record
    return tuple(lost)


def restore(storage: Storage, lost: LostBase) -> None:
    """Put the bytes where they were, durably. Whoever does so at the same time writes the same bytes."""
    if lost.data is None:
        raise DamagedError(
            f"{storage.url}/{lost.ref.path} is lost and cannot be made again: restore it from a copy"
        )
    storage.delete(lost.ref.path)
    with suppress(FileExistsError):
        storage.link_exclusive(lost.ref.path, lost.data)
    storage.sync_dir(LOG)


def _read(storage: Storage, ref: BaseRef) -> tuple[tuple[Entry, ...] | None, str]:
    try:
        return decode_base(storage.read_range(ref.path, 0, ref.nbytes + 1), ref), ""
    except FileNotFoundError:
        return None, f"{ref.path} is missing"
    except DamagedError as error:
        return None, str(error)


def _matching(ref: BaseRef, guesses: Iterable[tuple[Entry, ...]]) -> Iterator[bytes]:
    for entries in guesses:
        data = encode_base(tuple(sorted(entries, key=lambda entry: entry.key)))
        if len(data) == ref.nbytes and canonical_json.sha256(data) == ref.sha256:
            yield data


def _guesses(
    storage: Storage, record: Record, before: Record | None, known: dict[str, tuple[Entry, ...]]
) -> Iterator[tuple[Entry, ...]]:
    """What may have stood in the base that `record` refers to first."""
    inline = {entry.key for entry in record.state.entries}
    if before is not None and (before.base is None or before.base.name in known):
        entries = whole_entries(before, () if before.base is None else known[before.base.name])
        with suppress(RelayError):
            yield _less(_applied(replace(before.state, entries=entries), record).entries, inline)
    written = tuple(_from_manifests(storage, record))
    for thinner in (False, True):
        found = {one.key: _thinned(storage, one) if thinner else one for one in written}
        yield _less(found.values(), inline)
        yield _less(found.values(), inline | {key for key in found if key >= min(inline, default=key)})


def _less(entries: Iterable[Entry], keys: set[Key]) -> tuple[Entry, ...]:
    return tuple(entry for entry in entries if entry.key not in keys)


def _applied(state: State, record: Record) -> State:
    """The state after a record, as far as it changes entries; raises RelayError for an odd payload."""
    fields = Fields(record.payload, slot_path(record.slot))
    if record.kind == "commit":
        return changes.committed(state, entry_of(fields.fields("entry").values, fields.what))
    if record.kind == "retire":
        return changes.retired(state, fields.each("retired", retirement_of))[0]
    if record.kind == "quarantine":
        return changes.quarantined(state, key_of(fields))
    return state


def _from_manifests(storage: Storage, record: Record) -> Iterator[Entry]:
    for name in filter(TRY.fullmatch, storage.list(DATA)):
        with suppress(StorageError, FileNotFoundError):
            data = storage.read_range(manifest_path(name), 0, HINT_LIMIT_BYTES)
            manifest: Manifest = decode(data, what=manifest_path(name))
            if manifest.job_uuid == record.job and manifest.tries[0] == name:
                yield Entry(
                    manifest.branch, manifest.position, name, len(data), canonical_json.sha256(data),
                    manifest.needs, manifest.groups,
                )  # fmt: skip


def _thinned(storage: Storage, entry: Entry) -> Entry:
    """The entry as it stands after groups of its files were retired, by what files there are."""
    there = set()
    for name in storage.list(try_directory(entry.try_name)):
        with suppress(DamagedError):
            there.add(parse_shard_file_name(name).group)
    left = tuple(group for group in entry.groups if group in there)
    return entry if left == entry.groups else replace(entry, groups=left, resumable=False)
