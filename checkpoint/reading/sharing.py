"""Which processes of this host load the same at the same time: they begin at different places."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from torchrelay.checkpoint.disk.read_options import ReadOptions

if TYPE_CHECKING:
    from torchrelay.jobs.session import Session


def options_of(session: Session) -> ReadOptions:
    """The processes of a session on this host."""
    mine = session.local_nodes[0]
    processes = sorted({place.process for place in session.nodes if place.host == mine.host})
    number, count = processes.index(mine.process), len(processes)
    return ReadOptions(number=number, processes=count, threads_at_hand=threads_at_hand(count, _cores()))


def threads_at_hand(processes: int, cores: int) -> int:
    """How many threads of each process read what is in memory: two for a core, that all of them share."""
    return max(1, min(ReadOptions.threads, 2 * cores // processes))


def _cores() -> int:
    """The cores that this process may use; those of the host where the system cannot say."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def options_here(*, verify: bool = True) -> ReadOptions:
    """Without a session: the ranks of torch's process group, if there is one; all may be on this host.

    A wrong guess costs nothing but the order of the reads.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return ReadOptions(verify)
    return ReadOptions(verify, distributed.get_rank(), distributed.get_world_size())
