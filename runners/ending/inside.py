"""Saving the place inside of an epoch, so that the run can go on from there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torchrelay.checkpoint.format.manifest.position import Facts, Position
from torchrelay.jobs.runtime import undivided
from torchrelay.jobs.session import together
from torchrelay.runners.saving import Saver
from torchrelay.runners.session.base import SessionBase
from torchrelay.runners.session.mid_epoch import Place, places_json
from torchrelay.runners.session.run_state import RunState

NOTHING_NEW = "no step was taken since the newest position"


class MidEpochSaver:
    """Saves steps of the running epoch; `facts` are the run's; not `possible` without a directory."""

    def __init__(
        self,
        session: SessionBase,
        state: RunState,
        saver: Saver,
        facts: Callable[[], Facts],
        *,
        possible: bool,
    ) -> None:
        self._session, self._state, self._saver = session, state, saver
        self._facts, self._possible = facts, possible

    @property
    def in_flight(self) -> bool:
        """Whether a save that is not over yet goes on behind the training."""
        return self._saver.manager is not None and self._saver.manager.asynchronous

    def obstacle_here(self) -> str | None:
        """What keeps a node of this process from being continued where it is; None where nothing does."""
        for place in self._session.local_nodes:
            cursor = self._state.cursor_of(place.name)
            found = None if cursor is None else cursor.obstacle(self._session.workspace(place.name))
            if found is not None:
                return found
        return None

    def why_not_at(self, position: Position, obstacle: str | None) -> str | None:
        """Why `position` cannot be saved; None where it can. Alike on processes that agree on `obstacle`."""
        newest = self._saver.newest
        if not self._possible:
            return "there is no run directory"
        if position.boundary or (newest is not None and position <= newest):
            return NOTHING_NEW
        return obstacle

    @undivided()
    def save(self, position: Position) -> bool:
        """Save the state with the places of all nodes; all processes call this at one step.

        Returns whether it is saved by now; a failure warns.
        """
        session, state = self._session, self._state
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
        facts = replace(self._facts(), places=places_json(places), over=False)
        self._saver.save(session, position, facts)
        return self._saver.newest == position
