"""Saves of a run: at the end of an epoch, within one, by hand, at a crash; and the exit of a fenced process.

If another job has taken the directory, this process can save nothing more. The next save would detect that,
but it may be hours away; the writer's counter detects it within a second and reports it here.

At a preemption all processes stop at the end of the running step of a counted loop. If the position there
cannot be saved, they stop at the end of the epoch, and the reason is logged.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrelay.checkpoint.files.blob_files import content_of, write_blob_file
from torchrelay.checkpoint.format.position import Facts, Position, Selection
from torchrelay.checkpoint.manager.base import Manager
from torchrelay.checkpoint.state.checkpoint_set import members_of, select
from torchrelay.checkpoint.state.flatten import leaves_of
from torchrelay.checkpoint.state.leaf import spec_of
from torchrelay.errors import (
    FencedError,
    LostDirectoryError,
    PeerError,
    RelayError,
    SaveFailedError,
    TaskFailedError,
    UsageError,
)
from torchrelay.jobs.runtime import undivided
from torchrelay.jobs.session import Peers, decide, together, warn
from torchrelay.jobs.workspace import Origin, Workspace
from torchrelay.records import dataclass
from torchrelay.runners.distributed.launcher import current_world, end_process, write_stderr_within
from torchrelay.runners.session.base import SessionBase
from torchrelay.runners.session.mid_epoch import MidEpochPosition, places_json
from torchrelay.runners.session.run_state import RunState
from torchrelay.runners.session.stop_requests import PREEMPT, Interrupted, Requests
from torchrelay.runners.training.journal import SaveWarning

if TYPE_CHECKING:
    from torchrelay.checkpoint.load.verify import Target
    from torchrelay.checkpoint.log.view import Look
    from torchrelay.runners.training.journal import Journal

NOTHING_NEW = "no step was taken since the newest position"
CRASH_FOLDER = "crash"
CRASH_FACTS = "torchrelay_crash"
"""The value in a file of a crash with epoch, step, attempt and error."""
_NAMED = 4


@dataclass(frozen=True)
class Leave:
    """The agreed preemption: its source, the position, and why that cannot be saved.

    `elsewhere`: only other hosts got SIGTERM; the agent of this host may stay.
    """

    reason: str
    position: Position
    inside: bool
    why_not: str | None
    elsewhere: bool

    @property
    def lost(self) -> str | None:
        """The reason why steps of the running epoch are lost; None if none are."""
        return self.why_not if self.inside and self.why_not != NOTHING_NEW else None


class Saver:
    """Save through a manager; a failed save is a warning and is counted.

    All processes make the same calls. Errors that make every later save impossible are raised: fencing, a
    lost peer, at epoch 0 a blob that cannot be stored, and with a limit of failures also the loss of the
    directory. `facts` returns those of the run, for saves within an epoch.
    """

    def __init__(
        self,
        manager: Manager | None,
        session: SessionBase,
        state: RunState,
        journal: Journal,
        max_failed: int | None,
        facts: Callable[[], Facts],
    ) -> None:
        self.manager, self.session, self.state, self.journal = manager, session, state, journal
        self.max_failed, self.facts = max_failed, facts
        self.failed_in_a_row = 0
        self.newest_saved: int | None = None  # the newest whole epoch
        self.newest: Position | None = None  # the newest position, possibly within an epoch
        self.longest_secs = 0.0  # duration of the longest save, to start a save before an end in time

    def save(self, position: Position, facts: Facts) -> bool | None:
        """Save, notify the handler, and report the times. Returns True if the position is saved.

        None if that is unknown yet: an asynchronous save is in flight until `settle`. The outcome of the
        previous one is handled first.
        """
        manager = self.manager
        if manager is None:
            return False
        self.settle()
        try:

            def ask() -> bool:
                manager.engine.check_place()
                return manager.cp_accessible(None)

            if not decide(self.session.peers, "cp_accessible", ask):
                self.journal.warn(
                    f"epoch {position} not saved: the checkpoint directory cannot be accessed now"
                )
                return False
            manager.note(facts)
            began = time.monotonic()
            self.session.run(manager.save(position.epoch if position.boundary else position))
        except Exception as error:
            self._failed(position, error)
            return False
        if manager.asynchronous and manager.engine.ledger.in_run:  # a manual save is synchronous
            return None
        self._saved(manager, position, time.monotonic() - began)
        return True

    def settle(self, *, failing: bool = False) -> None:
        """Wait for the save in flight and handle its outcome; a `failing` run only warns, without others."""
        if self.manager is None:
            return
        if not failing:
            self.journal.replicated(self.manager.take_replicated())
        for outcome in self.manager.settle():
            if outcome.error is None:
                slowest = None if outcome.stats is None else outcome.stats.slowest
                secs = None if failing or slowest is None else slowest.total_secs
                self._saved(self.manager, outcome.position, secs)
            elif failing:
                self.journal.save_failed(outcome.position, outcome.error, self.failed_in_a_row + 1)
            else:
                self._failed(outcome.position, outcome.error)

    def secure(self, last: Position, facts: Facts) -> None:
        """For a run directory: retry a missing save of the last epoch, and raise an error if it fails."""
        if self.newest_saved == last.epoch:
            return
        self.save(last, facts)
        self.settle()
        if self.newest_saved != last.epoch:
            raise SaveFailedError(
                f"all epochs are done, but the last one, epoch {last}, could not be saved (see warnings): "
                "fix the cause and run the same command, which resumes from the newest saved epoch"
            )

    def finish(self) -> None:
        """Wait until saves and their follow-up work are done."""
        if self.manager is not None:
            self.manager.finish(self.session)
            self.journal.replicated(self.manager.take_replicated())

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

    def _saved(self, manager: Manager, position: Position, secs: float | None) -> None:
        """Handle a successful save, and its duration if known."""
        if secs is not None:
            self.longest_secs = max(self.longest_secs, secs)
            self.journal.progress.saved(position, secs)
        self.failed_in_a_row = 0
        self.newest = position
        if position.boundary:  # handlers are not notified of others
            self.newest_saved = position.epoch
            self._notify_saved(manager, position.epoch)
            report_stats(self.session, manager, "checkpoint_save", self.journal.warn)

    def _notify_saved(self, manager: Manager, epoch: int) -> None:
        write = partial(manager.write_checkpoint_metadata, epoch)
        notify_handler(self.session, f"write of epoch {epoch}", write, self.journal.warn)

    def report_loaded(self, target: Target, look: Look) -> None:
        """Report the load, and repeat the handler's write: a crash may have come before it."""
        epoch, inside = target.position.epoch, not target.position.boundary
        self.newest, self.newest_saved = target.position, look.whole if inside else epoch
        if self.manager is None:
            return
        report_stats(self.session, self.manager, "checkpoint_load", self.journal.warn)
        if look.epoch == epoch and not inside:
            self._notify_saved(self.manager, epoch)

    # Within an epoch

    @undivided()
    def save_inside(self, position: Position) -> bool:
        """Save the state with the positions of all nodes at one step; returns True if it is saved by now."""
        session, state = self.session, self.state
        state.points.end(state.epoch, state.total_steps)
        own: dict[str, MidEpochPosition] = {}
        for node in session.local_nodes:
            cursor = state.cursor_of(node.name)
            if cursor is not None:
                own[node.name] = cursor.place(state.step_of(node.name))
                if cursor.streams is not None:
                    session.set_streams(node.name, cursor.streams)
                cursor.install_gradients()
        parts = together(
            session.peers, "places in the epoch", lambda: {name: one.json() for name, one in own.items()}
        )
        places = {name: MidEpochPosition.of(json) for part in parts for name, json in part.items()}
        self.save(position, replace(self.facts(), places=places_json(places), over=False))
        return self.newest == position

    def save_now(self, requests: Requests) -> None:
        """Save the step that all processes agreed on; raises errors that end the run."""
        state, journal = self.state, self.journal
        given = self.session.peers.exchange(
            "save on demand", [requests.take_save(), state.step, self._obstacle()]
        )
        names, steps, obstacles = zip(*given, strict=True)
        position = Position(max(0, state.epoch - 1), max(steps))
        asked = next(filter(None, names), "another process")
        why_not = self._why_not_at(position, next(filter(None, obstacles), None))
        if why_not is not None:
            journal.tell("save asked for", f"{asked}: saved when epoch {state.epoch} ends ({why_not})")
        elif self.save_inside(position):
            journal.tell("save asked for", f"{asked}: saved as {position}")
        elif self.manager is not None and self.manager.asynchronous:
            journal.tell("save asked for", f"{asked}: {position} is being saved in the background")

    def agree_to_leave(self, requests: Requests) -> Leave:
        """Exchange source, progress, remaining time and obstacles of all processes at a preemption."""
        session, state = self.session, self.state
        inside = state.tracked is not None
        obstacle = self._obstacle() if inside else None
        answers = session.peers.exchange(
            "preemption",
            [requests.reason(), requests.secs_left(), state.step, obstacle, self.longest_secs],
        )
        reasons, left, steps, why, took = zip(*answers, strict=True)
        position = Position(max(0, state.epoch - 1), max(steps)) if inside else Position(state.epoch)
        known = [secs for secs in left if secs is not None]
        time_left = min(known) - 2 * max(took) if known else 0.0
        reason = next((one for one in reasons if one is not None), "another process")
        why_not = self._why_not_at(position, next(filter(None, why), None))
        if why_not is None and time_left < 0:
            why_not = "the remaining time is too short for a save"
        hosts = [place.host_index for place in session.nodes]
        asked = {host: one for host, one in zip(hosts, reasons, strict=False) if one is not None}
        elsewhere = set(asked.values()) == {"SIGTERM"} and session.local_nodes[0].host_index not in asked
        return Leave(reason, position, inside, why_not, elsewhere)

    def _obstacle(self) -> str | None:
        """Return why a node of this process cannot be resumed here; None if all can."""
        for place in self.session.local_nodes:
            cursor = self.state.cursor_of(place.name)
            found = None if cursor is None else cursor.obstacle(self.session.workspace(place.name))
            if found is not None:
                return found
        return None

    def _why_not_at(self, position: Position, obstacle: str | None) -> str | None:
        """Return why `position` cannot be saved, if so; the same wherever `obstacle` is the same."""
        if self.manager is None or self.journal.run is None:
            return "the run has no directory"
        if position.boundary or (self.newest is not None and position <= self.newest):
            return NOTHING_NEW
        return obstacle


