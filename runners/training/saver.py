"""Saves of a run: handling of failures, manual saves, and the exit of a fenced process.

If another job has taken the directory, this process can save nothing more. The next save would detect that,
but it may be hours away; the writer's counter detects it within a second and reports it here.
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
from torchrelay.runners.distributed.launcher import current_world, end_process, write_stderr_within
from torchrelay.runners.session.base import SessionBase
from torchrelay.runners.session.run_state import RunState
from torchrelay.runners.session.stop import StopVerdict

if TYPE_CHECKING:
    from torchrelay.checkpoint.load.verify import Target
    from torchrelay.checkpoint.log.view import Look
    from torchrelay.runners.training.journal import Journal
    from torchrelay.runners.training.run_loop import Life


class Saver:
    """Save through a manager; a failed save is a warning and is counted.

    Errors that make every later save impossible are raised: fencing, a lost peer, at epoch 0 a blob that
    cannot be stored, and with a limit of failures also the loss of the directory.
    """

    def __init__(self, manager: Manager | None, journal: Journal, max_failed: int | None) -> None:
        self.manager = manager
        self.journal = journal
        self.max_failed = max_failed
        self.failed_in_a_row = 0
        self.newest_saved: int | None = None
        """The newest whole epoch."""
        self.newest: Position | None = None
        """The newest position, possibly within an epoch."""
        self.longest_secs = 0.0
        """Duration of the longest save, to start a save before an end in time."""

    def save(self, session: SessionBase, position: Position, facts: Facts) -> bool | None:
        """Save, notify the handler, and report the times. Returns True if the position is saved.

        None if that is unknown yet: an asynchronous save is in flight until `settle`. The outcome of the
        previous one is handled first.
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
        if manager.asynchronous and manager.engine.ledger.in_run:  # a manual save is synchronous
            return None
        self._took(position, time.monotonic() - began)
        self._saved(session, manager, position)
        return True

    def settle(self, session: SessionBase) -> None:
        """Wait for the save in flight and handle its outcome; all processes together."""
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
        """For a run directory: retry a missing save of the last epoch, and raise an error if it fails."""
        if self.newest_saved == last.epoch:
            return
        self.save(session, last, facts)
        self.settle(session)
        if self.newest_saved != last.epoch:
            raise SaveFailedError(
                f"all epochs are done, but the last one, epoch {last}, could not be saved (see warnings): "
                "fix the cause and run the same command, which resumes from the newest saved epoch"
            )

    def finish(self, session: SessionBase) -> None:
        """Wait until saves and their follow-up work are done; all processes together."""
        if self.manager is not None:
            self.manager.finish(session)
            self.journal.replicated(self.manager.take_replicated())

    def drain(self, session: SessionBase) -> None:
        """After a failure of the run: wait for the save in flight without other ranks; it only warns."""
        if self.manager is None:
            return
        for outcome in self.manager.settle():
            if outcome.error is not None:
                self.journal.save_failed(outcome.position, outcome.error, self.failed_in_a_row + 1)
            else:
                self._saved(session, self.manager, outcome.position)

    def _took(self, position: Position, secs: float) -> None:
        """Record the duration of a save."""
        self.longest_secs = max(self.longest_secs, secs)
        self.journal.progress.saved(position, secs)

    def _failed(self, position: Position, error: Exception) -> None:
        """Handle a failed save: warn and count, or raise."""
        if isinstance(error, (FencedError, PeerError)):
            raise error
        if isinstance(error, LostDirectoryError) and self.max_failed is not None:
            raise error  # retrying will not bring it back
        if position == Position(0) and isinstance(error, UsageError):
            raise error
        self.failed_in_a_row += 1
        self.journal.save_failed(position, error, self.failed_in_a_row)
        if self.max_failed is not None and self.failed_in_a_row >= self.max_failed:
            raise SaveFailedError(
                f"{self.failed_in_a_row} saves failed in a row, the last one: {error}. Fix the cause and run "
                "the same command (max_failed_saves sets the limit)"
            ) from error

    def _saved(self, session: SessionBase, manager: Manager, position: Position) -> None:
        """Handle a successful save."""
        self.failed_in_a_row = 0
        self.newest = position
        if position.boundary:  # handlers are not notified of others
            self.newest_saved = position.epoch
            self._notify_saved(session, manager, position.epoch)
            report_stats(session, manager, "checkpoint_save", self.journal.warn)

    def _notify_saved(self, session: SessionBase, manager: Manager, epoch: int) -> None:
        """Notify the handler of a saved epoch."""
        write = partial(manager.write_checkpoint_metadata, epoch)
        notify_handler(session, f"write of epoch {epoch}", write, self.journal.warn)

    def report_loaded(self, session: SessionBase, target: Target, look: Look) -> None:
        """Report the load, and repeat the handler's write: a crash may have come before it."""
        epoch, manager = target.position.epoch, self.manager
        inside = not target.position.boundary
        self.newest, self.newest_saved = target.position, look.whole if inside else epoch
        if manager is None:
            return
        report_stats(session, manager, "checkpoint_load", self.journal.warn)
        if look.epoch == epoch and not inside:
            self._notify_saved(session, manager, epoch)


