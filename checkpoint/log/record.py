"""Define the log record and `job.json`: types, encoding, validation.

A record is a sealed JSON file with everything that is live (`position.State`). At most 64 of many live
entries are inline. The others are in a base file, written once and referenced by later records: an inline
entry replaces the base's entry of the same key, and `gone` lists those that are not live any more.

`job.json` is created once, exclusively, before anything else. Its uuid binds every record to this directory,
so that files of another one are detected. Every record repeats its content (`holder`), so that a lost or
damaged file can be read from the log, and is written again by the next writer.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from torchrelay.checkpoint.format import canonical_json
from torchrelay.checkpoint.format.canonical_json import (
    Fields,
    check_stamp,
    read_sealed,
    seal,
    sealed_bytes,
    stamp,
    unseal,
)
from torchrelay.checkpoint.format.names import ATTEMPT_NAME
from torchrelay.checkpoint.format.position import (
    Branch,
    CommittedPosition,
    Key,
    Position,
    Retirement,
    State,
    TagOrPin,
)
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.errors import DamagedError, FormatError, UsageError
from torchrelay.records import Json, dataclass

LOG = "log"
WRITER_KINDS = frozenset({"takeover", "commit", "rewind", "retire", "quarantine", "released"})
GUEST_KINDS = frozenset({"tag", "pin", "unpin"})
KINDS = WRITER_KINDS | GUEST_KINDS
_MARK_KINDS = ("tag", "pin")


@dataclass(frozen=True)
class BaseRef:
    """A base file, and which of its entries are not live any more."""

    name: str
    nbytes: int
    sha256: str
    gone: tuple[Key, ...] = ()

    @property
    def path(self) -> str:
        """Its path in the storage."""
        return f"{LOG}/{self.name}"


@dataclass(frozen=True)
class Record:
    """One slot of the log.

    `state.entries` are only the inline ones while `base` is set: `whole_entries` adds the others. `written`
    is wall time, for display only; slots define the order.
    """

    slot: int
    generation: int
    kind: str
    nonce: str
    job: str
    previous_sha256: str | None
    written: str
    payload: Mapping[str, Json]
    state: State
    base: BaseRef | None = None
    extra: Mapping[str, Json] = field(default_factory=dict)
    """Unknown fields of a newer minor version, kept."""


@dataclass(frozen=True)
class Link:
    """The part of a record, of any kind, that the chain of predecessors needs."""

    generation: int
    previous_sha256: str | None


def slot_path(slot: int) -> str:
    """The path of a slot's file: its number in twenty digits."""
    return f"{LOG}/{slot:020d}.json"


def encode(record: Record) -> bytes:
    """The bytes of a record's file."""
    return seal("record", record_json(record))


def record_json(record: Record) -> dict[str, Json]:
    """All fields of a record's file."""
    state, base = record.state, record.base
    gone = [key_json(key) for key in base.gone] if base else []
    return {
        **record.extra,
        "format": stamp(),
        "slot": record.slot,
        "generation": record.generation,
        "kind": record.kind,
        "nonce": record.nonce,
        "job": record.job,
        "previous_sha256": record.previous_sha256,
        "written": record.written,
        "payload": dict(record.payload),
        "live": [entry_json(entry) for entry in state.entries],
        "base": base and {"name": base.name, "bytes": base.nbytes, "sha256": base.sha256, "gone": gone},
        "branches": [
            {
                "id": branch.id,
                "parent": branch.parent,
                "base": position_json(branch.base),
                "request": None if branch.request is None else dict(branch.request),
            }
            for branch in state.branches
        ],
        "branch": state.current,
        "next_branch": state.next_branch,
        "marks": [{"kind": mark.kind, "name": mark.name, **key_json(mark.target)} for mark in state.marks],
        "retiring": [retirement_json(one) for one in state.retiring],
        "holder": dict(state.holder),
        "released": state.released,
    }


