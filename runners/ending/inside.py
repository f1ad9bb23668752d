"""Saving the place inside of an epoch, so that the run can go on from there."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torchrelay.checkpoint.position import Position
from torchrelay.jobs.peers import together
from torchrelay.jobs.turns import undivided
from torchrelay.runners.ending.place import Place, places_json

if TYPE_CHECKING:
    from torchrelay.runners.life import Life

NOTHING_NEW = "no step was taken since the newest position"


def obstacle_here(life: Life) -> str | None:
    """What keeps a node of this process from being continued where it is; None where nothing does."""
    found = (_obstacle(life, place.name) for place in life.session.local_nodes)
    return next((one for one in found if one is not None), None)


def why_not_at(life: Life, position: Position, obstacle: str | None) -> str | None:
    """Why `position` cannot be saved; None where it can. Alike on all processes that agree on `obstacle`."""
    newest = life.saver.newest
    if life.manager is None or life.run_directory is None:
        return "there is no run directory"
    if position.boundary or (newest is not None and position <= newest):
        return NOTHING_NEW
    return obstacle


@undivided()
def save_inside(life: Life, position: Position) -> None:
    """Save the state with the places of all nodes; all processes call this at one step. A failure warns."""
    session, state = life.session, life.state
    state.points.end(state.epoch, state.total_steps)
    own: dict[str, Place] = {}
    for node in session.local_nodes:
        cursor = state.cursor_of(node.name)
        if cursor is not None:
            streams = cursor.streams_at()
            own[node.name] = cursor.place(state.step_of(node.name))
            if streams is not None:
                session.set_streams(node.name, streams)
            cursor.install_gradients()
    told = together(
        session.peers, "places in the epoch", lambda: {name: place.json() for name, place in own.items()}
    )
    places = {name: Place.of(json) for part in told for name, json in part.items()}
    facts = replace(life.facts_now(), places=places_json(places), over=False)
    life.saver.save(session, position, facts)


def _obstacle(life: Life, node: str) -> str | None:
    cursor = life.state.cursor_of(node)
    return None if cursor is None else cursor.obstacle(life.session.workspace(node))
