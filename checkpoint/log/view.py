"""Query a log: its tail, its branches, its state before a run, and the epoch that a reader requests.

A branch shares its parent's entries up to its base. The parent's entries beyond it are *abandoned*: they can
be found by their branch, and are never chosen.

Slots are filled one after another from 0; below the newest 256 only multiples of 256 remain. So all existing
multiples of 256 are contiguous up to the tail, and no slot is missing from the last of them on.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import cached_property
from typing import Any

from torchrelay.checkpoint.format.names import nearest
from torchrelay.checkpoint.format.position import Branch, CommittedPosition, Facts, Key, Position, State
from torchrelay.errors import UnknownEpochError, UsageError
from torchrelay.records import Json, dataclass


def branch_of(state: State, branch: int) -> Branch | None:
    """The branch of this id, if the log still has it."""
    return next((one for one in state.branches if one.id == branch), None)


def lineage_of(state: State, branch: int) -> Iterator[tuple[Branch, Position | None]]:
    """A branch and its ancestors, each with the last position visible in it (None: all)."""
    limit: Position | None = None
    known = branch_of(state, branch)
    while known is not None:
        yield known, limit
        if known.parent is None or known.base is None:
            return
        limit = known.base if limit is None else min(limit, known.base)
        known = branch_of(state, known.parent)


def line_of(state: State, branch: int) -> tuple[CommittedPosition, ...]:
    """Entries that are visible from a branch, oldest position first."""
    seen: dict[Position, CommittedPosition] = {}
    for one, limit in lineage_of(state, branch):
        for entry in state.entries:
            if entry.branch == one.id and (limit is None or entry.position <= limit):
                seen.setdefault(entry.position, entry)
    return tuple(seen[position] for position in sorted(seen))


def newest_of(state: State) -> CommittedPosition | None:
    """The newest entry of the current branch that a job may resume from."""
    usable = [entry for entry in line_of(state, state.current) if entry.healthy and entry.resumable]
    return usable[-1] if usable else None


@dataclass(frozen=True)
class LogView:
    """The log as it was read, or after the writer's last append.

    `slot` is the record of the state, -1 without any. `notices` are for display: damaged records,
    replacements, a broken chain. `derived` are those about files that can be written again from the log.
    """

    state: State = field(default_factory=State)
    slot: int = -1
    generation: int = -1
    job_name: str | None = None
    job_uuid: str | None = None
    notices: tuple[str, ...] = ()
    derived: tuple[str, ...] = ()

    @property
    def certain(self) -> bool:
        """Whether no damage hides a part of the log; otherwise no file counts as an orphan."""
        return set(self.notices) <= set(self.derived)

    @property
    def empty(self) -> bool:
        """Whether no entry is live."""
        return not self.state.entries

    @property
    def entries(self) -> tuple[CommittedPosition, ...]:
        """All live entries, of all branches, sorted by (branch, position)."""
        return self.state.entries

    @property
    def current(self) -> Branch:
        """The branch that the next commit belongs to."""
        branch = branch_of(self.state, self.state.current)
        return branch if branch is not None else Branch(self.state.current)

    @property
    def branches(self) -> tuple[Branch, ...]:
        """Branches that have entries, and the current one."""
        return self.state.branches

    @property
    def begun_by(self) -> Mapping[str, Json] | None:
        """The request that began the current branch; None for the first branch."""
        return self.current.request

    def line(self, branch: int | None = None) -> tuple[CommittedPosition, ...]:
        """Entries visible from a branch (default: the current one), oldest first, damaged ones too."""
        return self._line if branch is None else line_of(self.state, branch)

    @cached_property  # because callers ask for it once per entry
    def _line(self) -> tuple[CommittedPosition, ...]:
        return line_of(self.state, self.state.current)

    @cached_property
    def _usable(self) -> tuple[CommittedPosition, ...]:
        return tuple(entry for entry in reversed(self._line) if entry.healthy and entry.resumable)

    def newest(self, *, boundary: bool = False) -> CommittedPosition | None:
        """The newest healthy, resumable entry of the current branch; `boundary`: whole epochs only."""
        return next(iter(self.candidates(boundary=boundary)), None)

    def candidates(self, *, boundary: bool = False) -> tuple[CommittedPosition, ...]:
        """Healthy, resumable entries of the current branch, newest first."""
        return tuple(entry for entry in self._usable if entry.position.boundary or not boundary)

    def find(self, epoch: int, branch: int | None = None, *, step: int = 0) -> CommittedPosition | None:
        """The entry of a position as seen from a branch, resolved through its parents up to their bases.

        The default is the current branch. The entry may be damaged or not resumable, which the caller must
        check. None if it is not live, or the branch is unknown.
        """
        wanted = Position(epoch, step)
        return next((entry for entry in self.line(branch) if entry.position == wanted), None)

    def entry(self, key: Key) -> CommittedPosition | None:
        """The live entry with exactly this branch and position."""
        return next((entry for entry in self.entries if entry.key == key), None)

    def abandoned(self) -> tuple[CommittedPosition, ...]:
        """Live entries that are not visible from the current branch."""
        seen = {entry.key for entry in self.line()}
        return tuple(entry for entry in self.entries if entry.key not in seen)

    def epochs(self, branch: int | None = None) -> tuple[int, ...]:
        """Whole epochs visible from a branch (default: the current one), ascending, damaged ones too."""
        return tuple(entry.position.epoch for entry in self.line(branch) if entry.position.boundary)

    def tagged(self, name: str) -> CommittedPosition | None:
        """The entry with this tag."""
        mark = next((one for one in self.state.marks if one.kind == "tag" and one.name == name), None)
        return None if mark is None else self.entry(mark.target)


STRIDE = 256
"""How many of the newest slots are kept, and which older ones (its multiples)."""
_PROBE = 3
"""Slots checked beyond the first missing one, to distinguish an end from a hole."""

Exists = Callable[[int], bool]


def find_tail(exists: Exists, hint: int | None = None) -> int | None:
    """The newest slot, None for an empty log.

    `hint` is an unverified guess: it saves requests when it is right and costs two when it is wrong.
    """
    if hint is not None and exists(hint) and not exists(floor(hint) + STRIDE):
        return _walk(exists, hint)
    if not exists(0):
        first = _beyond_hole(exists, 0)
        return None if first is None else _walk(exists, first)
    high = 1
    while exists(high * STRIDE):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if exists(middle * STRIDE) else (low, middle)
    return _walk(exists, low * STRIDE)


def floor(slot: int) -> int:
    """The last multiple of 256 at or below a slot."""
    return slot - slot % STRIDE


def chain_end(slot: int) -> int:
    """The last slot to which the predecessors of `slot` are checked: the last multiple of 256 below it."""
    return floor(slot - 1) if slot else 0


def _walk(exists: Exists, slot: int) -> int:
    """Walk from a slot to the end. A hole is skipped and reported: newer records have the whole state."""
    while True:
        while exists(slot + 1):
            slot += 1
        beyond = _beyond_hole(exists, slot + 1)
        if beyond is None:
            return slot
        slot = beyond


def _beyond_hole(exists: Exists, missing: int) -> int | None:
    """The next slot after a lost one; the slot itself if another writer has filled it meanwhile."""
    for beyond in range(missing + 1, missing + 1 + _PROBE):
        if exists(beyond):
            return missing if exists(missing) else beyond
    return missing if exists(missing) else None


_TEXT = re.compile(r"(?:epoch=)?(0|[1-9][0-9]{0,7})(?:,branch=(0|[1-9][0-9]{0,8}))?")
_WITH_STEP = re.compile(r"[0-9]+\+[0-9]+.*")
WORDS = ("last", "best")
"""Keywords for an epoch instead of its number; `load.open.candidates` resolves them."""
_FORMS = 'a number from 0 on, "last", "best", "tag=NAME", or "7,branch=0"'
_TAG = "tag="
_RANGES = 6  # limit of ranges in a message; of more only those nearby


@dataclass(frozen=True)
class EpochQuery:
    """An epoch by number or by tag, or `last`, or `best`; on a branch, or on the current one."""

    epoch: int | None
    word: str = ""
    branch: int | None = None
    tag: str | None = None

    @property
    def explicit(self) -> bool:
        """Whether a specific epoch is requested, which is then never replaced by another."""
        return self.epoch is not None or self.tag is not None


def wanted(epoch: Any, branch: int | None = None) -> EpochQuery:
    """Parse a user's epoch; raises UsageError unless it is a whole epoch."""
    if branch is not None and (isinstance(branch, bool) or not isinstance(branch, int) or branch < 0):
        raise UsageError(f"invalid branch={branch!r}: branches are numbered from 0")
    if isinstance(epoch, str):
        return _from_text(epoch.strip(), branch)
    try:
        number = operator.index(epoch)
    except TypeError:
        raise UsageError(f"invalid epoch={epoch!r}: expected {_FORMS}") from None
    if isinstance(epoch, bool) or number < 0:
        raise UsageError(f"invalid epoch={epoch!r}: expected {_FORMS}")
    return EpochQuery(number, "", branch)


