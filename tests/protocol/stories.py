"""Lives of a job over a simulated storage: the real engine and log, with everything else standing still.

Nonces count up, clocks stand, no thread moves a counter and a takeover does not wait, so that the same
story makes the same bytes, operation for operation.
"""

from __future__ import annotations

import itertools
import secrets
import uuid
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime as real_datetime
from datetime import timezone
from unittest.mock import patch

import torch
from weak_disk import Snapshot, WeakDisk

from torchrelay import LocalSession
from torchrelay.checkpoint.coordinator.session_log import Deletions
from torchrelay.checkpoint.format.position import EVERYTHING, Facts, Key, Position, Retirement, State
from torchrelay.checkpoint.load.renaming import ResumeOptions
from torchrelay.checkpoint.log import chain, lease, view
from torchrelay.checkpoint.log import chain as log_append
from torchrelay.checkpoint.log import chain as thinning
from torchrelay.checkpoint.log import record as job_file
from torchrelay.checkpoint.log import writer as guest
from torchrelay.checkpoint.log import writer as log_writer
from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.log.lease import WriterIdentity
from torchrelay.checkpoint.log.retention import Keeping, delete_left
from torchrelay.checkpoint.log.writer import append_as_guest, pin_draft, tag_draft, unpin_draft
from torchrelay.checkpoint.manager import engine as placed_module
from torchrelay.checkpoint.manager.engine import Engine
from torchrelay.errors import PartiallyLoadedError, RelayError, StorageError

NODES = ("a", "b")
FROZEN_ITEMS = 16384
"""64 KiB: enough to be worth a reference."""
ME = WriterIdentity("job", "host", "boot", "pid:[1]", 1, "1")


class _Beat:
    """The counter's thread, which never runs."""

    def __init__(self, beat: object, period_secs: float) -> None:
        pass

    def stop(self) -> None:
        pass


class _Still(real_datetime):
    """A clock that stands."""

    @classmethod
    def now(cls, tz: object = None) -> real_datetime:
        return real_datetime(2026, 1, 1, tzinfo=timezone.utc)


@contextmanager
def still(first: int = 1) -> Iterator[None]:
    """Nothing but the program itself decides what happens. `first` is the first nonce."""
    nonces = itertools.count(first)
    with ExitStack() as stack:
        on = stack.enter_context
        on(patch.object(secrets, "token_hex", lambda size=16: f"{next(nonces):0{2 * size}x}"))
        on(patch.object(uuid, "uuid4", lambda: uuid.UUID(int=next(nonces))))
        for module in (log_append, lease, job_file):
            on(patch.object(module, "datetime", _Still))
        on(patch.object(log_writer, "Beat", _Beat))
        on(patch.object(log_writer, "_LIVE", weakref.WeakValueDictionary()))
        here = staticmethod(lambda job, *, launch="": replace(ME, job=job, launch=launch))
        on(patch.object(WriterIdentity, "here", here))
        yield


@dataclass(frozen=True)
class Boundary:
    """Between two operations: what the disk is, which slots are acknowledged and which exist."""

    snapshot: Snapshot
    verb: str
    acknowledged: int
    linked: int


@dataclass
class Record:
    """What a story left: boundaries, the state that each slot tells, and which content each try has."""

    boundaries: list[Boundary] = field(default_factory=list)
    truth: dict[int, State] = field(default_factory=dict)
    contents: dict[int, tuple[Position, int]] = field(default_factory=dict)
    """By the number that a save wrote: its position, and the number in the frozen tensor."""
    acknowledged: int = -1
    rotten: set[str] = field(default_factory=set)
    """Tries that the story has damaged."""
    number: int = 0
    frozen: int = 0

    def after(self, boundary: Boundary, slot: int) -> Record:
        """What is known to a later life that began at a boundary and found this slot newest."""
        truth = {one: state for one, state in self.truth.items() if one <= slot}
        return replace(self, boundaries=[], truth=truth, acknowledged=boundary.acknowledged)

    @property
    def linked(self) -> int:
        return max(self.truth, default=-1)

    def observe(self, disk: WeakDisk, verb: str, path: str) -> None:
        if verb in ("link", "create") and path.startswith("log/0"):
            self.truth[int(path[4:24])] = open_log(disk).state
        if "/.tmp-" not in path and not path.startswith(".tmp-"):
            self.boundaries.append(
                Boundary(disk.snapshot(), f"{verb} {path}", self.acknowledged, self.linked)
            )