def report_stats(session: SessionBase, manager: Manager, action: str, warn: Callable[[str], None]) -> None:
    """Pass the times of the last save or load to the handler."""
    notify_handler(session, f"report of {action}", lambda: manager.report_checkpoint_stats(action), warn)


def notify_handler(
    session: SessionBase, what: str, tell: Callable[[], None], warn: Callable[[str], None]
) -> None:
    """Call the metadata handler on rank 0; a failure is only a warning."""
    if session.peers.rank != 0:
        return
    try:
        tell()
    except Exception as error:
        warn(f"the metadata handler failed at {what}: {error}")


GRACE_SECS = 6.0
"""Time for the process to exit by itself, so that even on a busy machine it is gone within 15 s."""


class FenceGuard:
    """Guard one train call, until `close`.

    A fenced process raises FencedError at its next step; other ranks are notified as of any failure. A
    process that has not exited after the grace period is ended with FencedError's exit code, except
    interactive interpreters.
    """

    def __init__(
        self, state: RunState, *, grace_secs: float = GRACE_SECS, end: Callable[[int], None] = end_process
    ) -> None:
        self._state, self._grace_secs, self._end = state, grace_secs, end
        self._over = threading.Event()

    def fenced(self, error: FencedError) -> None:
        """Handle the writer's notification; returns at once."""
        self._state.fenced = error
        threading.Thread(target=self._enforce, args=(error,), name="torchrelay-fence", daemon=True).start()

    def close(self) -> None:
        """End the train call."""
        self._over.set()

    def _enforce(self, error: FencedError) -> None:
        """Report the error, and end the process after the grace period."""
        shown = f"{type(error).__name__}: {error}"
        world = current_world()
        known = world is not None and world.blame("the checkpoint log", error, shown)
        if self._over.wait(self._grace_secs) or hasattr(sys, "ps1") or sys.flags.interactive:
            return
        if not known:
            write_stderr_within(f"torchrelay: {shown}\n")
        self._end(error.exit_code)


def save_by_hand(life: Life, manager: Manager, epoch: int) -> bool:
    """Save the nodes of the session as `epoch`; returns True if saved, a failure is a warning.

    Raises UsageError on all processes if they pass different epochs.
    """
    epochs = life.session.peers.exchange("epoch to save", epoch)
    if differing := [f"{one} on rank {rank}" for rank, one in enumerate(epochs) if one != epochs[0]]:
        raise UsageError(
            f"the ranks would save different epochs, {epochs[0]} on rank 0 and {differing[0]}: pass the same "
            "number on all"
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
    """Load the best epoch into the job's objects and return its number.

    A session that does not hold them is set up first. Random states and gradients are unchanged.
    """
    from torchrelay.checkpoint.load.open import place_of, verified_entry

    session, engine, run, best = life.session, manager.engine, life.run_directory, life.plan.best
    if best is None:
        raise UsageError("load_best needs a metric: pass JobRunner best=('val/acc', 'max')")
    session.place(life.job.nodes())
    manager.bind(life.job, default_name=run.name if run else None)

    def choose() -> int:
        place = place_of(engine.storage)
        result = verified_entry(place, engine.ledger.view(), wanted("best"), best, life.journal.warn)
        return result.entry.position.epoch

    engine.ledger.look(session.peers)  # with local logs per host this finds the authoritative one
    epoch = int(decide(session.peers, "best epoch", choose, by=engine.ledger.reader))
    target = engine.ledger.verify_epoch(session.peers, epoch, whole=False)
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
    gone = f"; {lost} is unchanged, because keep_optimizer_last deleted its state" if lost else ""
    life.journal.say(f"loaded epoch {epoch}, the best by {best[0]}{gone}")
    return epoch
