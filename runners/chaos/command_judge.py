"""What a struck command must not have lost: durable records, proved epochs, the same end."""

from __future__ import annotations

import os
from pathlib import Path

from torchrelay.checkpoint.load.verify import prove
from torchrelay.checkpoint.log.reader import open_log
from torchrelay.checkpoint.log.record import slot_path
from torchrelay.checkpoint.log.view import STRIDE, LogView
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.errors import RelayError, UsageError
from torchrelay.records import dataclass
from torchrelay.runners.chaos.command_runs import Done
from torchrelay.runners.chaos.fault import Fault
from torchrelay.runners.chaos.tally import Verdict

_PROVED = ("manifest.json", ".safetensors")


@dataclass(frozen=True)
class Kept:
    """Records that were durable when the fault happened: their bytes, by slot."""

    records: dict[int, bytes]


def _storage_of(run: Path) -> LocalStorage:
    below = run / "checkpoints"
    return LocalStorage(below if below.is_dir() else run)


def end_of(run: Path) -> tuple[int, int]:
    """The newest epoch of a run that has ended, and its branch."""
    try:
        view = open_log(_storage_of(run))
    except RelayError as error:
        raise UsageError(f"the command leaves no readable checkpoints in {{run}}: {error}") from error
    newest = view.newest()
    if newest is None:
        raise UsageError(
            "the command leaves no epoch in {run}: let it save there, as JobRunner(job, run) does"
        )
    return newest.position.epoch, view.current.id


def kept_at(run: Path, slots: set[int]) -> Kept:
    """The bytes of durable records that stay, as they lie there; one that is gone has none."""
    root, newest = _storage_of(run).root, max(slots, default=0)
    files = {slot: root / slot_path(slot) for slot in slots if not _may_go(slot, newest)}
    return Kept({slot: file.read_bytes() if file.exists() else b"" for slot, file in files.items()})


def _may_go(slot: int, newest: int) -> bool:
    """Whether a log that goes on to `newest` may have thinned this record away (format.md, section 4)."""
    return slot % STRIDE != 0 and slot <= newest - STRIDE


def judge_struck(fault: Fault, done: Done) -> tuple[Verdict, str]:
    """What the struck command itself did: it ended, and said the reason where it failed."""
    if done.late:
        return Verdict.FAILED, f"it did not end in time: {done.tail}"
    if fault.errno and done.code and os.strerror(fault.errno) not in done.output:
        return (
            Verdict.FAILED,
            f"it ended with {done.code} and did not say {os.strerror(fault.errno)}: {done.tail}",
        )
    return Verdict.SURVIVED, ""


def judge_left(run: Path, before: Kept, newest: int, branch: int) -> tuple[Verdict, str]:
    """Every durable record that stays is what it was, every live epoch is proved, and the end is the same."""
    storage = _storage_of(run)
    view = open_log(storage)
    for slot, data in before.records.items():
        file = storage.root / slot_path(slot)
        if _may_go(slot, view.slot):
            continue
        if not data or not file.exists() or file.read_bytes() != data:
            return Verdict.LOST, f"record {slot} of the log was durable and is not there any more"
    proofs = [prove(storage, entry, level="full") for entry in view.entries]
    for proof in proofs:
        if not proof.proved:
            return Verdict.LOST, f"epoch {proof.entry.position} is {proof.outcome.value}: {proof.reason}"
    return _judge_end(view, newest, branch)


def _judge_end(view: LogView, newest: int, branch: int) -> tuple[Verdict, str]:
    found = view.newest()
    if found is None or found.position.epoch != newest:
        return Verdict.FAILED, f"the run ends at epoch {found and found.position} instead of {newest}"
    if view.current.id != branch:
        return Verdict.LOST, "epochs that were committed were given up: the run is on another branch"
    return Verdict.SURVIVED, ""


def is_noticed(run: Path, path: str) -> bool:
    """Whether proving shows a change of this file, or the file proves nothing."""
    storage = _storage_of(run)
    try:
        view = open_log(storage)
        proofs = [prove(storage, entry, level="full") for entry in view.entries]
    except RelayError:
        return True
    if view.notices or not all(proof.proved for proof in proofs):
        return True
    tries = {name for entry in view.entries for name in (entry.try_name, *entry.needs)}
    live = any(f"data/{name}/" in path for name in tries)
    return not (live and path.endswith(_PROVED))
