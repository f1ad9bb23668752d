"""Asking all processes, between the phases of a run, whether somebody wants to end early."""

from __future__ import annotations

from torchrelay.jobs.session import Peers
from torchrelay.records import dataclass
from torchrelay.runners.session.stop_requests import NOT_ASKED, PREEMPT, Interrupted, Requests


@dataclass(frozen=True)
class Asked:
    """The strongest request of all processes, and who made it."""

    level: int = NOT_ASKED
    reason: str = "another process"


def strongest(peers: Peers, requests: Requests) -> Asked:
    """What all processes together are asked; all call this at the same boundary.

    A process that is gone cannot come: then this raises PeerError, and the run has failed. So a launcher
    that ends the others because of a failure never makes it a preemption.
    """
    told = peers.exchange("requests to end", [requests.level(), requests.reason()])
    level = max(one for one, _ in told)
    reasons = [reason for one, reason in told if one == level and reason is not None]
    return Asked(level, reasons[0] if reasons else Asked.reason)


def go_on(peers: Peers, requests: Requests) -> Asked:
    """The same; raises Interrupted on all processes where they shall leave now."""
    asked = strongest(peers, requests)
    if asked.level == PREEMPT:
        raise Interrupted
    return asked
