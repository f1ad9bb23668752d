"""What a log means: which epochs there are, on which branch, and which one is newest. Pure.

A branch shares its parent's entries up to its base; what the parent has beyond is *abandoned*:
findable by its branch, never chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from functools import cached_property
from typing import Any

from torchrelay.checkpoint.format.log_state import Branch, Entry, Key, Mark, Retirement, State
from torchrelay.checkpoint.format.manifest.position import Position
from torchrelay.records import dataclass

Json = Any


def branch_of(state: State, branch: int) -> Branch | None:
    """The branch of this id, where the log still knows it."""
    return next((one for one in state.branches if one.id == branch), None)


def lineage_of(state: State, branch: int) -> Iterator[tuple[Branch, Position | None]]:
    """A branch and its ancestors, each with the last position that is seen in it (None: all).

    The limit of an ancestor is the smallest base on the way to it.
    """
    limit: Position | None = None
    known = branch_of(state, branch)
    while known is not None:
        yield known, limit
        if known.parent is None or known.base is None:
            return
        limit = known.base if limit is None else min(limit, known.base)
        known = branch_of(state, known.parent)


def line_of(state: State, branch: int) -> tuple[Entry, ...]:
    """The entries that are seen from a branch, oldest position first."""
    seen: dict[Position, Entry] = {}
    for one, limit in lineage_of(state, branch):
        for entry in state.entries:
            if entry.branch == one.id and (limit is None or entry.position <= limit):
                seen.setdefault(entry.position, entry)
    return tuple(seen[position] for position in sorted(seen))


def newest_of(state: State) -> Entry | None:
    """The newest entry of the current branch that a job may resume from."""
    usable = [entry for entry in line_of(state, state.current) if entry.healthy and entry.resumable]
    return usable[-1] if usable else None


@dataclass(frozen=True)
class LogView:
    """The log as it was when it was read, or after the writer's own last append.

    `slot` is the record that tells it, -1 when there is none yet. `notices` are things that people
    should see: damaged records, what was used instead, a broken chain. `derived` are those of them about
    files that the log itself tells, and writes again.
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
        """Whether no damage hides a part of the log; otherwise nothing may be called an orphan."""
        return set(self.notices) <= set(self.derived)

    @property
    def empty(self) -> bool:
        """Whether nothing was ever committed that is still live."""
        return not self.state.entries

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All live entries, of all branches, sorted by (branch, position)."""
        return self.state.entries

    @property
    def current(self) -> Branch:
        """The branch that the next commit belongs to."""
        branch = branch_of(self.state, self.state.current)
        return branch if branch is not None else Branch(self.state.current)

    @property
    def branches(self) -> tuple[Branch, ...]:
        """The branches that entries or the current branch stand on."""
        return self.state.branches

    @property
    def retiring(self) -> tuple[Retirement, ...]:
        """What was retired and may not be deleted completely yet."""
        return self.state.retiring

    @property
    def holder(self) -> Mapping[str, Json]:
        """Identity of the newest writer; see `released`."""
        return self.state.holder

    @property
    def released(self) -> bool:
        """Whether the newest writer has said that it is done (True for an empty log)."""
        return self.state.released

    @property
    def begun_by(self) -> Mapping[str, Json] | None:
        """The request that began the current branch; None for the first branch."""
        return self.current.request

    def line(self, branch: int | None = None) -> tuple[Entry, ...]:
        """The entries seen from a branch (by default the current one), oldest first, damaged ones too."""
        return self._line if branch is None else line_of(self.state, branch)

    @cached_property
    def _line(self) -> tuple[Entry, ...]:
        """A view never changes, and who decides about each of its entries asks for this again and again."""
        return line_of(self.state, self.state.current)

    @cached_property
    def _usable(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in reversed(self._line) if entry.healthy and entry.resumable)

    def newest(self, *, boundary: bool = False) -> Entry | None:
        """The newest healthy, resumable entry of the current branch; `boundary`: whole epochs only.

        This is the entry that automatic resume tries to prove first; `candidates` are the next ones.
        """
        return next((entry for entry in self._usable if entry.position.boundary or not boundary), None)

    def candidates(self, *, boundary: bool = False) -> tuple[Entry, ...]:
        """Healthy, resumable entries of the current branch, newest first."""
        return tuple(entry for entry in self._usable if entry.position.boundary or not boundary)

    def find(self, epoch: int, branch: int | None = None, *, step: int = 0) -> Entry | None:
        """The entry of a position as seen from a branch, resolved through its parents up to their bases.

        By default the current branch. The entry may be damaged or not resumable: that is for the
        caller to refuse. None when it is not live, or the branch is unknown.
        """
        wanted = Position(epoch, step)
        return next((entry for entry in self.line(branch) if entry.position == wanted), None)

    def entry(self, key: Key) -> Entry | None:
        """The live entry of exactly this branch and position."""
        return next((entry for entry in self.entries if entry.key == key), None)

    def lineage(self) -> tuple[Branch, ...]:
        """The current branch, its parent, and so on to the first."""
        return tuple(branch for branch, _ in lineage_of(self.state, self.state.current))

    def abandoned(self) -> tuple[Entry, ...]:
        """Live entries that the current branch does not see."""
        seen = {entry.key for entry in self.line()}
        return tuple(entry for entry in self.entries if entry.key not in seen)

    def epochs(self, branch: int | None = None) -> tuple[int, ...]:
        """Whole epochs seen from a branch (by default the current one), ascending, damaged ones too."""
        return tuple(entry.position.epoch for entry in self.line(branch) if entry.position.boundary)

    def tagged(self, name: str) -> Entry | None:
        """The entry that carries a tag."""
        mark = next((one for one in self.marks if one.kind == "tag" and one.name == name), None)
        return None if mark is None else self.entry(mark.target)

    @property
    def marks(self) -> tuple[Mark, ...]:
        """All tags and pins."""
        return self.state.marks
