"""What each kind of record does to the state of a log. Pure: a state goes in, a state comes out.

A change is computed again when another record came first, so that it always speaks about what is
true in the slot it is written to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torchrelay.checkpoint.format.log_state import DAMAGED, Branch, Entry, Key, Mark, Retirement, State
from torchrelay.checkpoint.format.manifest.position import Position
from torchrelay.checkpoint.format.names import TRY
from torchrelay.checkpoint.log.branches import line_of, lineage_of, newest_of
from torchrelay.errors import SaveFailedError, UnknownEpochError, UsageError

Json = Any


def taken_over(state: State, holder: Mapping[str, Json]) -> State:
    """A writer takes the log; everything else stays."""
    return replace(state, holder=dict(holder), released=False)


def released(state: State) -> State:
    """The writer is done; the next one need not wait."""
    return replace(state, released=True)


def committed(state: State, entry: Entry) -> State:
    """A position becomes real on the current branch; mid-epoch entries that it completes are retired.

    Raises UsageError for a position that is not beyond the newest of the branch, SaveFailedError
    when a try that the entry needs is not live any more.
    """
    if entry.branch != state.current:
        raise UsageError(f"epoch {entry.key} is not on the current branch {state.current}: rewind first")
    if not all(TRY.fullmatch(name) for name in entry.tries):
        raise UsageError(f"epoch {entry.key} names a try that is none: {', '.join(entry.tries)}")
    if entry.try_name in state.tries:
        raise UsageError(f"epoch {entry.key}: {entry.try_name} is in the log; every save makes its own try")
    line = line_of(state, state.current)
    if line and line[-1].position >= entry.position:
        raise UsageError(
            f"epoch {entry.position} cannot be committed after epoch {line[-1].position} "
            f"on branch {state.current}: rewind to an earlier epoch first"
        )
    missing = [name for name in entry.needs if name not in state.tries]
    if missing:
        raise SaveFailedError(
            f"epoch {entry.position} refers to {', '.join(missing)}, which is not live any more: "
            "the next save writes those bytes again"
        )
    over = [one for one in state.entries if _completed_by(one, entry)]
    return without(replace(state, entries=_sorted((*state.entries, entry))), over)


def _completed_by(one: Entry, entry: Entry) -> bool:
    """Whether a position inside an epoch is passed: of the branch, of those below it, of abandoned ones."""
    return entry.position.boundary and not one.position.boundary and one.position < entry.position


def rewound(
    state: State, base: Position | None, request: Mapping[str, Json], branch: int | None = None
) -> State:
    """Begin a new branch at `base` as seen from `branch` (by default the current one).

    `base` None is a fresh start: the new branch sees nothing. Raises UnknownEpochError for a base
    that is not live. The parent is the branch that holds the base's entry, so that lineages stay short.
    """
    parent = None if base is None else _holder_of(state, base, branch).branch
    new = Branch(state.next_branch, parent, base, dict(request))
    state = replace(state, branches=(*state.branches, new), current=new.id, next_branch=state.next_branch + 1)
    return _pruned(state)


def _holder_of(state: State, base: Position, branch: int | None) -> Entry:
    seen = line_of(state, state.current if branch is None else branch)
    for entry in seen:
        if entry.position == base:
            return entry
    there = ", ".join(str(entry.position) for entry in seen) or "none"
    raise UnknownEpochError(f"epoch {base} is not among the committed ones ({there}): choose one of them")


def quarantined(state: State, key: Key) -> State:
    """An entry was found damaged: it stays loadable for forensics, it is never chosen."""
    _must_live(state, key)
    entries = tuple(replace(one, health=DAMAGED) if one.key == key else one for one in state.entries)
    return replace(state, entries=entries)


def retired(state: State, retirements: Iterable[Retirement]) -> tuple[State, tuple[Retirement, ...]]:
    """Retire what may be retired *now*; returns the state and what it was (a pin may have come first).

    Never the newest provable entry, a marked one, or a try that another live entry needs: entries that go
    too go before what only they need.
    """
    asked, allowed = tuple(retirements), set[Retirement]()
    left = list(asked)
    while left:
        later: list[Retirement] = []
        for one in reversed(left):  # oldest first they come, and newer ones need older ones
            entry = next((e for e in state.entries if e.try_name == one.try_name), None)
            if entry is None or entry.key in protected(state) or _needed_by_others(state, entry):
                later.append(one)
                continue
            state = without(state, [entry]) if one.groups is None else _less_groups(state, entry, one.groups)
            allowed.add(one)
        if len(later) == len(left):
            break
        left = later[::-1]
    return state, tuple(one for one in asked if one in allowed)


def protected(state: State) -> frozenset[Key]:
    """Entries that retention never touches whatever its policy: the newest provable and marked ones."""
    newest = newest_of(state)
    return state.marked | ({newest.key} if newest else frozenset())


def _needed_by_others(state: State, entry: Entry) -> bool:
    return any(entry.try_name in other.needs for other in state.entries if other.key != entry.key)


def _less_groups(state: State, entry: Entry, groups: tuple[str, ...]) -> State:
    left = tuple(group for group in entry.groups if group not in groups)
    thinner = replace(entry, groups=left, resumable=False)
    entries = tuple(thinner if one.key == entry.key else one for one in state.entries)
    return replace(state, entries=entries, retiring=(*state.retiring, Retirement(entry.try_name, groups)))


def marked(state: State, mark: Mark) -> State:
    """Add a tag or pin, or move the one of that name."""
    _must_live(state, mark.target)
    return replace(state, marks=(*unmarked(state, mark.kind, mark.name).marks, mark))


def unmarked(state: State, kind: str, name: str) -> State:
    """Remove a tag or pin; an absent one is fine."""
    kept = tuple(one for one in state.marks if (one.kind, one.name) != (kind, name))
    return replace(state, marks=kept)


def forgotten(state: State, deleted: Iterable[Retirement]) -> State:
    """Drop retirements whose files are known to be gone."""
    gone = set(deleted)
    return replace(state, retiring=tuple(one for one in state.retiring if one not in gone))


def _must_live(state: State, key: Key) -> None:
    if not any(entry.key == key for entry in state.entries):
        raise UnknownEpochError(f"epoch {key} is not committed: list the epochs and choose one")


def without(state: State, gone: Iterable[Entry]) -> State:
    """Drop entries that are not marked; tries that nobody needs any more begin to retire."""
    keys = {entry.key for entry in gone if entry.key not in state.marked}
    before = state.tries
    state = replace(state, entries=tuple(entry for entry in state.entries if entry.key not in keys))
    unneeded = [Retirement(name) for name in sorted(before - state.tries)]
    superseded = {one.try_name for one in unneeded}
    still = tuple(one for one in state.retiring if one.try_name not in superseded)
    return _pruned(replace(state, retiring=(*still, *unneeded)))


def _pruned(state: State) -> State:
    """Forget branches on which neither the current branch nor a live entry stands."""
    roots = {state.current} | {entry.branch for entry in state.entries}
    used = {branch.id for root in roots for branch, _ in lineage_of(state, root)}
    return replace(state, branches=tuple(branch for branch in state.branches if branch.id in used))


def _sorted(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    return tuple(sorted(entries, key=lambda entry: entry.key))