@contextmanager
def recorded(disk: WeakDisk, record: Record) -> Iterator[Record]:
    """Note every operation on the disk, and every append that returned: that is its acknowledgement."""
    real = log_writer.append

    def append(*args: object) -> tuple[log_append.Tail, log_append.Record | None]:
        tail, appended = real(*args)
        if appended is not None:
            record.acknowledged = appended.slot
        return tail, appended

    disk.observe = lambda verb, path: record.observe(disk, verb, path)
    with patch.object(log_writer, "append", append), patch.object(guest, "append", append):
        yield record
    disk.observe = None


class _AtOnce(Deletions):
    """Deletes before the training goes on, as where no thread can be had, so that a story has one order."""

    def ask(self, what: str, work: Callable[[], object]) -> None:
        try:
            work()
        except RelayError as error:
            self._failed.append(f"{what}: {error}")


class Run:
    """A job of two emulated nodes that saves with the real engine."""

    def __init__(self, disk: WeakDisk, record: Record, keep_last: int | None = None) -> None:
        self.record = record
        self.session = LocalSession(NODES)
        with (
            patch.object(placed_module, "storage_of", lambda *where: disk),
        ):
            self.engine = Engine(
                "job", takeover_secs=0.0, keeping=Keeping(keep_last),
                selection=EVERYTHING, share_reads=None, resume=ResumeOptions(),
            )  # fmt: skip
        self.engine.ledger.deletions = _AtOnce()
        self.engine.bind("job")

    @property
    def writer(self) -> log_writer.LogWriter:
        return self.engine.ledger.required()

    def save(self, epoch: int, *, step: int = 0, change_all: bool = False) -> None:
        """Save a content that is like no other save's; the large tensor changes only if told to."""
        record = self.record
        record.number += 1
        record.frozen = record.number if change_all or not record.frozen else record.frozen
        record.contents[record.number] = (Position(epoch, step), record.frozen)
        self.fill(record.number, record.frozen)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.engine.save(self.session, Position(epoch, step), Facts())

    def fill(self, number: int, frozen: int) -> None:
        for rank, place in enumerate(self.session.local_nodes):
            space = self.session.workspace(place.name)
            space["own"] = torch.tensor([number, rank])
            space["all"] = torch.tensor([number])
            space["frozen"] = torch.full((FROZEN_ITEMS,), frozen, dtype=torch.int32)

    def resume(self) -> int:
        """Take over and load the newest epoch that can be proved, as a start does; -1: there is none."""
        ledger, peers = self.engine.ledger, self.session.peers
        ledger.open(peers)
        if ledger.view().newest() is None:
            return -1
        self.fill(0, 0)
        self.engine.seal(self.session)
        target = ledger.newest(peers, lambda line: None)
        while True:
            try:
                self.engine.load(self.session, target)
                break
            except (StorageError, PartiallyLoadedError) as error:
                target = ledger.instead_of(peers, target, error, lambda line: None)
        self.record.frozen = int(self.session.workspace("a")["frozen"][0])
        return target.position.epoch

    def close(self) -> None:
        self.engine.ledger.close()


Story = Callable[[WeakDisk, Record], None]


def plain(disk: WeakDisk, record: Record) -> None:
    """Epochs that refer to the first one, of which two are kept."""
    run = Run(disk, record, keep_last=2)
    for epoch in range(4):
        run.save(epoch, change_all=epoch == 3)
    run.close()


