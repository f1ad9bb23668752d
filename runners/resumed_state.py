"""The state that a run resumes from: loaded from a position, and once more where an epoch is continued."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torchrelay.checkpoint.load.verify import Target
from torchrelay.checkpoint.manager_base import Manager
from torchrelay.checkpoint.state.gradients import Gradients
from torchrelay.errors import PartiallyLoadedError, StorageError
from torchrelay.jobs.random import RandomStreams
from torchrelay.runners.ending.put_back import PutBack
from torchrelay.runners.from_program import FromProgram
from torchrelay.runners.journal import Journal
from torchrelay.runners.session.base import SessionBase
from torchrelay.runners.session.mid_epoch import places_for
from torchrelay.runners.session.run_state import RunState


class ResumedState:
    """What was loaded, or drawn for a fresh start, until the tasks of the first epoch have it.

    `places` says where the nodes were in the epoch to be continued; it is empty at the end of one.
    """

    def __init__(self, session: SessionBase, state: RunState, from_program: FromProgram) -> None:
        self._session, self._state, self._from_program = session, state, from_program
        self._streams: dict[str, RandomStreams] = {}
        self._gradients: dict[str, Gradients] = {}
        self._load_again: Callable[[], None] = lambda: None
        self.places: Mapping[str, Any] = {}

    def derive_streams(self) -> None:
        """Give every node its own streams; without a seed they stay as the program left them."""
        for place in self._session.local_nodes:
            if self._state.seed is not None:
                self._session.set_streams(place.name, RandomStreams.derive(self._state.seed, place.rank))
            self._streams[place.name] = self._session.streams(place.name)

    def load(
        self, manager: Manager, nodes: Sequence[str], target: Target, journal: Journal, *, older: bool
    ) -> Target:
        """Load the target; where its bytes prove damaged, an older one if `older`."""
        manager.engine.say = partial(journal.tell, "state changed")
        while True:
            epoch = target.position.epoch
            try:
                if target.position.boundary:
                    self._session.run(manager.init(nodes, retrieve_from_epoch=epoch))
                    self._session.run(manager.load(epoch))
                else:
                    self._session.run(manager.go_on_at(nodes, target))
                break
            except (StorageError, PartiallyLoadedError) as error:
                if not older:
                    raise
                target = manager.engine.ledger.instead_of(self._session.peers, target, error, journal.warn)
        self._from_program.apply(self._session, target.facts.built, journal.say)
        if not target.position.boundary:
            self.places = target.facts.places
            self._load_again = partial(self._load_inside, manager, nodes, target)
        return target

    def take(self, manager: Manager, target: Target) -> None:
        """Count on from what was loaded; its random states and gradients wait for `restore`."""
        engine, facts = manager.engine, target.facts
        self._streams, self._gradients = engine.take_streams(), engine.take_gradients()
        self._state.set_elapsed(facts.elapsed_secs)
        self._state.begin_epoch(target.position.epoch, total_steps=facts.total_steps)
        self._state.recall_metrics(facts.metrics, facts.last_metrics)
        if self._state.seed is None:
            self._state.seed = facts.seed

    def restore(self) -> None:
        """The last act before the first epoch task, or before the tail of a run whose epochs are over.

        Gradients too, but for nodes that come back to a loop: there, for what comes before it may clear them.
        """
        for name, streams in self._streams.items():
            self._session.set_streams(name, streams)
        if not self.places:
            for gradients in self._gradients.values():
                gradients.install()

    def continue_epoch(self, step: int) -> None:
        """Begin the epoch in whose midst the position is, `step` steps of which are done."""
        inside, self.places = self.places, {}
        self._state.begin_epoch(self._state.epoch + 1, step=step, total_steps=self._state.total_steps)
        own = {place.name for place in self._session.local_nodes}
        places = places_for([place.name for place in self._session.nodes], inside)
        self._state.put_back = PutBack(self._session, self._load_again)
        own_places = {name: place for name, place in places.items() if name in own}
        self._state.continue_at(own_places, self._streams, self._gradients)

    def _load_inside(self, manager: Manager, nodes: Sequence[str], target: Target) -> None:
        """Load the position once more; random states and gradients are known."""
        self._session.run(manager.go_on_at(nodes, target))
        manager.engine.take_streams()
        manager.engine.take_gradients()
        self._from_program.apply(self._session, target.facts.built)
