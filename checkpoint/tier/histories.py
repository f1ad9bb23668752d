"""Two logs of one job, near and far: which of them tells the run, and what the far one lacks. Pure.

The near log is ahead of the far one, or it is of another time: somebody went on from the far one elsewhere.
A try has a name that nobody else makes, so the near log is ahead exactly if it knows the far one's newest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torchrelay.checkpoint.format.log_state import Branch, Entry, Retirement, State
from torchrelay.checkpoint.log.state import without
from torchrelay.checkpoint.log.view import LogView
from torchrelay.errors import StorageError

Json = Any


def is_ahead(near: LogView, far: LogView, *, untouched: bool = False) -> bool:
    """Whether all that the far log has came from the near one, which then tells the run.

    `untouched`: nobody has taken the far log over since the writer of this near place did, so that a branch
    which the near log does not know is one that it has left.
    """
    if near.slot < 0 or far.slot < 0:
        return near.slot >= 0
    if not far.entries and far.state.next_branch == 1:
        return True  # nothing was ever saved or begun there: a new place, or one that was emptied
    return _has_all(near, far) and (untouched or far.current in near.branches)


def _has_all(near: LogView, far: LogView) -> bool:
    line = far.line()
    if not line:
        return not far.entries or bool(near.entries)
    if _knows(near, line[-1]):
        return True
    newest = near.line()[-1:]
    if line[-1].position.boundary or not newest or newest[0].position <= line[-1].position:
        return False
    # A position inside of an epoch leaves the log when that epoch is committed.
    whole = [entry for entry in line if entry.position.boundary]
    return bool(whole) and _knows(near, whole[-1])


def _knows(view: LogView, entry: Entry) -> bool:
    own = view.entry(entry.key)
    return own is not None and own.try_name == entry.try_name and own.manifest_sha256 == entry.manifest_sha256


def anchor(far: LogView) -> frozenset[str]:
    """Tries by which a near log is known to be ahead of this one: they stay in it."""
    line = far.line()
    whole = [entry for entry in line if entry.position.boundary]
    return frozenset(entry.try_name for entry in (*line[-1:], *whole[-1:]))


def adopted(near: State, far: State) -> State:
    """The near log goes on from the far one; what only the near one had goes.

    Who holds the near log stays. Branches get numbers that neither log has given to another.
    """
    gone = sorted(near.tries - far.tries)
    live = {entry.key for entry in far.entries}
    names = {(mark.kind, mark.name) for mark in far.marks}
    own = (mark for mark in near.marks if mark.target in live and (mark.kind, mark.name) not in names)
    still = tuple(one for one in near.retiring if one.try_name not in gone)
    return replace(
        near,
        entries=far.entries,
        branches=far.branches,
        current=far.current,
        next_branch=max(near.next_branch, far.next_branch),
        marks=(*far.marks, *own),
        retiring=(*still, *(Retirement(name) for name in gone)),
    )


def to_send(near: LogView, far: LogView) -> tuple[Entry, ...]:
    """The entries of the near line that the far log is to get, oldest first; none that is damaged.

    Older ones than the newest that it has of this line are not missing there: retention let them go.
    """
    there = {entry.try_name for entry in far.entries}
    line = near.line()
    known = [number for number, entry in enumerate(line) if entry.try_name in there]
    rest = line[known[-1] + 1 :] if known else line
    return tuple(entry for entry in rest if entry.healthy and entry.resumable)


def branches_differ(near: LogView, far: LogView) -> bool:
    """Whether the far log does not know yet on which branch the run is."""
    return near.current != far.current


def branched_like(far: State, near: State) -> State:
    """The far log follows a rewind; its entries of other branches stay, abandoned."""
    given = {branch.id: branch for branch in (*far.branches, *near.branches)}
    state = replace(
        far,
        branches=tuple(given[number] for number in sorted(given)),
        current=near.current,
        next_branch=max(far.next_branch, near.next_branch),
    )
    return without(state, ())


def branch_payload(branch: Branch) -> Mapping[str, Json]:
    """What a `rewind` record says of the branch that it begins."""
    base = branch.base
    where = None if base is None else {"epoch": base.epoch, "step": base.step}
    return {"base": where, "branch": branch.id, "request": dict(branch.request or {})}


def mirrored(far: State, entry: Entry) -> State | None:
    """The far log gets an entry of the near one; None where it has it.

    As a commit does, it retires positions inside of an epoch that this completes. The tries that the entry
    refers to lie there, complete: whoever appends this has seen to it.
    """
    if any(one.try_name == entry.try_name for one in far.entries):
        return None
    if any(one.key == entry.key for one in far.entries):
        raise StorageError(f"the far log has another epoch {entry.key}: it is of another history")
    over = [
        one
        for one in far.entries
        if one.branch == entry.branch and entry.position.boundary and not one.position.boundary
        if one.position < entry.position
    ]
    still = tuple(one for one in far.retiring if one.try_name not in entry.tries)
    entries = tuple(sorted((*far.entries, entry), key=lambda one: one.key))
    return without(replace(far, entries=entries, retiring=still), over)


def newest_replicated(near: LogView, far: LogView) -> Entry | None:
    """The newest entry of the near line that the far log has."""
    there = {entry.try_name for entry in far.entries}
    return next((entry for entry in reversed(near.line()) if entry.try_name in there), None)