def _from_text(text: str, branch: int | None) -> EpochQuery:
    if text in WORDS:
        return EpochQuery(None, text, branch)
    if text.startswith(_TAG) and text != _TAG:
        if branch is not None:
            raise UsageError(f"epoch={text!r} and branch={branch}: a tag names one epoch; drop the branch")
        return EpochQuery(None, "", None, text.removeprefix(_TAG))
    if _WITH_STEP.fullmatch(text):
        raise UsageError(
            f"{text!r} is a position inside an epoch, which only automatic resume uses: give a whole epoch"
        )
    match = _TEXT.fullmatch(text)
    if match is None:
        raise UsageError(f"invalid epoch={text!r}: expected {_FORMS}")
    if match[2] is not None and branch not in (None, int(match[2])):
        raise UsageError(f"epoch={text!r} and branch={branch} contradict each other: give one of them")
    return EpochQuery(int(match[1]), "", branch if match[2] is None else int(match[2]))


def whole_epochs(view: LogView, branch: int | None) -> list[CommittedPosition]:
    """Whole epochs visible from a branch, newest first; raises UsageError for an unknown branch."""
    known = [one.id for one in view.branches]
    if branch is not None and branch not in known:
        raise UsageError(f"no branch {branch}; the branches are: {', '.join(map(str, known))}")
    return [entry for entry in reversed(view.line(branch)) if entry.position.boundary]


