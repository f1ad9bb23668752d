"""Record this process's loops over `ctx.steps`, and compare them to find ranks that diverged.

All ranks of a task run the same loops and leave each at the same step. If a rank breaks out of a loop alone,
or runs a loop that others do not, the others would wait for it forever. So a rank that waits, has failed, or
has left a loop early publishes a `note` of its loops, and waiting ranks compare notes. A note is final: batch
counts only grow, and a loop that was left is not entered again.

A rank may leave in the same batch in which another one waits for it in a collective. Counting collectives,
after the other has stood still for seconds, distinguishes this from a rank that is merely faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torchrelay.records import dataclass

ALL = "all"
REMEDY = (
    "all ranks of a task must run the same loops and leave them at the same step: agree on a break with "
    "torch.distributed.all_reduce, or move a loop of one rank to its own task (@job.epoch(on='rank0'))"
)

Note = Mapping[str, Any]
"""JSON: run, over, failed, collectives, still; loops as [batches, state, loader] by the ranks that agree.

`asks` is the newest call in which all ranks wait for each other: count, name, positions in open loops.
"""

OPEN, ENDED, LEFT = "open", "ended", "left"
"""A running loop; one that all ranks ended together; one that this rank left early."""
STILL_SECS = 10.0


@dataclass
class LoopRecord:
    """One loop: its number among those of the same ranks, its loader, batches begun, and state."""

    number: int
    what: str
    taken: int = 0
    state: str = OPEN


class Loops:
    """The loops of one session. `show` publishes a note of them for other ranks.

    `collectives()` counts those that this process has started in the default group.
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
        """Start new counts for a group that runs on all ranks; restore the old ones afterwards."""
        outer = self._made, self._over, self._failed, self._asks
        self._run += 1
        self._made, self._over, self._failed, self._asks = {}, False, False, (0, "", [])
        try:
            yield
        finally:
            self._made, self._over, self._failed, self._asks = outer

    @contextmanager
    def of_tasks(self) -> Iterator[None]:
        """Mark the end of this process's tasks of the group: it runs no loop afterwards."""
        try:
            yield
        except BaseException:
            self._over = self._failed = True
            self.show()
            raise
        self._over = True

    def ask(self, what: str) -> None:
        """Record that all ranks are about to wait for each other, at their current batches."""
        within = [(one.number, one.taken) for one in self._made.get(ALL, ()) if one.state == OPEN]
        self._asks = self._asks[0] + 1, what, within

    def enter(self, among: str, what: str) -> LoopRecord:
        """Begin a loop that the ranks `among` run together."""
        made = self._made.setdefault(among, [])
        made.append(LoopRecord(len(made), what))
        self._moved = time.monotonic()
        return made[-1]

    def begin(self, made: LoopRecord) -> None:
        """Begin the next batch of a loop."""
        made.taken += 1
        self._moved = time.monotonic()

    def leave(self, made: LoopRecord, *, early: bool) -> None:
        """End a loop: for all ranks, or `early`, before they have agreed on that."""
        made.state = LEFT if early else ENDED
        if early:
            self.show()

    def still_for(self, secs: float) -> bool:
        """Return True if a loop is open and nothing began for `secs`."""
        is_open = any(made.state == OPEN for some in list(self._made.values()) for made in some)
        return is_open and time.monotonic() - self._moved > secs

    def note(self, *, over: bool = False) -> Note:
        """Return the note for other ranks; `over` after all loops of the group."""
        made = list(self._made.items())
        return {
            "run": self._run,
            "over": over or self._over,
            "failed": self._failed,
            "collectives": self.collectives(),
            "still": self.still_for(STILL_SECS),
            "asks": self._asks,
            "made": {ranks: [[one.taken, one.state, one.what] for one in list(some)] for ranks, some in made},
        }


def contradiction(rank: int, note: Note, other: int, others: Note) -> str | None:
    """Describe why the loops of two ranks contradict each other; None if one may only be slower."""
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
    """Describe the first contradiction among all ranks after their tasks are over."""
    for among in {among: None for note in notes for among in note["made"]}:
        ranks = range(len(notes)) if among == ALL else [int(rank) for rank in among.split(",")]
        for rank in ranks:
            if notes[rank]["made"] == notes[ranks[0]]["made"]:
                continue
            if (found := contradiction(ranks[0], notes[ranks[0]], rank, notes[rank])) is not None:
                return found
    return None


def _asks_alone(rank: int, note: Note, other: int, others: Note) -> str | None:
    """Describe a call that `rank` made in a batch which `other` has passed without it."""
    count, what, within = note["asks"]
    theirs = others["made"].get(ALL, [])
    for number, taken in within if others["asks"][0] < count else ():
        if number < len(theirs) and theirs[number][0] > taken:
            return (
                f"rank {rank} called {what} in batch {taken} of a loop, rank {other} did not and is in batch "
                f"{theirs[number][0]}: all ranks must call it together"
            )
    return None


def _left_alone(rank: int, note: Note, other: int, others: Note, among: str) -> str | None:
    """Describe a loop of `rank` that `other` has left earlier, or will never run."""
    theirs = others["made"].get(among, [])
    for number, (taken, _, what) in enumerate(note["made"].get(among, [])):
        where = f"loop {number + 1} of ctx.steps in this group (over a {what})"
        if number >= len(theirs):
            return f"rank {rank} runs {where}, rank {other} does not" if others["over"] else None
        before, state, _ = theirs[number]
        waits = note["still"] and state == LEFT and note["collectives"] > others["collectives"]
        if (others["over"] or state != OPEN) and (taken > before or (taken == before and waits)):
            return f"rank {other} left {where} in batch {before}, rank {rank} is in batch {taken}"
    return None
