"""Programmes that meet in one log, and what must hold of the log in every state between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations

from interleaving import Asking, Output, Programme, World
from stories import ME, still
from weak_disk import WeakDisk

from torchrelay.checkpoint.format import canonical_json
from torchrelay.checkpoint.format.position import CommittedPosition, Key, Position
from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.log.record import Record, decode
from torchrelay.checkpoint.log.retention import Keeping
from torchrelay.checkpoint.log.writer import LogWriter, append_as_guest, pin_draft, tag_draft
from torchrelay.errors import RelayError

FIRST = Key(0, Position(0))


def entry(epoch: int, who: int, branch: int = 0) -> CommittedPosition:
    position = Position(epoch)
    return CommittedPosition(branch, position, position.directory(f"{who:06x}{epoch:06x}"), 1, "0" * 64)


def begun(epochs: int = 1) -> dict[str, bytes]:
    """The files of a log with some epochs, whose writer is silent."""
    disk = WeakDisk()
    with still(1 << 50):
        writer = LogWriter.take(disk, "job", patience_secs=0.0)
        for epoch in range(epochs):
            writer.commit(entry(epoch, 0))
        writer.close()
    files = disk.snapshot().kept()
    return {path: data for path, data in files.items() if data is not None and _told(path)}


def _told(path: str) -> bool:
    return path == "job.json" or path.startswith(("log/0", "log/base"))


def writer(
    who: int,
    commits: int,
    *,
    retires: bool = False,
    releases: bool = True,
    launched: tuple[str, int] | None = None,
    watches: bool = False,
) -> Programme:
    """Takes over at whatever moment it runs, commits what follows, maybe retires, maybe releases.

    `launched`: by which launch, and after how many restarts; all launches have one id. One that `watches`
    sees whoever holds the log as alive, unless that has released it.
    """
    identity = replace(ME, host=f"host{who}", boot_id=f"boot{who}")
    if launched is not None:
        launch, restarts = launched
        identity = replace(identity, launcher_id="torchrun:100", launch=launch, restarts=(restarts,))

    def run(storage: Asking) -> None:
        storage.holder_lives = watches
        log = LogWriter.take(storage, "job", identity, patience_secs=0.02 if watches else 0.0)
        storage.tell("taken", log.generation)
        for _ in range(commits):
            newest = log.view.newest()
            new = entry(newest.position.epoch + 1 if newest else 0, who)
            log.commit(new)
            storage.tell("committed", log.view.slot, new.attempt_name)
        if retires:
            for one in log.retire(Keeping(1).chosen):
                storage.tell("retired", log.view.slot, one.attempt_name)
        if releases:
            log.release()
            storage.tell("released", log.view.slot)

    return run


def marks(number: int, count: int) -> Programme:
    """Moves one tag between the first epochs, so often that slots are thinned between two of a writer."""

    def run(storage: Asking) -> None:
        for index in range(count):
            target = FIRST if index % 2 else Key(0, Position(1))
            view = append_as_guest(storage, tag_draft(f"best{number}", target), "job")
            storage.tell("tagged", view.slot, f"best{number}")

    return run


def guest(number: int) -> Programme:
    """Tags the first epoch, then pins it."""

    def run(storage: Asking) -> None:
        view = append_as_guest(storage, tag_draft(f"best{number}", FIRST), "job")
        storage.tell("tagged", view.slot, f"best{number}")
        view = append_as_guest(storage, pin_draft(f"reader{number}", FIRST), "job")
        storage.tell("pinned", view.slot, f"reader{number}")

    return run


@dataclass
class Rules:
    """Checks a state: one linear history, nothing acknowledged lost, nobody fenced acknowledges."""

    job: str
    thins: bool = False
    """Whether slots may be gone because newer ones tell what they told."""
    cut_states: int = 0
    _histories: dict[frozenset[tuple[str, bytes]], str] = field(default_factory=dict)
    _checked: dict[tuple[object, ...], str] = field(default_factory=dict)
    _records: dict[bytes, Record] = field(default_factory=dict)

    @classmethod
    def of(cls, files: dict[str, bytes], *, thins: bool = False) -> Rules:
        return cls(str(open_log(WeakDisk.of({"log": None, **files})).job_uuid), thins)

    def check(self, world: World, outputs: tuple[Output, ...]) -> str:
        """What is wrong with a state; asked once for the same files and the same acknowledgements."""
        key = world.seen, world.safe, outputs
        if key not in self._checked:
            self._checked[key] = self._check(world, outputs)
        return self._checked[key]

    def _check(self, world: World, outputs: tuple[Output, ...]) -> str:
        files = dict(world.seen)
        told = [one for one in outputs if one[0] not in ("taken", "error")]
        for output in told:
            if problem := self._is_there(files, output):
                return problem
        for seen in self._cuts(world):
            if problem := self._history(seen):
                return problem
            left = dict(seen)
            for output in told:
                if problem := self._is_there(left, output):
                    return f"after a power cut: {problem}"
        return ""

    def _cuts(self, world: World) -> Iterator[frozenset[tuple[str, bytes]]]:
        """Any of the names that were not synced may be gone."""
        loose = [one for one in world.seen if one[0] not in world.safe]
        for count in range(len(loose) + 1):
            for gone in combinations(loose, count):
                self.cut_states += 1
                yield world.seen - frozenset(gone)

    def _is_there(self, files: dict[str, bytes], output: Output) -> str:
        """Whether what was acknowledged stands in the slot that was told."""
        kind, slot, *names = output
        data = files.get(f"log/{slot:020d}.json")
        payload = self._record(data, slot).payload if data is not None else {}
        found = str(payload)
        if data is None and self.thins:
            view = open_log(WeakDisk.of({"log": None, **files}), "job")
            found = str((view.entries, view.state.marks))
        if not found or not all(name in found for name in names):
            return f"{kind} {names} was acknowledged in slot {slot}, where there is {found}"
        return ""

    def _record(self, data: bytes, slot: int) -> Record:
        if data not in self._records:
            self._records[data] = decode(data, slot=slot, job=self.job)
        return self._records[data]

    def _history(self, seen: frozenset[tuple[str, bytes]]) -> str:
        if seen not in self._histories:
            self._histories[seen] = self._wrong(dict(seen))
        return self._histories[seen]

    def _wrong(self, files: dict[str, bytes]) -> str:
        try:
            view = open_log(WeakDisk.of({"log": None, **files}), "job")
        except RelayError as error:
            return f"{type(error).__name__}: {error}"
        if view.notices:
            return view.notices[0]
        slots = sorted(path for path in files if path.startswith("log/0"))
        records = [(files[path], self._record(files[path], int(path[4:24]))) for path in slots]
        problem = _linear(records)
        if self.thins:
            return problem
        committed = {one.payload["entry"]["try"] for _, one in records if one.kind == "commit"}
        retired = {gone["try"] for _, one in records for gone in one.payload.get("retired", ())}
        missing = committed - retired - {one.attempt_name for one in view.entries}
        lost = {one.name for one in view.state.marks if view.entry(one.target) is None}
        return problem or (f"{missing or lost} got lost" if missing or lost else "")


def _linear(records: list[tuple[bytes, Record]]) -> str:
    """Each record stands on the one before, and none of a generation that was taken over."""
    newest, before = -1, {one.slot + 1: canonical_json.sha256(data) for data, one in records}
    for _, one in records:
        if one.previous_sha256 != before.get(one.slot, one.previous_sha256):
            return f"slot {one.slot} does not stand on slot {one.slot - 1}"
        if one.generation < newest:
            return f"slot {one.slot} is of generation {one.generation}, after that of {newest}"
        newest = one.generation
    return ""