def decode(data: bytes, *, slot: int, job: str | None) -> Record:
    """Read the file of `slot` of a job (None: any); DamagedError, or FormatError for a newer version."""
    what = slot_path(slot)
    fields = _opened(data, slot, job, what)
    kind = fields.text("kind")
    if kind not in KINDS:
        raise FormatError(
            f"{what} is a {kind!r} record, unknown to this version: open the log with the version of "
            "torchrelay that wrote it, or a newer one"
        )
    record = Record(
        slot=slot,
        generation=fields.integer("generation"),
        kind=kind,
        nonce=fields.text("nonce"),
        job=fields.text("job"),
        previous_sha256=fields.optional("previous_sha256", fields.text),
        written=fields.text("written"),
        payload=fields.fields("payload").values,
        state=State(
            entries=fields.each("live", _entry),
            branches=fields.each("branches", _branch),
            current=fields.integer("branch"),
            next_branch=fields.integer("next_branch", minimum=1),
            marks=fields.each("marks", _mark),
            retiring=fields.each("retiring", retirement_of),
            holder=fields.fields("holder").values,
            released=fields.flag("released"),
        ),
        base=fields.optional("base", lambda key: _base(fields.fields(key))),
        extra=fields.rest(_RECORD_KEYS),
    )
    takeover = record.generation == record.slot
    if record.generation > record.slot or takeover != (record.kind == "takeover"):
        raise fields.wrong("generation")
    if (record.previous_sha256 is None) != (record.slot == 0):
        raise fields.wrong("previous_sha256")
    ids = {branch.id for branch in record.state.branches}
    known = {record.state.current} | {branch.parent for branch in record.state.branches} - {None}
    if not known <= ids or any(one >= record.state.next_branch for one in ids):
        raise fields.wrong("branches")
    if any(entry.branch not in ids for entry in record.state.entries):
        raise fields.wrong("live")
    return record


def decode_link(data: bytes, *, slot: int, job: str) -> Link:
    """Read only the link of a record; also of kinds of newer versions. Raises DamagedError."""
    fields = _opened(data, slot, job, slot_path(slot))
    return Link(fields.integer("generation"), fields.optional("previous_sha256", fields.text))


def encode_base(entries: tuple[CommittedPosition, ...]) -> bytes:
    """The bytes of a base file."""
    return canonical_json.dumps({"format": stamp(), "live": [entry_json(entry) for entry in entries]})


def decode_base(data: bytes, ref: BaseRef) -> tuple[CommittedPosition, ...]:
    """Read a base file; raises DamagedError if its size or SHA-256 differs from the record's."""
    if len(data) != ref.nbytes or canonical_json.sha256(data) != ref.sha256:
        raise DamagedError(
            f"{ref.path} is damaged: its size or SHA-256 is not that of the log ({ref.nbytes} bytes); "
            "restore it from a copy of the directory"
        )
    value = canonical_json.loads(data, what=ref.path, limit_bytes=len(data), depth=16)
    fields = Fields(value if isinstance(value, dict) else {}, ref.path)
    check_stamp(fields.values.get("format"), what=fields.what)
    return fields.each("live", _entry)


def whole_entries(
    record: Record, base_entries: tuple[CommittedPosition, ...]
) -> tuple[CommittedPosition, ...]:
    """All live entries of a record: those of its base without deleted ones, replaced by inline ones."""
    gone = frozenset(record.base.gone) if record.base else frozenset()
    merged = {entry.key: entry for entry in base_entries if entry.key not in gone}
    merged.update((entry.key, entry) for entry in record.state.entries)
    return tuple(merged[key] for key in sorted(merged))


def _opened(data: bytes, slot: int, job: str | None, what: str) -> Fields:
    fields = Fields(unseal("record", data, what), what)
    check_stamp(fields.values.get("format"), what=fields.what)
    if fields.integer("slot") != slot:
        raise DamagedError(f"{what} is damaged: it is the record of slot {fields.integer('slot')}")
    if fields.text("job") != (job or fields.text("job")):
        raise DamagedError(f"{what} is of another job (uuid {fields.text('job')}, not {job})")
    return fields


def key_json(key: Key) -> dict[str, Json]:
    """A key as fields of an object."""
    return {"branch": key.branch, "epoch": key.position.epoch, "step": key.position.step}


def key_of(fields: Fields) -> Key:
    """Read what `key_json` made."""
    return Key(fields.integer("branch"), Position(fields.integer("epoch"), fields.integer("step")))