def rewinding(disk: WeakDisk, record: Record) -> None:
    """A branch begins at an older epoch, passes the abandoned ones, and these go."""
    run = Run(disk, record, keep_last=2)
    for epoch in range(3):
        run.save(epoch)
    run.engine.ledger.rewind(run.session.peers, Position(1), {"epoch": 1})
    for epoch in (2, 3):
        run.save(epoch)
    run.engine.ledger.rewind(run.session.peers, None, {"fresh": True})
    run.save(0)
    run.close()


def marked(disk: WeakDisk, record: Record) -> None:
    """A guest tags and pins while a writer keeps one epoch."""
    run = Run(disk, record, keep_last=1)
    run.save(0)
    append_as_guest(disk, tag_draft("best", Key(0, Position(0))), "job")
    run.save(1, change_all=True)
    append_as_guest(disk, pin_draft("reader", Key(0, Position(1))), "job")
    run.save(2)
    append_as_guest(disk, unpin_draft("reader"), "job")
    append_as_guest(disk, tag_draft("best", Key(0, Position(2))), "job")
    run.save(3)
    run.close()


def in_mid_epoch(disk: WeakDisk, record: Record) -> None:
    """Positions in the middle of an epoch are completed by it, though a later one refers to one of them."""
    run = Run(disk, record, keep_last=1)
    run.save(0)
    run.save(0, step=5, change_all=True)
    run.save(0, step=9)
    run.save(1)
    run.save(1, step=5)
    run.save(2)
    run.close()


def damaged(disk: WeakDisk, record: Record) -> None:
    """The newest epoch rots; the next start quarantines it, falls back and goes on."""
    run = Run(disk, record, keep_last=2)
    for epoch in range(3):
        run.save(epoch)
    entry = run.writer.view.entries[-1]
    run.writer.close()
    record.rotten.add(entry.attempt_name)
    disk.rot(f"data/{entry.attempt_name}/a.2.main.safetensors")
    again = Run(disk, record, keep_last=2)
    for epoch in range(again.resume() + 1, 4):
        again.save(epoch)
    again.close()


def restarted(disk: WeakDisk, record: Record) -> None:
    """Two writers die without a word; the next one resumes."""
    for last in (1, 2, 3):
        run = Run(disk, record, keep_last=2)
        for epoch in range(run.resume() + 1, last + 1):
            run.save(epoch)
        run.writer.close()


def long(disk: WeakDisk, record: Record) -> None:
    """So many records and epochs that the log is thinned and has base files."""
    run = Run(disk, record, keep_last=4)
    for epoch in range(9):
        run.save(epoch, change_all=epoch % 3 == 0)
    run.close()


def greedy(disk: WeakDisk, record: Record) -> None:
    """Somebody asks to retire all that there is, after every save."""
    run = Run(disk, record)
    for epoch in range(3):
        run.save(epoch, change_all=True)
        run.writer.retire([Retirement(entry.attempt_name) for entry in run.writer.view.entries])
        delete_left(run.writer)
    run.close()


STORIES: dict[str, Story] = {
    one.__name__: one for one in (plain, rewinding, marked, in_mid_epoch, damaged, restarted, greedy, long)
}


def going_on(disk: WeakDisk, record: Record) -> None:
    """What follows a crash: resume, save twice, release."""
    run = Run(disk, record, keep_last=2)
    newest = run.resume()
    run.save(newest + 1)
    run.save(newest + 2, change_all=True)
    run.close()


@contextmanager
def small_log() -> Iterator[None]:
    """Logs that are thinned after 8 slots and have base files from 3 entries on."""
    with ExitStack() as stack:
        for module in (view, chain, log_append, thinning):
            stack.enter_context(patch.object(module, "STRIDE", 8))
        stack.enter_context(patch.object(log_append, "INLINE", 2))
        stack.enter_context(patch.object(log_append, "_REBASED_INLINE", 1))
        yield
