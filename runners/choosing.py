"""Where a run starts: decided purely, from what was asked and what the log holds.

    user's handler  >  user's epoch  >  newest provable position of the current branch

An explicit epoch rewinds, unless the current branch was begun by the same request in an earlier
process and its epochs are not over: then the same command continues that branch, so that an
epoch written into a script survives crashes and restarts.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, Literal

from torchrelay.checkpoint.format.manifest.position import MAX_EPOCH
from torchrelay.errors import NoProvableEpochError, UsageError
from torchrelay.records import dataclass

Resume = Literal["auto", "must", "never"]


@dataclass(frozen=True)
class Wish:
    """What was asked for.

    `epoch` is the user's or the handler's; `decided` says that somebody decided, so that an epoch
    of None means "from scratch" and not "look yourself". `automatic` is true for run directories.
    """

    epoch: int | None = None
    decided: bool = False
    resume: Resume = "auto"
    automatic: bool = True
    again: bool = False
    process: str = ""

    def request(self) -> dict[str, Any]:
        """What a rewind record keeps, to recognise the same request in a later process."""
        return {"epoch": self.epoch, "process": self.process}


@dataclass(frozen=True)
class Past:
    """What the log says: whether anything was committed, how the current branch began, whether it is over.

    `told_of` is the newest epoch that the run directory tells of as saved; None where it tells of none.
    """

    commits: bool = False
    told_of: int | None = None
    branch_request: Mapping[str, Any] | None = None
    epochs_over: bool = False


@dataclass(frozen=True)
class Choice:
    """How to start: `fresh`, `explicit` at `epoch`, or `newest`; `rewind` begins a new branch first."""

    start: Literal["fresh", "explicit", "newest"]
    epoch: int | None = None
    rewind: bool = False
    reason: str = ""


def choose(wish: Wish, past: Past) -> Choice:
    """Decide; raises UsageError for an impossible wish.

    NoProvableEpochError for `must` without commits, and for a start that would begin anew although an epoch
    was saved: a file system may not be mounted.
    """
    if wish.epoch is not None and wish.resume != "never":
        return _explicit(wish, past)
    if wish.epoch is not None:
        raise UsageError(f"resume='never' contradicts the request for epoch {wish.epoch}: give one of them")
    if wish.resume == "must" and not past.commits:
        raise NoProvableEpochError(
            "resume='must' and nothing was ever committed here: check the directory, or use resume='auto'"
        )
    if wish.automatic and wish.resume == "auto" and past.told_of is not None and not past.commits:
        raise NoProvableEpochError(
            f"the run tells of epoch {past.told_of} as saved, and its checkpoints hold no epoch: if they "
            "were moved or are not mounted, bring them back; to begin anew give resume='never' "
            "(--resume never)"
        )
    from_scratch = wish.decided or wish.resume == "never" or not (wish.automatic or wish.resume == "must")
    if from_scratch or not past.commits:
        why = "a fresh start in a used directory" if past.commits else "nothing was committed yet"
        return Choice("fresh", rewind=past.commits, reason=why)
    return Choice("newest", reason="the newest one")


def _explicit(wish: Wish, past: Past) -> Choice:
    if not wish.again and _continues(wish, past):
        return Choice(
            "newest",
            reason=f"the current branch was begun by the same request for epoch {wish.epoch}; "
            "--again rewinds once more",
        )
    return Choice("explicit", epoch=wish.epoch, rewind=True, reason=f"epoch {wish.epoch} was asked for")


def _continues(wish: Wish, past: Past) -> bool:
    begun = past.branch_request
    return (
        begun is not None
        and begun.get("epoch") == wish.epoch
        and begun.get("process") != wish.process
        and not past.epochs_over
    )


def check_epoch(value: object, name: str = "resume_from_epoch") -> int | None:
    """Accept None or a whole number from 0; numpy's integers too. Raises UsageError otherwise."""
    if value is None:
        return None
    try:
        epoch = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(f"{name} must be a whole number or None, not {value!r:.80}") from None
    if isinstance(value, bool):
        raise UsageError(f"{name} must be a whole number or None, not {value}")
    if abs(epoch) > MAX_EPOCH:  # not shown: Python refuses to write out very long numbers
        raise UsageError(f"{name} is beyond any epoch: they are numbered from 0 to {MAX_EPOCH}")
    if epoch < 0:
        raise UsageError(f"{name} is {epoch}; epochs start at 0, the state after init")
    return epoch