def entry_json(entry: CommittedPosition) -> dict[str, Json]:
    """An entry as stored in records and base files."""
    return {
        **entry.extra,
        **key_json(entry.key),
        "try": entry.attempt_name,
        "manifest_bytes": entry.manifest_bytes,
        "manifest_sha256": entry.manifest_sha256,
        "needs": list(entry.needs),
        "groups": list(entry.groups),
        "resumable": entry.resumable,
        "health": entry.health,
    }


def entry_of(value: Json, what: str) -> CommittedPosition:
    """Read what `entry_json` made; raises DamagedError naming `what`."""
    return _entry(Fields(value if isinstance(value, dict) else {}, what))


def _entry(fields: Fields) -> CommittedPosition:
    branch, position = key_of(fields)
    needs = fields.texts("needs")
    if not all(ATTEMPT_NAME.fullmatch(name) for name in needs):
        raise fields.wrong("needs")
    return CommittedPosition(
        branch=branch,
        position=position,
        attempt_name=_attempt_name(fields),
        manifest_bytes=fields.integer("manifest_bytes"),
        manifest_sha256=fields.text("manifest_sha256"),
        needs=needs,
        groups=fields.texts("groups"),
        resumable=fields.flag("resumable"),
        health=fields.text("health"),
        extra=fields.rest(_ENTRY_KEYS),
    )


def _attempt_name(fields: Fields) -> str:
    name = fields.text("try")
    if ATTEMPT_NAME.fullmatch(name) is None:
        raise fields.wrong("try")
    return name


def position_json(position: Position | None) -> Json:
    """A position, or null."""
    return None if position is None else {"epoch": position.epoch, "step": position.step}


def _branch(fields: Fields) -> Branch:
    return Branch(
        id=fields.integer("id"),
        parent=fields.optional("parent", fields.integer),
        base=fields.optional("base", lambda key: _position(fields.fields(key))),
        request=fields.optional("request", lambda key: fields.fields(key).values),
    )


def _position(fields: Fields) -> Position:
    return Position(fields.integer("epoch"), fields.integer("step"))


def _mark(fields: Fields) -> TagOrPin:
    kind = fields.text("kind")
    if kind not in _MARK_KINDS:
        raise fields.wrong("kind")
    return TagOrPin(kind, fields.text("name"), key_of(fields))


def retirement_json(one: Retirement) -> dict[str, Json]:
    """A retirement as stored in records."""
    return {"try": one.attempt_name, "groups": None if one.groups is None else list(one.groups)}


def retirement_of(fields: Fields) -> Retirement:
    """Read what `retirement_json` made."""
    return Retirement(_attempt_name(fields), fields.optional("groups", fields.texts))


def _base(fields: Fields) -> BaseRef:
    name = fields.text("name")
    if "/" in name or not name.startswith("base-"):
        raise fields.wrong("name")
    return BaseRef(name, fields.integer("bytes"), fields.text("sha256"), fields.each("gone", key_of))


_ENTRY_KEYS = frozenset(entry_json(CommittedPosition(0, Position(0), "", 0, "")))
_RECORD_KEYS = frozenset(record_json(Record(0, 0, "takeover", "", "", None, "", {}, State())))


JOB_PATH = "job.json"
SLOT = re.compile(r"([0-9]{20})\.json", re.ASCII)


@dataclass(frozen=True)
class JobFile:
    """The job of a directory. `named` is False if the job had no name: then the directory's is used.

    `damage` describes the error in `job.json` if the rest comes from the log.
    """

    name: str
    uuid: str
    created: str
    named: bool = True
    damage: str = field(default="", compare=False)

    @property
    def notices(self) -> tuple[str, ...]:
        """Notices about the file."""
        said = "the log has the same data, and the next start or torchrelay ckpt repair writes it again"
        return (f"{self.damage}; {said}",) if self.damage else ()

    def as_repeated(self, holder: Mapping[str, Any]) -> JobFile:
        """The job as the log's holder states it, with `damage` if the file differs."""
        stated = repeated_in(self.uuid, holder)
        if stated == self or "named" not in holder:  # written before the log repeated the file
            return self
        return replace(stated, damage=self.damage or f"{JOB_PATH} differs from the log's copy")


