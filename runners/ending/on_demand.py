"""A save that somebody asked for by a signal: at the next safe point, on all processes, and training goes on.

The safe point is the end of the running step of a counted loop that all processes are in. Where the place
there cannot be saved, it is the end of the epoch, which is saved anyway; the reason is said.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrelay.checkpoint.position import Position
from torchrelay.runners.ending.inside import obstacle_here, save_inside, why_not_at

if TYPE_CHECKING:
    from torchrelay.runners.life import Life


def save_now(life: Life) -> None:
    """Save the step that all processes have just agreed on; raises what makes any save end a run."""
    told = life.session.peers.exchange(
        "save on demand", [life.requests.take_save(), life.state.step, obstacle_here(life)]
    )
    names, steps, obstacles = zip(*told, strict=True)
    position = Position(max(0, life.state.epoch - 1), max(steps))
    asked = next(filter(None, names), "another process")
    why_not = why_not_at(life, position, next(filter(None, obstacles), None))
    if why_not is not None:
        life.journal.tell("save asked for", f"{asked}: saved when epoch {life.state.epoch} ends ({why_not})")
        return
    save_inside(life, position)
    if life.saver.newest == position:
        life.journal.tell("save asked for", f"{asked}: saved as {position}")
    elif life.manager is not None and life.manager.asynchronous:
        life.journal.tell("save asked for", f"{asked}: {position} is being saved behind the training")
