"""How many threads each process reads with where several processes of a host load at the same time."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from torchrelay.checkpoint.format.shard.read_plan import ReadOptions

if TYPE_CHECKING:
    from torchrelay.jobs.session import Session


def options_of(session: Session) -> ReadOptions:
    """The processes of a session on this host share its cores."""
    mine = session.local_nodes[0]
    processes = {place.process for place in session.nodes if place.host == mine.host}
    return ReadOptions(of_the_cores=threads_each(len(processes), _cores()))


def threads_each(processes: int, cores: int) -> int:
    """How many threads of each process work on what is in memory: two for a core, that all of them share."""
    return max(1, min(ReadOptions.threads, 2 * cores // processes))


def _cores() -> int:
    """The cores that this process may use; those of the host where the system cannot say."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
