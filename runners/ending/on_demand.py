"""A save that somebody asked for by a signal: at the next safe point, on all processes, and training goes on.

The safe point is the end of the running step of a counted loop that all processes are in. Where the place
there cannot be saved, it is the end of the epoch, which is saved anyway; the reason is said.
"""

from __future__ import annotations

from torchrelay.checkpoint.format.manifest.position import Position
from torchrelay.jobs.session import Peers
from torchrelay.runners.ending.inside import MidEpochSaver
from torchrelay.runners.journal import Journal
from torchrelay.runners.session.run_state import RunState
from torchrelay.runners.session.stop_requests import Requests


def save_now(
    peers: Peers, state: RunState, requests: Requests, mid_epoch: MidEpochSaver, journal: Journal
) -> None:
    """Save the step that all processes have just agreed on; raises what makes any save end a run."""
    told = peers.exchange("save on demand", [requests.take_save(), state.step, mid_epoch.obstacle_here()])
    names, steps, obstacles = zip(*told, strict=True)
    position = Position(max(0, state.epoch - 1), max(steps))
    asked = next(filter(None, names), "another process")
    why_not = mid_epoch.why_not_at(position, next(filter(None, obstacles), None))
    if why_not is not None:
        journal.tell("save asked for", f"{asked}: saved when epoch {state.epoch} ends ({why_not})")
    elif mid_epoch.save(position):
        journal.tell("save asked for", f"{asked}: saved as {position}")
    elif mid_epoch.in_flight:
        journal.tell("save asked for", f"{asked}: {position} is being saved behind the training")
