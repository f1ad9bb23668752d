"""Compute how records change the state of the log, report the history of epochs, and restore base files.

A change is computed again when another record came first, so that it always applies to the state in its slot.

A record states the size and SHA-256 of its base file, so only the exact lost bytes are accepted. Sources are
the record before the base, with all its entries, and the manifests below `data/`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone

from torchrelay.checkpoint.format import canonical_json
from torchrelay.checkpoint.format.canonical_json import Fields, sealed_bytes
from torchrelay.checkpoint.format.manifest.codec import HINT_LIMIT_BYTES, decode
from torchrelay.checkpoint.format.manifest.schema import Manifest
from torchrelay.checkpoint.format.names import (
    ATTEMPT_NAME,
    DATA,
    attempt_directory,
    manifest_path,
    parse_shard_file_name,
    position_of,
)
from torchrelay.checkpoint.format.position import (
    DAMAGED,
    Branch,
    CommittedPosition,
    Key,
    Position,
    Retirement,
    State,
    TagOrPin,
)
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
from torchrelay.checkpoint.log.record import decode as decode_record
from torchrelay.checkpoint.log.view import branch_of, line_of, lineage_of, newest_of
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.errors import (
    DamagedError,
    RelayError,
    SaveFailedError,
    StorageError,
    UnknownEpochError,
    UsageError,
)
from torchrelay.records import Json, dataclass


@dataclass(frozen=True)
class History:
    """Records in order from slot `begins`, without damaged ones, whose paths are in `damaged`."""

    records: tuple[Record, ...] = ()
    begins: int = 0
    damaged: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether it includes the first record."""
        return self.begins == 0 and not self.damaged


@dataclass(frozen=True)
class Happening:
    """One record about a position: `kind` as in the log, `text` for display."""

    slot: int
    written: str
    kind: str
    text: str

    @property
    def when(self) -> str:
        """Time of writing, for display."""
        try:
            moment = datetime.fromisoformat(self.written).astimezone(timezone.utc)
        except (ValueError, OverflowError):
            return self.written
        return moment.strftime("%Y-%m-%d %H:%M:%S UTC")

    def json(self) -> dict[str, Json]:
        """An object of `why --json`."""
        return {"slot": self.slot, "written": self.written, "kind": self.kind, "text": self.text}


def read_history(storage: Storage, job: str, newest: int) -> History:
    """Records of a job's log from `newest` down to the first missing one; FormatError for newer ones."""
    found: list[Record] = []
    damaged: list[str] = []
    slot = newest
    while slot >= 0:
        try:
            data = sealed_bytes(storage, slot_path(slot))
        except FileNotFoundError:
            break
        try:
            found.append(decode_record(data, slot=slot, job=job))
        except DamagedError:
            damaged.append(slot_path(slot))
        slot -= 1
    return History(tuple(reversed(found)), slot + 1, tuple(reversed(damaged)))


def happened_to(history: History, wanted: Position, branch: int | None = None) -> Iterator[Happening]:
    """Records about a position (on one branch, or on any), oldest first."""
    before, branch_of_attempt = State(), dict[str, int]()
    for record in history.records:
        branch_of_attempt.update((entry.attempt_name, entry.branch) for entry in record.state.entries)
        text = _said(_Step(before, record, wanted, branch, branch_of_attempt))
        if text:
            yield Happening(record.slot, record.written, record.kind, text)
        before = record.state


@dataclass(frozen=True)
class _Step:
    """A record, the state before it, and the requested position."""

    before: State
    record: Record
    wanted: Position
    branch: int | None
    branch_of_attempt: dict[str, int]

    def means(self, key: Key | None) -> bool:
        return key is not None and key.position == self.wanted and self.branch in (None, key.branch)


