"""A random walk through everything that can happen to a job's directory, compared with a dictionary.

The real engine and log, over a disk that forgets what POSIX lets it forget. After every step the log must
say what the dictionary says; loads must bring the contents that were saved, or find the damage that was done.
"""

from __future__ import annotations

import random
import weakref
from collections import Counter, deque
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from unittest.mock import patch

from judging import proved
from stories import ME, Record, Run, small_log, still
from weak_disk import CrashError, WeakDisk

from torchrelay.checkpoint.coordinator.retention import Retaining
from torchrelay.checkpoint.format.position import CommittedPosition, Key, Position
from torchrelay.checkpoint.log import writer
from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.log.retention import Keeping
from torchrelay.checkpoint.log.view import LogView
from torchrelay.checkpoint.log.writer import LogWriter, append_as_guest, pin_draft, tag_draft, unpin_draft
from torchrelay.errors import FencedError, NoProvableEpochError

STEPS_OF_A_WORLD = 100
"""Then a new directory is begun."""
OFTEN = {
    "save": 18, "half": 5, "load": 14, "mark": 30, "rot": 2, "rewind": 2, "anew": 1, "keep": 4,
    "crash": 5, "kill": 2, "cut": 2, "end": 2, "rival": 2,
}  # fmt: skip
"""Steps of a job that runs, and how often each is taken."""
ME_TOO = replace(ME, host="another", boot_id="another")


class Unlike(AssertionError):
    """The log and the dictionary differ."""


@dataclass
class Known:
    """The dictionary: what was acknowledged, and what has been done to it."""

    numbers: dict[Key, int] = field(default_factory=dict)
    """Which content each live position has."""
    parents: dict[int, tuple[int, Position] | None] = field(default_factory=lambda: {0: None})
    branch: int = 0
    marks: dict[tuple[str, str], Key] = field(default_factory=dict)
    quarantined: set[Key] = field(default_factory=set)
    rotten: set[Key] = field(default_factory=set)
    spoilt: set[str] = field(default_factory=set)
    """Tries whose large tensor is damaged: what will refer to them is damaged from its birth."""

    def line(self) -> list[Key]:
        """What the current branch sees, oldest first."""
        seen: dict[Position, Key] = {}
        branch: int | None = self.branch
        limit: Position | None = None
        while branch is not None:
            for key in self.numbers:
                if key.branch == branch and (limit is None or key.position <= limit):
                    seen.setdefault(key.position, key)
            above = self.parents[branch]
            if above is not None:
                limit = above[1] if limit is None else min(limit, above[1])
            branch = None if above is None else above[0]
        return [seen[position] for position in sorted(seen)]

    def candidates(self) -> list[Key]:
        """What resume tries, newest first."""
        return [key for key in reversed(self.line()) if key not in self.quarantined]

    def must_stay(self, keep: int | None) -> set[Key]:
        """What retention may not take."""
        line = self.candidates()
        whole = [key for key in line if key.position.boundary]
        last = whole if keep is None else whole[:keep]
        beyond = [key for key in line if not whole or key.position > whole[0].position]
        return {*last, *beyond[:keep], *line[:1], *self.marks.values()}