def read_job(storage: Storage) -> JobFile | None:
    """The job of the directory, or None.

    A lost or damaged file is read from the log (see `JobFile.damage`). Raises FormatError for a file of
    another version, DamagedError if no record of the log can be trusted either.
    """
    data = _job_bytes(storage)
    if data is None and storage.stat(slot_path(0)) is None:
        return None
    data = data or _job_bytes(storage)  # a job begun meanwhile created this file before the slot
    if data is None:
        return _from_log(storage, f"{JOB_PATH} is missing")
    try:
        fields = Fields(unseal("job", data, JOB_PATH), JOB_PATH)
        check_stamp(fields.values.get("format"), what=f"{storage.url}/{JOB_PATH}")
        return JobFile(fields.text("name"), fields.text("uuid"), fields.text("created"), fields.flag("named"))
    except DamagedError as error:
        return _from_log(storage, str(error))


def _from_log(storage: Storage, damage: str) -> JobFile | None:
    """The job in the newest readable record; None without records."""
    record = next(readable_records(storage), None)
    if record is not None:
        return replace(repeated_in(record.job, record.state.holder), damage=damage)
    if any(map(SLOT.fullmatch, storage.list(LOG))):
        raise DamagedError(
            f"{storage.url}: {damage}, and no record of its log can be trusted: restore {JOB_PATH} or "
            "the log from a copy"
        )
    return None


def readable_records(storage: Storage) -> Iterator[Record]:
    """Readable records of any job, newest first. It lists the directory, so use it for damage only."""
    slots = {int(match[1]) for match in map(SLOT.fullmatch, storage.list(LOG)) if match}
    for slot in sorted(slots, reverse=True):
        with suppress(DamagedError, FileNotFoundError):
            yield decode(sealed_bytes(storage, slot_path(slot)), slot=slot, job=None)


def repeated_in(job_uuid: str, holder: Mapping[str, Any]) -> JobFile:
    """Logs of older versions do not state whether the job had a name: a nameless one may use them too."""
    created = holder.get("created", holder.get("since", ""))
    return JobFile(str(holder.get("job", "")), job_uuid, str(created), holder.get("named") is True)


def _job_bytes(storage: Storage) -> bytes | None:
    with suppress(FileNotFoundError):
        return read_sealed("job", lambda: sealed_bytes(storage, JOB_PATH))
    return None


def check_job(storage: Storage, job: JobFile, name: str | None) -> JobFile:
    """Raise UsageError for another job's directory; nameless jobs may use one begun without a name."""
    if job.name == (name or directory_name(storage)) or (name is None and not job.named):
        return job
    mine = f"job {name!r}" if name else "a job without a name"
    raise UsageError(f"{storage.url} belongs to job {job.name!r}, not to {mine}: choose another directory")


def open_job(storage: Storage, name: str | None) -> JobFile:
    """Read and check the directory's job, or begin it; the first creator of the file decides."""
    return check_job(storage, begin_job(storage, name), name)


def begin_job(storage: Storage, name: str | None) -> JobFile:
    """The same; the name of an existing job is not compared."""
    if (found := read_job(storage)) is not None:
        return found
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    job = JobFile(name or directory_name(storage), str(uuid.uuid4()), created, named=name is not None)
    storage.mkdir("")
    try:
        storage.link_exclusive(JOB_PATH, encode_job(job))
    except FileExistsError:
        if (found := read_job(storage)) is not None:
            return found
        # Damaged before anything was written. Of two processes here slot 0 decides, the other one follows.
        storage.replace(JOB_PATH, encode_job(job))
    storage.sync_dir("")
    return job


def directory_name(storage: Storage) -> str:
    """The name of a nameless job: the last part of its path."""
    return storage.url.rstrip("/").rpartition("/")[2]


def encode_job(job: JobFile) -> bytes:
    """The bytes of `job.json`."""
    fields = {"name": job.name, "uuid": job.uuid, "created": job.created, "named": job.named}
    return seal("job", {"format": stamp(), **fields})


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