def _said(step: _Step) -> str:
    kind, payload = step.record.kind, step.record.payload
    if kind == "commit":
        return _committed(step, _key(payload.get("entry")))
    if kind == "rewind":
        state = step.record.state
        seen = {entry.key for entry in line_of(step.before, step.before.current) if step.means(entry.key)}
        if not seen - {entry.key for entry in line_of(state, state.current)}:
            return ""
        began = branch_of(state, state.current)
        request = step.record.payload.get("request")
        why = "after damage" if isinstance(request, Mapping) and request.get("fallback") else "by a rewind"
        where = "a fresh start" if began is None or began.base is None else f"epoch {began.base}"
        return f"abandoned {why}: branch {state.current} began at {where}"
    if kind == "retire":
        return _retired(step)
    if kind == "quarantine" and step.means(_key(payload)):
        return f"found damaged: {payload.get('reason') or 'no reason was noted'}"
    if kind in ("tag", "pin") and step.means(_key(payload.get("target"))):
        return f"{'tagged' if kind == 'tag' else 'pinned'} as {payload.get('name')!r}"
    return ""


def _key(value: Json) -> Key | None:
    """The key in a payload; None if malformed, because payloads are not verified."""
    with suppress(DamagedError):
        return key_of(Fields(value if isinstance(value, Mapping) else {}, ""))
    return None


def _committed(step: _Step, key: Key | None) -> str:
    """A commit; that of a whole epoch retires its mid-epoch positions."""
    if key is None or step.means(key):
        return "" if key is None else f"committed on branch {key.branch}"
    if step.wanted.boundary or not key.position.boundary or key.position < step.wanted:
        return ""
    gone = any(step.means(one.key) and one.branch == key.branch for one in step.before.entries)
    return f"retired, because epoch {key.position} was committed, which completes it" if gone else ""


def _retired(step: _Step) -> str:
    payload = step.record.payload
    by = payload["rule"] if isinstance(payload.get("rule"), str) else "retention"
    retired = payload.get("retired")
    for one in retired if isinstance(retired, list) else []:
        name = one.get("try") if isinstance(one, dict) else None
        if not isinstance(name, str) or not ATTEMPT_NAME.fullmatch(name) or position_of(name) != step.wanted:
            continue
        on = step.branch_of_attempt.get(name)
        if step.branch is not None and on is not None and on != step.branch:
            continue
        groups = one.get("groups")
        what = f"its files of {', '.join(map(str, groups))} were" if isinstance(groups, list) else "it was"
        where = f" (on branch {on})" if on is not None else ""
        return f"{what} retired by {by}{where}"
    return ""


def committed(state: State, entry: CommittedPosition) -> State:
    """The state after a commit on the current branch; mid-epoch entries that it completes are retired.

    Raises UsageError for a position that is not beyond the newest of the branch, SaveFailedError if an
    attempt that the entry needs is not live any more.
    """
    if entry.branch != state.current:
        raise UsageError(f"epoch {entry.key} is not on the current branch {state.current}: rewind first")
    if not all(ATTEMPT_NAME.fullmatch(name) for name in entry.tries):
        raise UsageError(f"epoch {entry.key} has invalid attempt names: {', '.join(entry.tries)}")
    if entry.attempt_name in state.tries:
        raise UsageError(
            f"epoch {entry.key}: {entry.attempt_name} is in the log already; each save needs a new attempt"
        )
    line = line_of(state, state.current)
    if line and line[-1].position >= entry.position:
        raise UsageError(
            f"epoch {entry.position} cannot be saved after epoch {line[-1].position}, the newest one: begin "
            "at start.epoch + 1, where start = resume()"
        )
    missing = [name for name in entry.needs if name not in state.tries]
    if missing:
        raise SaveFailedError(
            f"epoch {entry.position} refers to {', '.join(missing)}, which is not live any more: the "
            "next save writes those bytes again"
        )
    entries = tuple(sorted((*state.entries, entry), key=lambda one: one.key))
    # Passed mid-epoch positions: of the branch, of those below it, of abandoned ones.
    passed = [one for one in state.entries if not one.position.boundary and one.position < entry.position]
    return without(replace(state, entries=entries), passed if entry.position.boundary else [])


