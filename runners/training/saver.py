"""Saves of a run: what a failure means, saves by hand, the end of a process whose run another has taken.

Nothing of a process whose directory another job has taken can be saved any more, and the other job does its
work. A save would tell, but the next one may be hours away; the writer's counter knows within a second, and
tells it here.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from torchrelay.checkpoint.format.position import Facts, Position
from torchrelay.checkpoint.log.view import wanted
from torchrelay.checkpoint.manager.base import Manager
from torchrelay.errors import FencedError, LostDirectoryError, PeerError, SaveFailedError, UsageError
from torchrelay.jobs.session import decide
from torchrelay.runners.distributed.environment import current_world
from torchrelay.runners.distributed.launcher_status import end_process, write_stderr_within
from torchrelay.runners.session.base import SessionBase
from torchrelay.runners.session.run_state import RunState
from torchrelay.runners.session.stop import StopVerdict

if TYPE_CHECKING:
    from torchrelay.checkpoint.load.verify import Target
    from torchrelay.checkpoint.log.view import Look
    from torchrelay.runners.training.journal import Journal
    from torchrelay.runners.training.run_loop import Life


class Saver:
    """Saves through a manager; a failed save is a loud warning and a counter.

    What makes every later save impossible too is raised: being fenced, losing a peer, and at
    epoch 0 a blob that cannot be stored; where failures are limited, also the loss of the directory.
    """

    def __init__(self, manager: Manager | None, journal: Journal, max_failed: int | None) -> None:
        self.manager = manager
        self.journal = journal
        self.max_failed = max_failed
        self.failed_in_a_row = 0
        self.newest_saved: int | None = None
        """The newest whole epoch."""
        self.newest: Position | None = None
        """The newest position, which may be inside of an epoch."""
        self.longest_secs = 0.0
        """What the longest save took here, so that a save before an end is begun in time."""

    def save(self, session: SessionBase, position: Position, facts: Facts) -> bool | None:
        """Save, tell the handler, report the times. Returns whether the position is saved.

        None where that is not known yet: an asynchronous save is in flight until `settle`. What became
        of the one before is told first.
        """
        manager = self.manager
        if manager is None:
            return False
        self.settle(session)
        try:

            def ask() -> bool:
                manager.engine.check_place()
                return manager.cp_accessible(None)

            if not decide(session.peers, "cp_accessible", ask):
                self.journal.warn(
                    f"epoch {position} not saved: the checkpoint directory cannot be accessed now"
                )
                return False
            manager.note(facts)
            began = time.monotonic()
            session.run(manager.save(position.epoch if position.boundary else position))
        except Exception as error:
            self._failed(position, error)
            return False
        if manager.asynchronous and manager.engine.ledger.in_run:  # by hand it is written at once
            return None
        self._took(position, time.monotonic() - began)
        self._saved(session, manager, position)
        return True

    def settle(self, session: SessionBase) -> None:
        """Wait for the save in flight and treat its outcome as that of any save; all processes together."""
        if self.manager is None:
            return
        self.journal.replicated(self.manager.take_replicated())
        for outcome in self.manager.settle():
            if outcome.error is not None:
                self._failed(outcome.position, outcome.error)
            else:
                if outcome.stats is not None and outcome.stats.slowest is not None:
                    self._took(outcome.position, outcome.stats.slowest.total_secs)
                self._saved(session, self.manager, outcome.position)

    def secure(self, session: SessionBase, last: Position, facts: Facts) -> None:
        """A run directory whose last epoch is not saved is not finished: try once more, then say so."""
        if self.newest_saved == last.epoch:
            return
        self.save(session, last, facts)
        self.settle(session)
        if self.newest_saved != last.epoch:
            raise SaveFailedError(
                f"the epochs are over, but the last one, epoch {last}, could not be saved (see warnings): "
                "mend the cause and start again, the run goes on from its newest saved epoch"
            )

    def finish(self, session: SessionBase) -> None:
        """Return when saves and what follows from them are done; all processes together."""
        if self.manager is not None:
            self.manager.finish(session)
            self.journal.replicated(self.manager.take_replicated())

    def drain(self, session: SessionBase) -> None:
        """Wait for the save in flight after a failure of the run: without the others, and it only warns."""
        if self.manager is None:
            return
        for outcome in self.manager.settle():
            if outcome.error is not None:
                self.journal.save_failed(outcome.position, outcome.error, self.failed_in_a_row + 1)
            else:
                self._saved(session, self.manager, outcome.position)

    def _took(self, position: Position, secs: float) -> None:
        self.longest_secs = max(self.longest_secs, secs)
        self.journal.progress.saved(position, secs)

    def _failed(self, position: Position, error: Exception) -> None:
        if isinstance(error, (FencedError, PeerError)):
            raise error
        if isinstance(error, LostDirectoryError) and self.max_failed is not None:
            raise error  # it will not come back by trying
        if position == Position(0) and isinstance(error, UsageError):
            raise error
        self.failed_in_a_row += 1
        self.journal.save_failed(position, error, self.failed_in_a_row)
        if self.max_failed is not None and self.failed_in_a_row >= self.max_failed:
            raise SaveFailedError(
                f"{self.failed_in_a_row} saves failed in a row, the last one: {error}. Mend what it names "
                "and start again (max_failed_saves sets the number)"
            ) from error

    def _saved(self, session: SessionBase, manager: Manager, position: Position) -> None:
        self.failed_in_a_row = 0
        self.newest = position
        if position.boundary:  # nobody outside is told of others
            self.newest_saved = position.epoch
            self._tell_epoch(session, manager, position.epoch)
            report_stats(session, manager, "checkpoint_save", self.journal.warn)

    def _tell_epoch(self, session: SessionBase, manager: Manager, epoch: int) -> None:
        """The handler learns of a saved epoch."""
        write = partial(manager.write_checkpoint_metadata, epoch)
        tell_handler(session, f"write of epoch {epoch}", write, self.journal.warn)

    def tell_loaded(self, session: SessionBase, target: Target, look: Look) -> None:
        """Report the load; write the newest epoch again: a crash may have come between commit and write."""
        epoch, manager = target.position.epoch, self.manager
        inside = not target.position.boundary
        self.newest, self.newest_saved = target.position, look.whole if inside else epoch
        if manager is None:
            return
        report_stats(session, manager, "checkpoint_load", self.journal.warn)
        if look.epoch == epoch and not inside:
            self._tell_epoch(session, manager, epoch)


def report_stats(session: SessionBase, manager: Manager, action: str, warn: Callable[[str], None]) -> None:
    """Give the handler the times of the last save or load."""
    tell_handler(session, f"report of {action}", lambda: manager.report_checkpoint_stats(action), warn)


def tell_handler(
    session: SessionBase, what: str, tell: Callable[[], None], warn: Callable[[str], None]
) -> None:
    """Call the metadata handler, on rank 0 only; a failure of it degrades to a warning."""
    if session.peers.rank != 0:
        return
    try:
        tell()
    except Exception as error:
        warn(f"the metadata handler failed at {what}: {error}")


GRACE_SECS = 6.0
"""For the process to end by itself; a busy machine leaves room to be gone within 15 all the same."""


class FenceGuard:
    """Guards one train call, until `close`.

    A fenced process raises FencedError at its next step; the ranks of a launched job hear of it as of any
    failure. What has not ended after the grace is ended with FencedError's code, but for an interactive
    interpreter, which is more than this job.
    """

    def __init__(
        self, state: RunState, *, grace_secs: float = GRACE_SECS, end: Callable[[int], None] = end_process
    ) -> None:
        self._state, self._grace_secs, self._end = state, grace_secs, end
        self._over = threading.Event()

    def fenced(self, error: FencedError) -> None:
        """Told by the writer's counter; returns at once."""
        self._state.fenced = error
        threading.Thread(target=self._see_to_it, args=(error,), name="torchrelay-fence", daemon=True).start()

    def close(self) -> None:
        """The train call is over."""
        self._over.set()

    def _see_to_it(self, error: FencedError) -> None:
        shown = f"{type(error).__name__}: {error}"
        world = current_world()
        known = world is not None and world.blame("the checkpoint log", error, shown)
        if self._over.wait(self._grace_secs) or hasattr(sys, "ps1") or sys.flags.interactive:
            return
        if not known:
            write_stderr_within(f"torchrelay: {shown}\n")
        self._end(error.exit_code)


