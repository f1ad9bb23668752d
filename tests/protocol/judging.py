"""What must hold of every state that a crash may leave, found out by the real recovery.

The log is opened, every live epoch is proved in full and its content compared, the log is taken over,
swept, and something is saved again. What depends on a part of the files alone is asked once per content
of that part, so that many states cost little: the log per its bytes, a proof per the bytes of an epoch's
tries. Of the states with the same log and the same directories of tries one is taken over.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from stories import FROZEN_ITEMS, NODES, Record, still
from weak_disk import Tree, WeakDisk

from torchrelay.checkpoint.format.position import CommittedPosition, Position
from torchrelay.checkpoint.load.reads.leaf_reader import LeafReader
from torchrelay.checkpoint.load.verify import verify_epoch
from torchrelay.checkpoint.log.chain import HINT, open_log, read_hint
from torchrelay.checkpoint.log.retention import KEEP_ALL, delete_left
from torchrelay.checkpoint.log.view import LogView
from torchrelay.checkpoint.log.writer import LogWriter
from torchrelay.errors import RelayError

Files = frozenset[tuple[str, bytes | None]]
_OWN_NONCES = 1 << 40


@dataclass(frozen=True)
class Violation:
    """Which promise is broken, and how, at which operation."""

    promise: str
    how: str
    where: str


@dataclass
class Judge:
    """Checks states; counts them; remembers violations."""

    disk_of: Callable[[Tree], WeakDisk] = WeakDisk.of
    enough: int = 5
    """So many violations tell what is wrong."""
    violations: list[Violation] = field(default_factory=list)
    looked_at: int = 0
    distinct: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    _seen: set[int] = field(default_factory=set)
    _logs: dict[Files, LogView | str] = field(default_factory=dict)
    _proofs: dict[tuple[CommittedPosition, Files], str] = field(default_factory=dict)
    _recoveries: dict[tuple[Files, frozenset[str]], str] = field(default_factory=dict)

    @property
    def fed_up(self) -> bool:
        return len(self.violations) >= self.enough

    def check(self, tree: Tree, record: Record, acknowledged: int, linked: int, where: str) -> bool:
        """Check one state; returns whether it is a new one."""
        self.looked_at += 1
        told = frozenset((path, data) for path, data in tree.items() if "/.tmp-" not in path)
        key = hash((told, acknowledged))
        if key in self._seen:
            return False
        self._seen.add(key)
        self.distinct += 1
        for promise, how in self._wrong(tree, record, acknowledged, linked):
            self.complain(promise, how, where)
        return True

    def complain(self, promise: str, how: str, where: str) -> None:
        """Remember a violation."""
        self.violations.append(Violation(promise, how, where))
        self.kinds[promise] += 1

    def _wrong(self, tree: Tree, record: Record, acknowledged: int, linked: int) -> Iterator[tuple[str, str]]:
        log = _told(tree)
        if log not in self._logs:
            self._logs[log] = _opened(tree)
        view = self._logs[log]
        if isinstance(view, str):
            yield "opens", view
            return
        if not acknowledged <= view.slot <= linked:
            yield "durable", f"slot {view.slot} is the newest; acknowledged {acknowledged}, made {linked}"
            return
        if view.slot >= 0 and view.state != record.truth[view.slot]:
            yield "linear", f"slot {view.slot} tells another state than when it was written"
        if view.notices:
            yield "linear", view.notices[0]
        yield from self._epochs(tree, record, view)
        for mark in view.state.marks:
            if view.entry(mark.target) is None:
                yield "kept", f"{mark.kind} {mark.name} points at {mark.target}, which is gone"
        data = frozenset("/".join(path.split("/")[:2]) for path in tree if path.startswith("data/"))
        if (log, data) not in self._recoveries:
            self._recoveries[log, data] = recover(self.disk_of(tree), view)
        if self._recoveries[log, data]:
            yield "recovers", self._recoveries[log, data]

    def _epochs(self, tree: Tree, record: Record, view: LogView) -> Iterator[tuple[str, str]]:
        newest = view.newest()
        if newest is None and not record.rotten and _had_newest(record, view):
            yield "something", "no epoch can be chosen"
        by_attempt: dict[str, list[tuple[str, bytes | None]]] = {}
        for path, data in tree.items():
            if path.startswith("data/") and "/.tmp-" not in path:
                by_attempt.setdefault(path.split("/")[1], []).append((path, data))
        for entry in view.entries:
            if not entry.healthy or record.rotten & set(entry.tries):
                continue
            files = frozenset(one for name in entry.tries for one in by_attempt.get(name, ()))
            if (entry, files) not in self._proofs:
                self._proofs[entry, files] = proved(WeakDisk.of(tree), entry, record)
            if self._proofs[entry, files]:
                yield "whole", f"epoch {entry.key}: {self._proofs[entry, files]}"


def _had_newest(record: Record, view: LogView) -> bool:
    """Whether there was an epoch to choose on this branch: then there must always be one."""
    states = [state for slot, state in record.truth.items() if slot <= view.slot]
    return any(one.current == view.state.current and LogView(one).newest() is not None for one in states)


def _told(tree: Tree) -> Files:
    """All that readers of the log look at; of the hint only what it says to them."""
    files = {path: data for path, data in tree.items() if _of_log(path)}
    if HINT in files:
        files[HINT] = str(read_hint(WeakDisk.of({HINT: files[HINT]}))).encode()
    return frozenset(files.items())


def _of_log(path: str) -> bool:
    return path == "job.json" or (path.startswith("log") and "/.tmp-" not in path)


def _opened(tree: Tree) -> LogView | str:
    try:
        return open_log(WeakDisk.of(tree), "job")
    except RelayError as error:
        return f"{type(error).__name__}: {error}"


def proved(disk: WeakDisk, entry: CommittedPosition, record: Record) -> str:
    """What is wrong with an epoch: its proof, or a content that is not all of one save."""
    proof = verify_epoch(disk, entry, level="full")
    if not proof.verified or proof.manifest is None:
        return proof.reason
    reader = LeafReader(disk, proof.manifest, proof.shards)
    rows = [_tensor(reader, "own", 2, torch.int64, node) for node in NODES]
    number, frozen = int(rows[0][0]), _tensor(reader, "frozen", FROZEN_ITEMS, torch.int32)
    position, expected = record.contents.get(number, (Position(0), -1))
    every = int(_tensor(reader, "all", 1, torch.int64)[0])
    if [row.tolist() for row in rows] != [[number, rank] for rank in range(len(NODES))] or every != number:
        return f"a mixture: {rows}, {every}"
    if position != entry.position or frozen.unique().tolist() != [expected]:
        return f"the content of {position} with {frozen.unique().tolist()} instead of {expected}"
    return ""


def _tensor(
    reader: LeafReader, name: str, items: int, dtype: torch.dtype, node: str | None = None
) -> torch.Tensor:
    found = torch.zeros(items, dtype=dtype)
    reader.read_into(name, memoryview(found.numpy()).cast("B"), node)
    return found


def recover(disk: WeakDisk, before: LogView) -> str:
    """Take over, sweep, commit and release; what went wrong, or nothing."""
    there = list(disk.seen)
    newest = before.line()[-1].position.epoch if before.line() else -1
    try:
        with still(_OWN_NONCES):
            writer = LogWriter.take(disk, "job", patience_secs=0.0)
            writer.retire(KEEP_ALL.chosen)
            delete_left(writer)
            again = _next(writer, newest + 1)
            writer.commit(again)
            writer.retire(KEEP_ALL.chosen)
            delete_left(writer)
            writer.release()
        after = open_log(disk, "job")
    except RelayError as error:
        return f"{type(error).__name__}: {error}"
    live = {one.key for one in before.entries if one.position.boundary and one not in before.abandoned()}
    if lost := live - {one.key for one in after.entries}:
        return f"epoch {min(lost)} was lost on the way"
    if after.newest() != again:
        return f"the newest is {after.newest()}"
    return _deleted_too_much(there, disk, after) or _left_over(disk, after)


def _next(writer: LogWriter, epoch: int) -> CommittedPosition:
    nonces = itertools.count(_OWN_NONCES)
    position = Position(epoch)
    return CommittedPosition(
        writer.view.current.id, position, position.directory(f"{next(nonces):012x}"), 1, "0" * 64
    )


def _deleted_too_much(there: list[str], disk: WeakDisk, after: LogView) -> str:
    for path in there:
        if path.startswith("data/") and path.split("/")[1] in after.state.tries and path not in disk.seen:
            return f"{path} is needed and was deleted"
    return ""


def _left_over(disk: WeakDisk, after: LogView) -> str:
    left = set(disk.list("data")) - after.state.tries
    return f"nothing needs {', '.join(sorted(left))}, and nothing will ever delete it" if left else ""