def rewound(
    state: State, base: Position | None, request: Mapping[str, Json], branch: int | None = None
) -> State:
    """The state after a rewind: a new branch at `base` as seen from `branch` (default: the current one).

    `base` None is a fresh start: the new branch sees nothing. Raises UnknownEpochError for a base that is not
    live. The parent is the branch that holds the base's entry, so that lineages stay short.
    """
    parent = None
    if base is not None:
        seen = line_of(state, state.current if branch is None else branch)
        holder = next((entry for entry in seen if entry.position == base), None)
        if holder is None:
            there = ", ".join(str(entry.position) for entry in seen) or "none"
            raise UnknownEpochError(f"epoch {base} is not committed ({there}): choose one of them")
        parent = holder.branch
    new = Branch(state.next_branch, parent, base, dict(request))
    state = replace(state, branches=(*state.branches, new), current=new.id, next_branch=state.next_branch + 1)
    return _pruned(state)


def quarantined(state: State, key: Key) -> State:
    """The state with an entry marked as damaged: it can be loaded explicitly, but is never chosen."""
    _must_live(state, key)
    entries = tuple(replace(one, health=DAMAGED) if one.key == key else one for one in state.entries)
    return replace(state, entries=entries)


def retired(state: State, retirements: Iterable[Retirement]) -> tuple[State, tuple[Retirement, ...]]:
    """Retire what may be retired *now*; returns the state and what was retired (a pin may have come first).

    Never the newest verifiable entry, a marked one, or an attempt that another live entry needs; entries that
    are retired too come before what only they need.
    """
    asked, allowed = tuple(retirements), set[Retirement]()
    left = list(asked)
    while left:
        later: list[Retirement] = []
        for one in reversed(left):  # they come oldest first, and newer ones need older ones
            entry = next((e for e in state.entries if e.attempt_name == one.attempt_name), None)
            needed = {name for other in state.entries if other is not entry for name in other.needs}
            if entry is None or entry.key in protected(state) or entry.attempt_name in needed:
                later.append(one)
                continue
            state = without(state, [entry]) if one.groups is None else _less_groups(state, entry, one.groups)
            allowed.add(one)
        if len(later) == len(left):
            break
        left = later[::-1]
    return state, tuple(one for one in asked if one in allowed)


def protected(state: State) -> frozenset[Key]:
    """Entries that retention never deletes under any policy: the newest verifiable and marked ones."""
    newest = newest_of(state)
    return state.marked | ({newest.key} if newest else frozenset())


def _less_groups(state: State, entry: CommittedPosition, groups: tuple[str, ...]) -> State:
    left = tuple(group for group in entry.groups if group not in groups)
    thinner = replace(entry, groups=left, resumable=False)
    entries = tuple(thinner if one.key == entry.key else one for one in state.entries)
    return replace(state, entries=entries, retiring=(*state.retiring, Retirement(entry.attempt_name, groups)))


def marked(state: State, mark: TagOrPin) -> State:
    """Add a tag or pin, or move the one of that name."""
    _must_live(state, mark.target)
    return replace(state, marks=(*unmarked(state, mark.kind, mark.name).marks, mark))


def unmarked(state: State, kind: str, name: str) -> State:
    """Remove a tag or pin; an absent one is fine."""
    kept = tuple(one for one in state.marks if (one.kind, one.name) != (kind, name))
    return replace(state, marks=kept)


def forgotten(state: State, deleted: Iterable[Retirement]) -> State:
    """Remove retirements whose files are deleted."""
    gone = set(deleted)
    return replace(state, retiring=tuple(one for one in state.retiring if one not in gone))


def _must_live(state: State, key: Key) -> None:
    if not any(entry.key == key for entry in state.entries):
        raise UnknownEpochError(f"epoch {key} is not committed: list the epochs and choose one")


def without(state: State, gone: Iterable[CommittedPosition]) -> State:
    """Remove entries that are not marked; attempts that are no longer needed become retirements."""
    keys = {entry.key for entry in gone if entry.key not in state.marked}
    before = state.tries
    state = replace(state, entries=tuple(entry for entry in state.entries if entry.key not in keys))
    unneeded = [Retirement(name) for name in sorted(before - state.tries)]
    superseded = {one.attempt_name for one in unneeded}
    still = tuple(one for one in state.retiring if one.attempt_name not in superseded)
    return _pruned(replace(state, retiring=(*still, *unneeded)))


def _pruned(state: State) -> State:
    """Forget branches without live entries that are not in the current lineage."""
    roots = {state.current} | {entry.branch for entry in state.entries}
    used = {branch.id for root in roots for branch, _ in lineage_of(state, root)}
    return replace(state, branches=tuple(branch for branch in state.branches if branch.id in used))


