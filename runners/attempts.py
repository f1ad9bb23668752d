"""Starts that get no further: they are counted where the run says how it stands, and end at a limit.

A start that dies is started again by a launcher, a scheduler or a script, in the next one the same may happen
at the same place, and so on for days. What counts is where a start begins: one that begins at the place of
the one before got no further than that, whatever ended it.
"""

from __future__ import annotations

from typing import Any

from torchrelay.checkpoint.format.manifest.position import Position
from torchrelay.errors import NoProgressError
from torchrelay.jobs.session import Peers, decide
from torchrelay.runners.journal import Journal

MAX_ATTEMPTS = 3


def check_attempts(peers: Peers, journal: Journal, place: list[Any], most: int | None) -> int:
    """Note where this start begins, and return which one of the run it is; all processes together.

    `place` is as far as a later start can tell whether it got further: branch, epoch, step, parts of the
    tail; it is empty for a start that rewinds, each of which begins a branch. Raises NoProgressError where
    `most` before it have begun there too. Not counted are starts that somebody ended by Ctrl-C, and those
    that were used wrongly.
    """
    attempt, before = decide(peers, "attempts", lambda: journal.attempts_before(place))
    if most is not None and before >= most:
        journal.uncount()
        where = f"epoch {Position(*place[1:3])}" if place and place[1] is not None else "the beginning"
        raise NoProgressError(
            f"{before} starts in a row began at {where} in {journal.where} and got no further: "
            f"`torchrelay show` tells what ended them; mend it, and start with "
            f"--max-attempts {before + most} (or max_attempts=; 0 for no limit)"
        )
    return int(attempt)