@dataclass
class Walk:
    """One directory and the jobs that use it, one step after the other."""

    seed: int
    disk: WeakDisk = field(default_factory=WeakDisk)
    record: Record = field(default_factory=Record)
    known: Known = field(default_factory=Known)
    run: Run | None = None
    keep: int | None = None
    doubtful: tuple[Known, Key] | None = None
    """What was known before a crash, until somebody syncs the log: a power cut may take the record again."""
    taken: Counter[str] = field(default_factory=Counter)
    recent: deque[str] = field(default_factory=lambda: deque(maxlen=12))

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def walk(self, steps: int) -> None:
        """Take steps; raises Unlike naming the seed and the last steps."""
        with still(1 + (self.seed << 24)), small_log():
            for number in range(steps):
                name = self._choose()
                self.recent.append(name)
                self.taken[name] += 1
                try:
                    getattr(self, f"_{name}")()
                    self._compare()
                except Exception as error:
                    raise Unlike(
                        f"seed {self.seed}, step {number}, {' '.join(self.recent)}: {error!r}"
                    ) from error

    def _choose(self) -> str:
        if self.run is None:
            return self.rng.choice(("start", "start", "start", "cut", "rot", "load", "mark"))
        if not self.known.line():
            return self.rng.choice(("save", "save", "crash", "end"))
        return self.rng.choices(list(OFTEN), list(OFTEN.values()))[0]

    # Steps

    def _start(self) -> None:
        self.run, self.doubtful = Run(self.disk, self.record, keep_last=self.keep), None
        candidates = self.known.candidates()
        good = next((key for key in candidates if key not in self.known.rotten), None)
        bad = candidates if good is None else candidates[: candidates.index(good)]
        try:
            self.run.resume()
        except NoProvableEpochError:
            if good is not None:
                raise
        self.known.quarantined.update(bad)
        if good is None and candidates:
            self._branch(None)
        elif good is not None and open_log(self.disk).current.id != self.known.branch:
            if self.known.line()[-1] == good:
                raise Unlike("a branch was begun where nothing was passed over")
            self._begun(good)

    def _save(self) -> None:
        self._save_at(Position(self._newest_epoch() + 1))

    def _half(self) -> None:
        newest = self.known.line()[-1].position
        self._save_at(Position(newest.epoch, newest.step + self.rng.randrange(1, 9)))

    def _save_at(self, position: Position) -> None:
        change_all = self.rng.random() < 0.3
        self._run.save(position.epoch, step=position.step, change_all=change_all)
        self._saved(Key(self.known.branch, position), open_log(self.disk))

    def _crash(self) -> None:
        """The process or the power ends in the middle of a save."""
        left = self.rng.randrange(34)

        def count(verb: str, path: str) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise CrashError(verb, path)

        self.disk.observe = count
        position = Position(self._newest_epoch() + 1)
        with suppress(CrashError):
            self._run.save(position.epoch, change_all=self.rng.random() < 0.3)
        self.disk.observe = None
        self._gone(power=self.rng.random() < 0.6)
        self.doubtful = deepcopy(self.known), Key(self.known.branch, position)
        self._saved(Key(self.known.branch, position), open_log(self.disk), certain=left >= 0)

    def _kill(self) -> None:
        self._gone(power=False)

    def _cut(self) -> None:
        self._gone(power=True)
        if self.doubtful is not None:
            self.known, key = deepcopy(self.doubtful[0]), self.doubtful[1]
            self._saved(key, open_log(self.disk), certain=False)

    def _end(self) -> None:
        self._run.close()
        self.run = None

    def _rival(self) -> None:
        """Another job takes over beside us; our next save must not be acknowledged."""
        with patch.object(writer, "_LIVE", weakref.WeakValueDictionary()):
            LogWriter.take(self.disk, "job", ME_TOO, patience_secs=0.0).close()
        try:
            self._run.save(self._newest_epoch() + 1)
        except FencedError:
            self._gone(power=False)
            return
        raise Unlike("a fenced writer has saved")

    def _load(self) -> None:
        """Prove any live epoch in full and compare its content."""
        view = open_log(self.disk)
        if not view.entries:
            return
        entry = self.rng.choice(view.entries)
        number = self.known.numbers[entry.key]
        alone = Record(contents={number: self.record.contents[number]})
        wrong = proved(self.disk, entry, alone)
        if bool(wrong) != (entry.key in self.known.rotten) and not self._spoilt(entry):
            raise Unlike(f"epoch {entry.key} is {wrong or 'whole'}")

    def _spoilt(self, entry: CommittedPosition) -> bool:
        """Full proofs also read what lies beside the referenced bytes."""
        return bool(self.known.spoilt & set(entry.tries))

    def _rot(self) -> None:
        """A byte of the newest or any other epoch changes, in a shard or in the manifest."""
        view = open_log(self.disk)
        if not view.entries or self.doubtful is not None:
            return
        entry = self.rng.choice((view.entries[-1], self.rng.choice(view.entries)))
        shard = f"data/{entry.attempt_name}/a.{entry.position}.main.safetensors"
        path = self.rng.choice((shard, f"data/{entry.attempt_name}/manifest.json"))
        if entry.key in self.known.rotten or self._spoilt(entry) or path not in self.disk.seen:
            return
        self.disk.rot(path)
        self.known.rotten.add(entry.key)
        if path == shard and self.disk.stat(path) > 60_000:  # it holds the large tensor
            self.known.spoilt.add(entry.attempt_name)
            self.known.rotten.update(one.key for one in view.entries if entry.attempt_name in one.needs)

    def _mark(self) -> None:
        """Tag, pin, and take either away, as the writer or as a guest."""
        keys = sorted(self.known.numbers)
        kind, name = self.rng.choice(("tag", "pin")), self.rng.choice("xyz")
        key = self.rng.choice(keys) if keys and self.rng.random() < 0.5 else None
        if not keys:
            return
        if kind == "tag":
            draft = tag_draft(name, key)
        else:
            draft = unpin_draft(name) if key is None else pin_draft(name, key)
        append_as_guest(self.disk, draft, "job")
        self.doubtful = None
        self.known.marks.pop((kind, name), None)
        if key is not None:
            self.known.marks[kind, name] = key

    def _rewind(self) -> None:
        """Load an epoch of the line and begin a branch there."""
        line = [key for key in self.known.candidates() if key.position.boundary]
        good = [key for key in line if key not in self.known.rotten]
        if not good:
            return
        key, engine, session = self.rng.choice(good), self._run.engine, self._run.session
        target = engine.ledger.verify_epoch(session.peers, key.position.epoch)
        self._run.fill(0, 0)
        engine.load(session, target)
        self.record.frozen = int(session.workspace("a")["frozen"][0])
        engine.ledger.rewind(session.peers, key.position, {"epoch": key.position.epoch})
        self._begun(key)

    def _anew(self) -> None:
        self._branch(None)

    def _keep(self) -> None:
        self.keep = self.rng.choice((None, 1, 2, 3))
        engine = self._run.engine
        engine.retaining = Retaining(engine.ledger, Keeping(self.keep))

    # The dictionary

    @property
    def _run(self) -> Run:
        if self.run is None:
            raise Unlike("no job runs")
        return self.run

    def _newest_epoch(self) -> int:
        line = self.known.line()
        return line[-1].position.epoch if line else -1

    def _branch(self, base: Position | None) -> None:
        self._run.engine.ledger.rewind(self._run.session.peers, base, {"fresh": True})
        self._begun(None)

    def _begun(self, base: Key | None) -> None:
        branch = open_log(self.disk).current.id
        self.known.parents[branch] = None if base is None else (base.branch, base.position)
        self.known.branch = branch

    def _gone(self, *, power: bool) -> None:
        if self.run is not None and self.run.engine.ledger.writer is not None:
            self.run.engine.ledger.writer.close()
        self.run = None
        now = self.disk.snapshot()
        if power:
            self.disk = WeakDisk.of(self.rng.choice(list(now.cuts(4, self.rng.randrange(1 << 30)))))
        else:
            self.disk = WeakDisk.at(now)

    def _saved(self, key: Key, view: LogView, *, certain: bool = True) -> None:
        """Take a save, and the retention after it, into the dictionary."""
        live = {one.key: one for one in view.entries}
        if key in live:
            self.known.numbers[key] = self.record.number
            if self.known.spoilt & set(live[key].needs):
                self.known.rotten.add(key)
            if key.position.boundary:
                self._completed(key)
        elif certain:
            raise Unlike(f"epoch {key} was acknowledged and is not there")
        missing = self.known.numbers.keys() - live.keys()
        if taken := missing & self.known.must_stay(self.keep):
            raise Unlike(f"retention took {taken}")
        self._forget(missing)

    def _completed(self, key: Key) -> None:
        """The positions in the middle that a whole epoch completes go, unless they are marked."""
        marked = set(self.known.marks.values())
        over = {
            one for one in self.known.numbers if not one.position.boundary and one.position < key.position
        }
        self._forget(over - marked)

    def _forget(self, keys: set[Key]) -> None:
        for key in keys:
            del self.known.numbers[key]
        self.known.quarantined -= keys
        self.known.rotten -= keys

    def _compare(self) -> None:
        view = open_log(self.disk)
        if {one.key for one in view.entries} != self.known.numbers.keys():
            there = [str(one.key) for one in view.entries]
            raise Unlike(f"the log has {there}, not {[str(key) for key in sorted(self.known.numbers)]}")
        if {one.key for one in view.entries if not one.healthy} != self.known.quarantined:
            raise Unlike(f"quarantined should be {self.known.quarantined}")
        marks = {(one.kind, one.name): one.target for one in view.state.marks}
        if marks != self.known.marks:
            raise Unlike(f"marks are {marks}, not {self.known.marks}")
        if view.entries and view.current.id != self.known.branch:
            raise Unlike(f"the branch is {view.current.id}, not {self.known.branch}")
        newest = view.newest()
        expected = self.known.candidates()[:1]
        if view.notices or (newest.key if newest else None) != (expected[0] if expected else None):
            raise Unlike(f"the newest is {newest and newest.key}, not {expected}; {view.notices}")
        if missing := {name for name in view.state.tries if not self.disk.list(f"data/{name}")}:
            raise Unlike(f"{missing} are needed and gone")


def walk(steps: int, seed: int) -> Counter[str]:
    """Walk so many steps through worlds of some hundred each; returns how often each was taken."""
    taken: Counter[str] = Counter()
    for first in range(0, steps, STEPS_OF_A_WORLD):
        world = Walk(seed + first // STEPS_OF_A_WORLD)
        world.walk(min(STEPS_OF_A_WORLD, steps - first))
        taken.update(world.taken)
    return taken
