"""Starts that get no further: they are counted where the run says how it stands, and end at a limit.

A start that dies is started again by a launcher, a scheduler or a script, in the next one the same may happen
at the same place, and so on for days. What counts is where a start begins: one that begins at the place of
the one before got no further than that, whatever ended it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchrelay.checkpoint.ledger_words import Target
from torchrelay.errors import NoProgressError
from torchrelay.jobs.peers import decide
from torchrelay.runners.choosing import Choice

if TYPE_CHECKING:
    from torchrelay.runners.life import Life

MAX_ATTEMPTS = 3


def check_attempts(life: Life, choice: Choice, target: Target | None) -> None:
    """Note where this start begins; all processes together.

    Raises NoProgressError where `max_attempts` before it have begun there too. Not counted are starts that
    somebody ended by Ctrl-C, that were used wrongly, and those that rewind, each of which begins a branch.
    """
    if life.run_directory is None:
        return

    def note() -> tuple[int, int]:
        return life.journal.attempts_before([] if choice.rewind else _place(life, target))

    life.state.attempt, before = decide(life.session.peers, "attempts", note)
    most = life.plan.max_attempts
    if most is not None and before >= most:
        life.journal.uncount()
        where = "the beginning" if target is None else f"epoch {target.position}"
        raise NoProgressError(
            f"{before} starts in a row began at {where} in {life.run_directory.where} and got no further: "
            f"`torchrelay show` tells what ended them; mend it, and start with "
            f"--max-attempts {before + most} (or max_attempts=; 0 for no limit)"
        )


def _place(life: Life, target: Target | None) -> list[Any]:
    """Where this start begins, as far as a later one can tell whether it got further."""
    branch = life.look.branch
    if target is None:
        return [branch, None, 0, 0]
    position = target.position
    return [branch, position.epoch, position.step, life.journal.tail_at(branch, position.epoch)]
