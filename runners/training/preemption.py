"""Preemption: agreement to stop, saves in the middle of an epoch, and the state file of a crash.

All processes stop at the end of the running step of a counted loop. If the position there cannot be saved,
they stop at the end of the epoch, and the reason is logged.

A task that is called again after a resume must find the state that it found before its loop. Changes are
detected by value and by torch's version counters. Writes that change neither (a fused optimizer before the
loop, writes through `.data`) are missed.

With `on_crash="save"`:

    crash/<node>.attempt_<n>.safetensors     a file of `save_blobs`; only that of the newest attempt is kept

The failed step may be half done, so no launch resumes from this file. It is for inspection (`load_blobs`, any
reader of safetensors), `init_model_path` and `ctx.load_blobs`. Each process writes alone, as others may wait
in a collective; sharded tensors are left out and named.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchrelay.checkpoint.format.position import Facts, Position, Selection
from torchrelay.checkpoint.state.checkpoint_set import members_of, select
from torchrelay.checkpoint.state.flatten import leaves_of
from torchrelay.checkpoint.state.leaf import Value, spec_of
from torchrelay.errors import RelayError, TaskFailedError, UsageError
from torchrelay.jobs.runtime import undivided
from torchrelay.jobs.session import Peers, together, warn
from torchrelay.jobs.workspace import Origin, Workspace
from torchrelay.records import dataclass
from torchrelay.runners.session.base import SessionBase
from torchrelay.runners.session.mid_epoch import MidEpochPosition, places_json
from torchrelay.runners.session.run_state import RunState
from torchrelay.runners.session.steps import Agreeing
from torchrelay.runners.session.stop_requests import PREEMPT, Interrupted, Requests
from torchrelay.runners.training.journal import Journal, SaveWarning
from torchrelay.runners.training.plan import OnCrash
from torchrelay.runners.training.saver import Saver

NOTHING_NEW = "no step was taken since the newest position"


class MidEpochSaver:
    """Saves within the running epoch; `facts` are the run's; not `possible` without a directory."""

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
        """True if saves are asynchronous."""
        return self._saver.manager is not None and self._saver.manager.asynchronous

    def obstacle_here(self) -> str | None:
        """Return why a node of this process cannot be resumed here; None if all can."""
        for place in self._session.local_nodes:
            cursor = self._state.cursor_of(place.name)
            found = None if cursor is None else cursor.obstacle(self._session.workspace(place.name))
            if found is not None:
                return found
        return None

    def why_not_at(self, position: Position, obstacle: str | None) -> str | None:
        """Return why `position` cannot be saved, if so; the same wherever `obstacle` is the same."""
        newest = self._saver.newest
        if not self._possible:
            return "the run has no directory"
        if position.boundary or (newest is not None and position <= newest):
            return NOTHING_NEW
        return obstacle

    @undivided()
    def save(self, position: Position) -> bool:
        """Save the state with the positions of all nodes; all processes call this at one step.

        Returns True if it is saved by now; a failure warns.
        """
        session, state = self._session, self._state
        state.points.end(state.epoch, state.total_steps)
        own: dict[str, MidEpochPosition] = {}
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
        places = {name: MidEpochPosition.of(json) for part in told for name, json in part.items()}
        facts = replace(self._facts(), places=places_json(places), over=False)
        self._saver.save(session, position, facts)
        return self._saver.newest == position


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


def agree_to_leave(
    session: SessionBase, state: RunState, requests: Requests, mid_epoch: MidEpochSaver, longest_secs: float
) -> Leave:
    """Exchange source, progress, remaining time and obstacles of all processes.

    `longest_secs` is the longest duration of a save on this process.
    """
    inside = state.tracked is not None
    told = session.peers.exchange(
        "preemption",
        [
            requests.reason(),
            requests.secs_left(),
            state.step,
            mid_epoch.obstacle_here() if inside else None,
            longest_secs,
        ],
    )
    reasons, left, steps, why, took = zip(*told, strict=True)
    position = Position(max(0, state.epoch - 1), max(steps)) if inside else Position(state.epoch)
    known = [secs for secs in left if secs is not None]
    time_left = min(known) - 2 * max(took) if known else 0.0
    reason = next((one for one in reasons if one is not None), "another process")
    why_not = mid_epoch.why_not_at(position, next(filter(None, why), None))
    if why_not is None and time_left < 0:
        why_not = "the remaining time is too short for a save"
    hosts = [place.host_index for place in session.nodes]
    asked = {host: one for host, one in zip(hosts, reasons, strict=False) if one is not None}
    elsewhere = set(asked.values()) == {"SIGTERM"} and session.local_nodes[0].host_index not in asked
    return Leave(reason, position, inside, why_not, elsewhere)


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