def save_by_hand(life: Life, manager: Manager, epoch: int) -> bool:
    """Save the nodes of the life's session as `epoch`; a failure is a warning. Returns whether it is.

    Raises UsageError on all processes where they were given different epochs.
    """
    told = life.session.peers.exchange("epoch to save", epoch)
    if differing := [f"{one} on rank {rank}" for rank, one in enumerate(told) if one != told[0]]:
        raise UsageError(
            f"the ranks would save different epochs, {told[0]} on rank 0 and {differing[0]}: give "
            "all the same number"
        )
    ledger, run = manager.engine.ledger, life.run_directory
    within_train = ledger.holding is not None
    life.session.place(life.job.nodes())
    if not within_train:
        life.stored.begin(life.session.local_nodes[0])
    manager.bind(life.job, default_name=run.name if run else None)
    life.journal.create(life.job, life.plan.best, life.session)
    try:
        life.saver.save(life.session, Position(epoch), life.facts(StopVerdict()))
        life.saver.settle(life.session)
        if not within_train:
            life.stored.finish_by_hand()
    finally:
        if not within_train:
            life.stored.close()
            ledger.close()
    return life.saver.newest_saved == epoch


def load_best(life: Life, manager: Manager) -> int:
    """Load the best epoch into the objects of the life's job; return its number.

    A session that holds them not yet is set up first, as by any start. Random states and gradients stay.
    """
    from torchrelay.checkpoint.load.open import place_of, verified_entry

    session, engine, run, best = life.session, manager.engine, life.run_directory, life.plan.best
    if best is None:
        raise UsageError("load_best needs to know what is best: give JobRunner best=('val/acc', 'max')")
    session.place(life.job.nodes())
    manager.bind(life.job, default_name=run.name if run else None)

    def choose() -> int:
        place = place_of(engine.storage)
        proof = verified_entry(place, engine.ledger.view(), wanted("best"), best, life.journal.warn)
        return proof.entry.position.epoch

    engine.ledger.look(session.peers)  # where hosts have logs of their own this finds the one that counts
    epoch = int(decide(session.peers, "best epoch", choose, by=engine.ledger.reader))
    target = engine.ledger.prove(session.peers, epoch, whole=False)
    engine.say = life.journal.say
    session.begin(life.state)
    try:
        spaces = [session.workspace(place.name) for place in session.local_nodes]
        held = all(space.registered(blob) for space in spaces for blob in life.job.blobs)
        if not all(session.peers.exchange("load best: objects", held)):
            life.set_up(target)
        session.run(manager.go_on_at(life.nodes, target))
        engine.take_streams(), engine.take_gradients()
    finally:
        life.recorder.close()
        engine.say = None
        session.end()
    lost = ", ".join(sorted(target.lost_blobs & {blob.name for blob in life.job.blobs}))
    gone = f"; {lost} stays as it is, because keep_optimizer_last removed its state" if lost else ""
    life.journal.say(f"loaded epoch {epoch}, the best by {best[0]}{gone}")
    return epoch