def named_entry(view: LogView, wish: EpochQuery, place: str) -> CommittedPosition:
    """The entry of an explicit epoch or tag; raises UnknownEpochError listing what exists at `place`."""
    if wish.tag is not None:
        if (tagged := view.tagged(wish.tag)) is not None:
            return tagged
        known = [mark.name for mark in view.state.marks if mark.kind == "tag"]
        raise UnknownEpochError(f"no tag {wish.tag!r} in {place}{nearest(wish.tag, known)}")
    line = whole_epochs(view, wish.branch)
    found = next((entry for entry in line if entry.position.epoch == wish.epoch), None)
    if found is not None:
        return found
    of_branch = "" if wish.branch is None else f" of branch {wish.branch}"
    parts = [f"there are epochs {_nearby(line, wish.epoch)}"] if line else []
    seen = {entry.key for entry in line}
    others: dict[int, list[CommittedPosition]] = {}
    for entry in view.entries:
        if entry.key not in seen and entry.position.boundary:
            others.setdefault(entry.branch, []).append(entry)
    for branch, entries in sorted(others.items()):
        first = entries[0].position.epoch
        parts.append(
            f"on branch {branch} also {_nearby(entries, wish.epoch)} (write {first},branch={branch})"
        )
    there_is = "; ".join(parts) or "nothing is committed yet"
    raise UnknownEpochError(f"no epoch {wish.epoch}{of_branch} in {place}: {there_is}")


def best_first(
    line: Sequence[CommittedPosition], metrics: Mapping[str, float], mode: str
) -> list[CommittedPosition]:
    """Entries with a finite value of a metric, best first; the earlier one wins a tie."""
    sign = -1.0 if mode == "max" else 1.0
    scored = [entry for entry in line if math.isfinite(metrics.get(entry.attempt_name, math.nan))]
    return sorted(scored, key=lambda entry: (sign * metrics[entry.attempt_name], entry.position))


def _nearby(entries: Sequence[CommittedPosition], wish: int | None) -> str:
    """Which epochs exist; of many ranges those next to the requested one."""
    epochs = sorted(entry.position.epoch for entry in entries)
    all_of_them = ranges(epochs)
    if wish is None or all_of_them.count(",") < _RANGES:
        return all_of_them
    close = [*[one for one in epochs if one < wish][-1:], *[one for one in epochs if one > wish][:1]]
    some = " and ".join(map(str, close))
    return f"{epochs[0]} to {epochs[-1]} with gaps ({len(epochs)}), next to {wish} there is {some}"


def ranges(numbers: Sequence[int]) -> str:
    """`0 to 4, 6` for messages."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in runs)


@dataclass(frozen=True)
class Look:
    """State of a log before a run starts.

    `epoch`, `step` and `facts` are of the newest entry of the current branch, not verified yet; `whole` is
    its newest whole epoch; `request` is the request that began that branch. `rest`: a part is still to be
    uploaded. `notices` are for display.
    """

    commits: bool = False
    branch: int = 0
    request: Mapping[str, Any] | None = None
    epoch: int | None = None
    step: int = 0
    whole: int | None = None
    facts: Facts | None = None
    rest: bool = False
    notices: tuple[str, ...] = ()

    @property
    def rewound(self) -> bool:
        """Whether the newest entry is the one at which the user began the current branch."""
        asked = self.request or {}
        return bool(asked.get("by") == "user" and asked.get("epoch") == self.epoch and self.step == 0)

    @property
    def position(self) -> Position | None:
        """Position of the newest entry."""
        return None if self.epoch is None else Position(self.epoch, self.step)


@dataclass(frozen=True)
class LeaseInfo:
    """What every process knows of the log that rank 0 holds."""

    job: str
    uuid: str
    branch: int
    generation: int


def needed_by(view: LogView, kept: set[str]) -> set[str]:
    """The kept attempts and all attempts that their entries reference, recursively."""
    entries = {entry.attempt_name: entry for entry in view.entries}
    needed, pending = set(kept), list(kept)
    while pending:
        entry = entries.get(pending.pop())
        further = set(entry.needs) - needed if entry else set()
        needed |= further
        pending.extend(further)
    return needed