def save_now(
    peers: Peers, state: RunState, requests: Requests, mid_epoch: MidEpochSaver, journal: Journal
) -> None:
    """Save the step that all processes agreed on; raises errors that end the run."""
    given = peers.exchange("save on demand", [requests.take_save(), state.step, mid_epoch.obstacle_here()])
    names, steps, obstacles = zip(*given, strict=True)
    position = Position(max(0, state.epoch - 1), max(steps))
    asked = next(filter(None, names), "another process")
    why_not = mid_epoch.why_not_at(position, next(filter(None, obstacles), None))
    if why_not is not None:
        journal.tell("save asked for", f"{asked}: saved when epoch {state.epoch} ends ({why_not})")
    elif mid_epoch.save(position):
        journal.tell("save asked for", f"{asked}: saved as {position}")
    elif mid_epoch.in_flight:
        journal.tell("save asked for", f"{asked}: {position} is being saved in the background")


FOLDER = "crash"
FACTS = "torchrelay_crash"
"""The value in such a file with epoch, step, attempt and error."""
_NAMED = 4


def check_on_crash(policy: Any) -> OnCrash:
    """Check the policy; raises UsageError for other values."""
    if policy in ("save", "none"):
        return policy  # type: ignore[no-any-return]
    raise UsageError(f"invalid on_crash={policy!r:.80}: expected 'save' or 'none'")


def save_at_crash(
    run: Path, session: SessionBase, state: RunState, selection: Selection | None, error: BaseException
) -> None:
    """Write the file of each node of this process in which a task failed; never raises."""
    from torchrelay.runners.distributed.world import is_consequence

    theirs = not isinstance(error, RelayError) or isinstance(error, TaskFailedError)
    if not theirs or not isinstance(error, Exception) or is_consequence(error):
        return
    facts = {"epoch": state.epoch, "step": state.step, "attempt": state.attempt, "error": str(error)}
    for place in session.local_nodes:
        path = run / FOLDER / f"{place.name}.attempt_{state.attempt}.safetensors"
        try:
            left_out = _write(session.workspace(place.name), selection, path, facts)
        except Exception as second:  # a failed device may raise any error
            outcome = f"could not be saved: {second}"
        else:
            some = ", ".join(
                [*left_out[:_NAMED], *([f"{len(left_out) - _NAMED} more"] if left_out[_NAMED:] else [])]
            )
            outcome = f"is saved in {path}" + (f"; left out, since sharded: {some}" if left_out else "")
        warn(f"{place}: its state at the failure {outcome}", SaveWarning, stacklevel=3)


def _write(workspace: Workspace, selection: Selection | None, path: Path, facts: dict[str, Any]) -> list[str]:
    """Write the state of a node; returns what was left out."""
    from torchrelay.checkpoint.files.blob_files import content_of, write_blob_file

    entries = workspace.entries()
    early = {name for name, one in entries.items() if one.origin is not Origin.LATER}
    blobs = {name: entries[name].value for name in members_of(workspace) if name in early}
    leaves = leaves_of(blobs)
    chosen = leaves if selection is None else select(leaves, blobs, selection)
    sharded = [leaf.name for leaf in chosen if spec_of(leaf).sharding is not None]
    whole = [leaf for leaf in chosen if leaf.name not in sharded]
    write_blob_file(path, content_of([*whole, *leaves_of({FACTS: facts})]), overwrite=True)
    for other in path.parent.glob(f"{workspace.node}.attempt_*.safetensors"):
        if other != path:
            with suppress(OSError):
                other.unlink()
    return sharded


Look = dict[str, Any]


class PutBack:
    """Load the position again if a task reaches its loop with a state other than it began with.

    Created when the epoch is resumed; `load` loads on all processes together. Emulated nodes of one process
    only get a warning, because a load affects all of them.
    """

    def __init__(self, session: SessionBase, load: Callable[[], None]) -> None:
        self._session = session
        self._load = load
        self._before = {place.name: look(session.workspace(place.name)) for place in session.local_nodes}

    def __call__(self, node: str, agreeing: Agreeing | None) -> None:
        """Handle the task of `node` reaching the interrupted loop, as all processes do."""
        now = look(self._session.workspace(node))
        before = self._before[node]
        changed = sorted(name for name in now if now[name] != before.get(name))
        flags = (int(bool(changed)),)
        anywhere = flags if agreeing is None else agreeing.agree_flags(flags).wait()
        if not anywhere[0]:
            return
        if len(self._session.local_nodes) == 1:
            self._load()
            return
        warn(
            f"{', '.join(changed[:4])} of {node} changed before the resumed loop, so twice in this epoch: "
            "move that code to a task of its own",
            stacklevel=2,
        )


def look(workspace: Workspace) -> Look:
    """Return values and write counts of everything that may be saved."""
    entries = workspace.entries()
    saved = {name: one.value for name, one in entries.items() if one.origin is not Origin.LATER}
    return {
        leaf.name: leaf.content.json
        if isinstance(leaf.content, Value)
        else (leaf.content.data_ptr(), leaf.content._version)
        for leaf in leaves_of(saved)
    }