def agree_on_requests(peers: Peers, requests: Requests) -> tuple[int, str]:
    """Return the most urgent request of all processes and its source; all call this at one boundary.

    Raises Interrupted on all processes at a preemption. A missing process raises PeerError, so that a
    launcher which ends the other ranks after a failure never causes a preemption.
    """
    levels = peers.exchange("requests to end", [requests.level(), requests.reason()])
    level = max(one for one, _ in levels)
    if level == PREEMPT:
        raise Interrupted
    reasons = (reason for one, reason in levels if one == level and reason is not None)
    return level, next(reasons, "another process")


def report_stats(session: SessionBase, manager: Manager, action: str, warn: Callable[[str], None]) -> None:
    """Pass the times of the last save or load to the handler."""
    notify_handler(session, f"report of {action}", lambda: manager.report_checkpoint_stats(action), warn)


def notify_handler(
    session: SessionBase, what: str, notify: Callable[[], None], warn: Callable[[str], None]
) -> None:
    """Call the metadata handler on rank 0; a failure is only a warning."""
    if session.peers.rank != 0:
        return
    try:
        notify()
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


def save_at_crash(
    run: Path, session: SessionBase, state: RunState, selection: Selection | None, error: BaseException
) -> None:
    """Write the file of each node of this process where a task failed, with `on_crash="save"`; never raises.

        crash/<node>.attempt_<n>.safetensors     a file of `save_blobs`; only the newest attempt's is kept

    The failed step may be half done, so no launch resumes from this file. It is for inspection (`load_blobs`,
    any reader of safetensors), `init_model_path` and `ctx.load_blobs`. Each process writes alone, as others
    may wait in a collective; sharded tensors are left out and named.
    """
    from torchrelay.runners.distributed.world import is_consequence

    theirs = not isinstance(error, RelayError) or isinstance(error, TaskFailedError)
    if not theirs or not isinstance(error, Exception) or is_consequence(error):
        return
    facts = {"epoch": state.epoch, "step": state.step, "attempt": state.attempt, "error": str(error)}
    for place in session.local_nodes:
        path = run / CRASH_FOLDER / f"{place.name}.attempt_{state.attempt}.safetensors"
        try:
            left_out = _write_crash(session.workspace(place.name), selection, path, facts)
        except Exception as second:  # a failed device may raise any error
            outcome = f"could not be saved: {second}"
        else:
            some = ", ".join(
                [*left_out[:_NAMED], *([f"{len(left_out) - _NAMED} more"] if left_out[_NAMED:] else [])]
            )
            outcome = f"is saved in {path}" + (f"; left out, since sharded: {some}" if left_out else "")
        warn(f"{place}: its state at the failure {outcome}", SaveWarning, stacklevel=3)


def _write_crash(
    workspace: Workspace, selection: Selection | None, path: Path, facts: dict[str, Any]
) -> list[str]:
    """Write the state of a node; returns what was left out."""
    entries = workspace.entries()
    early = {name for name, one in entries.items() if one.origin is not Origin.LATER}
    blobs = {name: entries[name].value for name in members_of(workspace) if name in early}
    leaves = leaves_of(blobs)
    chosen = leaves if selection is None else select(leaves, blobs, selection)
    sharded = [leaf.name for leaf in chosen if spec_of(leaf).sharding is not None]
    whole = [leaf for leaf in chosen if leaf.name not in sharded]
    write_blob_file(path, content_of([*whole, *leaves_of({CRASH_FACTS: facts})]), overwrite=True)
    for other in path.parent.glob(f"{workspace.node}.attempt_*.safetensors"):
        if other != path:
            with suppress(OSError):
                other.unlink()
    return sharded
