"""What happened in a log, record by record, as far back as records lie without a gap."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from typing import Any

from torchrelay.checkpoint.format.canonical_json import sealed_bytes
from torchrelay.checkpoint.format.manifest.position import Key, Position, State
from torchrelay.checkpoint.format.manifest.schema import position_of
from torchrelay.checkpoint.format.names import TRY
from torchrelay.checkpoint.log.record import Record, decode, slot_path
from torchrelay.checkpoint.log.view import branch_of, line_of
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.errors import DamagedError
from torchrelay.records import dataclass

Json = Any


@dataclass(frozen=True)
class History:
    """Records in their order; damaged ones are left out, `damaged` has their paths.

    `begins` is the oldest slot that was looked at: what happened before it is not known any more.
    """

    records: tuple[Record, ...] = ()
    begins: int = 0
    damaged: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether it reaches back to the first record."""
        return self.begins == 0 and not self.damaged


@dataclass(frozen=True)
class Happening:
    """One record that concerned a position: `kind` as in the log, `text` for people."""

    slot: int
    written: str
    kind: str
    text: str

    @property
    def when(self) -> str:
        """When it was written, as people read it."""
        try:
            moment = datetime.fromisoformat(self.written).astimezone(timezone.utc)
        except (ValueError, OverflowError):
            return self.written
        return moment.strftime("%Y-%m-%d %H:%M:%S UTC")

    def json(self) -> dict[str, Json]:
        """As an object of `why --json`."""
        return {"slot": self.slot, "written": self.written, "kind": self.kind, "text": self.text}


def read_history(storage: Storage, job: str, newest: int) -> History:
    """Records from slot `newest` of the log of job `job` (a uuid) down to the first one that is missing.

    Raises FormatError for a record of a newer version, StorageError for what cannot be read.
    """
    found: list[Record] = []
    damaged: list[str] = []
    slot = newest
    while slot >= 0:
        try:
            data = sealed_bytes(storage, slot_path(slot))
        except FileNotFoundError:
            break
        try:
            found.append(decode(data, slot=slot, job=job))
        except DamagedError:
            damaged.append(slot_path(slot))
        slot -= 1
    return History(tuple(reversed(found)), slot + 1, tuple(reversed(damaged)))


def happened_to(history: History, wanted: Position, branch: int | None = None) -> Iterator[Happening]:
    """What the records say of a position (on one branch, or on any), oldest first."""
    before, branch_of_try = State(), dict[str, int]()
    for record in history.records:
        branch_of_try.update((entry.try_name, entry.branch) for entry in record.state.entries)
        text = _said(_Step(before, record, wanted, branch, branch_of_try))
        if text:
            yield Happening(record.slot, record.written, record.kind, text)
        before = record.state


@dataclass(frozen=True)
class _Step:
    """A record, the state before it, and which position is asked for."""

    before: State
    record: Record
    wanted: Position
    branch: int | None
    branch_of_try: dict[str, int]

    def means(self, key: Key | None) -> bool:
        """Whether a key is the one that is asked for."""
        return key is not None and key.position == self.wanted and self.branch in (None, key.branch)


def _said(step: _Step) -> str:
    kind, payload = step.record.kind, step.record.payload
    if kind == "commit":
        return _committed(step, _key(payload.get("entry")))
    if kind == "rewind":
        return _abandoned(step)
    if kind == "retire":
        return _retired(step)
    if kind == "quarantine" and step.means(_key(payload)):
        return f"found damaged: {payload.get('reason') or 'no reason was noted'}"
    if kind in ("tag", "pin") and step.means(_key(payload.get("target"))):
        return f"{'tagged' if kind == 'tag' else 'pinned'} as {payload.get('name')!r}"
    return ""


def _key(value: Json) -> Key | None:
    """The key that a payload names; None for anything odd, because payloads prove nothing."""
    if not isinstance(value, Mapping):
        return None
    numbers = [value[name] for name in ("branch", "epoch", "step") if type(value.get(name)) is int]
    if len(numbers) != 3:
        return None
    return Key(numbers[0], Position(numbers[1], numbers[2]))


def _committed(step: _Step, key: Key | None) -> str:
    """A commit; that of a whole epoch retires the mid-epoch positions that it completes."""
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
        if not isinstance(name, str) or not TRY.fullmatch(name) or position_of(name) != step.wanted:
            continue
        on = step.branch_of_try.get(name)
        if step.branch is not None and on is not None and on != step.branch:
            continue
        groups = one.get("groups")
        what = f"its files of {', '.join(map(str, groups))} were" if isinstance(groups, list) else "it was"
        where = f" (on branch {on})" if on is not None else ""
        return f"{what} retired by {by}{where}"
    return ""


def _abandoned(step: _Step) -> str:
    """A rewind that took the position out of the line of the current branch."""
    state = step.record.state
    seen = {entry.key for entry in line_of(step.before, step.before.current) if step.means(entry.key)}
    if not seen - {entry.key for entry in line_of(state, state.current)}:
        return ""
    began = branch_of(state, state.current)
    request = step.record.payload.get("request")
    why = "after damage" if isinstance(request, Mapping) and request.get("fallback") else "by a rewind"
    where = "a fresh start" if began is None or began.base is None else f"epoch {began.base}"
    return f"abandoned {why}: branch {state.current} began at {where}"
