"""Leaving for now: who asked, the place within an epoch that is saved, and what a crash leaves in a file.

The safe point is the end of the running step of a counted loop that all processes are in. Where the place
there cannot be saved, it is the end of the epoch, which is saved anyway; the reason is said.

A task that is called again after that must find what it found before its loop. What it changed is told by
values and by torch's version counters. What moves neither (a fused optimizer before the loop, writes through
`.data`) is not seen.

Of a crash, with `on_crash="save"`:

    crash/<node>.attempt_<n>.safetensors     a file of `save_blobs`; the newest start's alone stays

Nobody knows whether the failed step is done by half, so no start goes on from such a file by itself: it goes
on from its newest saved position. The file is for looking (`load_blobs`, any reader of safetensors) and for
`init_model_path` and `ctx.load_blobs`, by choice. Each process writes for itself, for the others may wait in
a collective; sharded tensors, whose rest is elsewhere, are left out and named.
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
    """What all processes know of a leave: who asked, where it is, and why the place cannot be saved.

    `elsewhere`: SIGTERM came to other hosts alone; their agents leave, and the one of this host need not.
    """

    reason: str
    position: Position
    inside: bool
    why_not: str | None
    elsewhere: bool

    @property
    def lost(self) -> str | None:
        """Why steps of the running epoch are lost; None where none are."""
        return self.why_not if self.inside and self.why_not != NOTHING_NEW else None


def agree_to_leave(
    session: SessionBase, state: RunState, requests: Requests, mid_epoch: MidEpochSaver, longest_secs: float
) -> Leave:
    """Every process says who asked it, how far it is, how long it has, and what keeps it from going on.

    `longest_secs` is how long a save took here at most.
    """
    inside = state.tracked is not None
    told = session.peers.exchange(
        "leave for now",
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
        why_not = "there is no time left for a save"
    hosts = [place.host_index for place in session.nodes]
    asked = {host: one for host, one in zip(hosts, reasons, strict=False) if one is not None}
    elsewhere = set(asked.values()) == {"SIGTERM"} and session.local_nodes[0].host_index not in asked
    return Leave(reason, position, inside, why_not, elsewhere)


def go_on(peers: Peers, requests: Requests) -> tuple[int, str]:
    """What all processes together are asked most urgently, and who asks; all call this at one boundary.

    Raises Interrupted on all processes where they shall leave now. A process that is gone cannot come: then
    this raises PeerError, and the run has failed. So a launcher that ends the others because of a failure
    never makes it a preemption.
    """
    told = peers.exchange("requests to end", [requests.level(), requests.reason()])
    level = max(one for one, _ in told)
    if level == PREEMPT:
        raise Interrupted
    reasons = (reason for one, reason in told if one == level and reason is not None)
    return level, next(reasons, "another process")


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


FOLDER = "crash"
FACTS = "torchrelay_crash"
"""The value in such a file that says where it was: epoch, step, attempt, error."""
_NAMED = 4


def check_on_crash(policy: Any) -> OnCrash:
    """The policy; raises UsageError for any other word."""
    if policy in ("save", "none"):
        return policy  # type: ignore[no-any-return]
    raise UsageError(f"on_crash is {policy!r:.80}; it is 'save' or 'none'")


def save_at_crash(
    run: Path, session: SessionBase, state: RunState, selection: Selection | None, error: BaseException
) -> None:
    """Write the file of each node that this process hosts, where a task of its own failed; never raises."""
    from torchrelay.runners.distributed.world import is_consequence

    theirs = not isinstance(error, RelayError) or isinstance(error, TaskFailedError)
    if not theirs or not isinstance(error, Exception) or is_consequence(error):
        return
    facts = {"epoch": state.epoch, "step": state.step, "attempt": state.attempt, "error": str(error)}
    for place in session.local_nodes:
        path = run / FOLDER / f"{place.name}.attempt_{state.attempt}.safetensors"
        try:
            left_out = _write(session.workspace(place.name), selection, path, facts)
        except Exception as second:  # a device that failed raises anything
            told = f"could not be saved: {second}"
        else:
            some = ", ".join(
                [*left_out[:_NAMED], *([f"{len(left_out) - _NAMED} more"] if left_out[_NAMED:] else [])]
            )
            told = f"is saved in {path}" + (f"; left out, since sharded: {some}" if left_out else "")
        warn(f"{place}: what it held when it failed {told}", SaveWarning, stacklevel=3)


def _write(workspace: Workspace, selection: Selection | None, path: Path, facts: dict[str, Any]) -> list[str]:
    """Write what is saved of a node; returns what had to be left out."""
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
    """Loads the position anew where a task comes back to its loop with another state than it began with.

    Made when the epoch goes on; `load` loads on all processes together. Emulated nodes of one process
    are only warned of, because a load is of all of them.
    """

    def __init__(self, session: SessionBase, load: Callable[[], None]) -> None:
        self._session = session
        self._load = load
        self._before = {place.name: look(session.workspace(place.name)) for place in session.local_nodes}

    def __call__(self, node: str, agreeing: Agreeing | None) -> None:
        """The task of `node` comes to the loop that was left; so do those of all other processes."""
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
            f"{', '.join(changed[:4])} of {node} changed before the loop that is continued, and so twice in "
            "this epoch: put that into a task of its own",
            stacklevel=2,
        )


def look(workspace: Workspace) -> Look:
    """What all that may be saved is like: values, and how often each tensor was written to."""
    entries = workspace.entries()
    saved = {name: one.value for name, one in entries.items() if one.origin is not Origin.LATER}
    return {
        leaf.name: leaf.content.json
        if isinstance(leaf.content, Value)
        else (leaf.content.data_ptr(), leaf.content._version)
        for leaf in leaves_of(saved)
    }
