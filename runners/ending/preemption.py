"""Leaving for now: who asked, and whether the place inside of the epoch can be saved before the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torchrelay.checkpoint.format.manifest.position import Position
from torchrelay.records import dataclass
from torchrelay.runners.ending.inside import NOTHING_NEW, MidEpochSaver
from torchrelay.runners.session.base import SessionBase
from torchrelay.runners.session.run_state import RunState
from torchrelay.runners.session.stop_requests import Requests


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

    def after_save(self, newest: Position | None) -> Leave:
        """The same, knowing whether its place has become the newest position."""
        return replace(self, why_not=None if newest == self.position else "the save failed")

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
    return Leave(reason, position, inside, why_not, _elsewhere(session, reasons))


def _elsewhere(session: SessionBase, reasons: Sequence[str | None]) -> bool:
    hosts = [place.host_index for place in session.nodes]
    asked = {host: reason for host, reason in zip(hosts, reasons, strict=False) if reason is not None}
    here = session.local_nodes[0].host_index
    return set(asked.values()) == {"SIGTERM"} and here not in asked
