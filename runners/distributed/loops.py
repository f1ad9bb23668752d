"""Which loops over `ctx.steps` a process makes in the running group: what ranks compare to find one astray.

All ranks of a task make the same loops, and leave each at the same step. A rank that breaks out of a loop
alone, or makes one that others do not, would have them wait for it. So whoever waits, has failed, or has left
a loop before its end shows a `note` of its loops to the others, and who gets no further looks for a
contradiction. A note is final: batches only grow, and a loop that was left is not entered again.

A rank that leaves in the very batch in which another one waits for it in a collective of the program is told
from one that is merely faster by counting collectives, once the other has stood still for seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torchrelay.records import dataclass

ALL = "all"
REMEDY = (
    "all ranks of a task make the same loops and leave them at the same step: decide a break together "
    "(torch.distributed.all_reduce), and give a loop of one rank a task of its own (@job.epoch(on='rank0'))"
)

Note = Mapping[str, Any]
"""JSON: run, over, failed, collectives, still; by the ranks that agree, loops as [batches, state, loader].

`asks` is the newest question of all ranks to each other: how many there were, which, in which open loops.
"""

OPEN, ENDED, LEFT = "open", "ended", "left"
"""A loop that goes on, that all have ended together, that this rank has left before."""
STILL_SECS = 10.0


@dataclass
class LoopRecord:
    """One loop: its number among those of the same ranks, its loader, the batches begun, how it stands."""

    number: int
    what: str
    taken: int = 0
    state: str = OPEN


class Loops:
    """Mutable; one per session. `show` puts a note of them where the others look.

    `collectives()` counts those that this process has begun in the group of all ranks.
    """

    def __init__(self) -> None:
        self.show: Callable[[], None] = lambda: None
        self.collectives: Callable[[], int] = lambda: 0
        self._run = 0
        self._over = self._failed = False
        self._made: dict[str, list[LoopRecord]] = {}
        self._asks: tuple[int, str, list[tuple[int, int]]] = (0, "", [])
        self._moved = time.monotonic()

    @contextmanager
    def of_group(self) -> Iterator[None]:
        """A group runs on all ranks: they begin to count anew, and after it go on as before."""
        outer = self._made, self._over, self._failed, self._asks
        self._run += 1
        self._made, self._over, self._failed, self._asks = {}, False, False, (0, "", [])
        try:
            yield
        finally:
            self._made, self._over, self._failed, self._asks = outer

    @contextmanager
    def of_tasks(self) -> Iterator[None]:
        """The process runs its tasks of the group, and makes no loop after them."""
        try:
            yield
        except BaseException:
            self._over = self._failed = True
            self.show()
            raise
        self._over = True

    def ask(self, what: str) -> None:
        """All ranks are about to wait for each other, in the batches that they are in now."""
        within = [(one.number, one.taken) for one in self._made.get(ALL, ()) if one.state == OPEN]
        self._asks = self._asks[0] + 1, what, within

    def enter(self, among: str, what: str) -> LoopRecord:
        """A loop begins that the ranks `among` make together."""
        made = self._made.setdefault(among, [])
        made.append(LoopRecord(len(made), what))
        self._moved = time.monotonic()
        return made[-1]

    def begin(self, made: LoopRecord) -> None:
        """The next batch of a loop begins."""
        made.taken += 1
        self._moved = time.monotonic()

    def leave(self, made: LoopRecord, *, early: bool) -> None:
        """A loop is over here: for all ranks, or `early`, before they have agreed on that."""
        made.state = LEFT if early else ENDED
        if early:
            self.show()

    def still_for(self, secs: float) -> bool:
        """Whether a loop is open that has begun nothing for so long."""
        is_open = any(made.state == OPEN for some in list(self._made.values()) for made in some)
        return is_open and time.monotonic() - self._moved > secs

    def note(self, *, over: bool = False) -> Note:
        """What the others may see; `over` where all loops of the group are made."""
        made = {
            among: [[one.taken, one.state, one.what] for one in list(some)]
            for among, some in list(self._made.items())
        }
        return {
            "run": self._run,
            "over": over or self._over,
            "failed": self._failed,
            "collectives": self.collectives(),
            "still": self.still_for(STILL_SECS),
            "asks": self._asks,
            "made": made,
        }


def contradiction(rank: int, note: Note, other: int, others: Note) -> str | None:
    """Why two ranks cannot both be right, in words; None where one may only be slower."""
    if note["run"] != others["run"]:
        return None
    alone = _asks_alone(rank, note, other, others) or _asks_alone(other, others, rank, note)
    if alone is not None:
        return alone
    for among in {**note["made"], **others["made"]}:
        if among != ALL and not {str(rank), str(other)} <= set(among.split(",")):
            continue
        found = _left_alone(rank, note, other, others, among) or _left_alone(other, others, rank, note, among)
        if found is not None:
            return f"{found}: {REMEDY}"
    return None


def first_contradiction(notes: Sequence[Note]) -> str | None:
    """The same of all ranks, in rank order, when their tasks are over."""
    for among in {among: None for note in notes for among in note["made"]}:
        ranks = range(len(notes)) if among == ALL else [int(rank) for rank in among.split(",")]
        for rank in ranks:
            if notes[rank]["made"] == notes[ranks[0]]["made"]:
                continue
            if (found := contradiction(ranks[0], notes[ranks[0]], rank, notes[rank])) is not None:
                return found
    return None


def _asks_alone(rank: int, note: Note, other: int, others: Note) -> str | None:
    """How `rank` asks what `other` has passed without asking."""
    count, what, within = note["asks"]
    theirs = others["made"].get(ALL, [])
    for number, taken in within if others["asks"][0] < count else ():
        if number < len(theirs) and theirs[number][0] > taken:
            return (
                f"rank {rank} called {what} in batch {taken} of a loop, rank {other} did not and is in batch "
                f"{theirs[number][0]}: all ranks call it together"
            )
    return None


def _left_alone(rank: int, note: Note, other: int, others: Note, among: str) -> str | None:
    """How `rank` is in a loop that `other` has left before, or will never make."""
    theirs = others["made"].get(among, [])
    for number, (taken, _, what) in enumerate(note["made"].get(among, [])):
        where = f"loop {number + 1} of ctx.steps in this group (over a {what})"
        if number >= len(theirs):
            return f"rank {rank} makes {where}, rank {other} does not" if others["over"] else None
        before, state, _ = theirs[number]
        waits = note["still"] and state == LEFT and note["collectives"] > others["collectives"]
        if (others["over"] or state != OPEN) and (taken > before or (taken == before and waits)):
            return f"rank {other} left {where} in batch {before}, rank {rank} is in batch {taken}"
    return None