@dataclass(frozen=True)
class LostBase:
    """A referenced base file with wrong content; `data` is None if it is lost."""

    ref: BaseRef
    reason: str
    data: bytes | None = None

    @property
    def notice(self) -> str:
        """The notice if it can be recreated."""
        said = "its content is known, and the next start or torchrelay ckpt repair writes it again"
        return f"{self.reason}; {said}"


def lost_bases(storage: Storage, history: History) -> tuple[LostBase, ...]:
    """Check every base file that a record refers to; raises StorageError for an unreadable one."""
    known: dict[str, tuple[CommittedPosition, ...]] = {}
    lost: list[LostBase] = []
    before: Record | None = None
    for record in history.records:
        ref = record.base
        if ref is not None and ref.name not in known and ref.name not in {one.ref.name for one in lost}:
            found, reason = _read(storage, ref)
            if found is None:
                data = None
                for guess in _guesses(storage, record, before, known):
                    entries = tuple(sorted(guess, key=lambda entry: entry.key))
                    bytes_of = encode_base(entries)
                    if len(bytes_of) == ref.nbytes and canonical_json.sha256(bytes_of) == ref.sha256:
                        found, data = entries, bytes_of
                        break
                lost.append(LostBase(ref, reason, data))
            if found is not None:
                known[ref.name] = found
        before = record
    return tuple(lost)


def restore(storage: Storage, lost: LostBase) -> None:
    """Write the bytes again, durably. Concurrent calls write the same bytes."""
    if lost.data is None:
        raise DamagedError(
            f"{storage.url}/{lost.ref.path} is lost and cannot be recreated: restore it from a copy"
        )
    storage.delete(lost.ref.path)
    with suppress(FileExistsError):
        storage.link_exclusive(lost.ref.path, lost.data)
    storage.sync_dir(LOG)


def _read(storage: Storage, ref: BaseRef) -> tuple[tuple[CommittedPosition, ...] | None, str]:
    try:
        return decode_base(storage.read_range(ref.path, 0, ref.nbytes + 1), ref), ""
    except FileNotFoundError:
        return None, f"{ref.path} is missing"
    except DamagedError as error:
        return None, str(error)


def _guesses(
    storage: Storage, record: Record, before: Record | None, known: dict[str, tuple[CommittedPosition, ...]]
) -> Iterator[tuple[CommittedPosition, ...]]:
    """Possible contents of the base that `record` refers to first."""
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


def _less(entries: Iterable[CommittedPosition], keys: set[Key]) -> tuple[CommittedPosition, ...]:
    return tuple(entry for entry in entries if entry.key not in keys)


def _applied(state: State, record: Record) -> State:
    """The state after a record's change of entries; raises RelayError for a malformed payload."""
    fields = Fields(record.payload, slot_path(record.slot))
    if record.kind == "commit":
        return committed(state, entry_of(fields.fields("entry").values, fields.what))
    if record.kind == "retire":
        return retired(state, fields.each("retired", retirement_of))[0]
    if record.kind == "quarantine":
        return quarantined(state, key_of(fields))
    return state


def _from_manifests(storage: Storage, record: Record) -> Iterator[CommittedPosition]:
    for name in filter(ATTEMPT_NAME.fullmatch, storage.list(DATA)):
        with suppress(StorageError, FileNotFoundError):
            data = storage.read_range(manifest_path(name), 0, HINT_LIMIT_BYTES)
            manifest: Manifest = decode(data, what=manifest_path(name))
            if manifest.job_uuid == record.job and manifest.tries[0] == name:
                yield CommittedPosition(
                    manifest.branch, manifest.position, name, len(data), canonical_json.sha256(data),
                    manifest.needs, manifest.groups,
                )  # fmt: skip


def _thinned(storage: Storage, entry: CommittedPosition) -> CommittedPosition:
    there = set()
    for name in storage.list(attempt_directory(entry.attempt_name)):
        with suppress(DamagedError):
            there.add(parse_shard_file_name(name).group)
    left = tuple(group for group in entry.groups if group in there)
    return entry if left == entry.groups else replace(entry, groups=left, resumable=False)
