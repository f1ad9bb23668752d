"""Which processes of this host load the same at the same time: they begin at different places."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from torchrelay.checkpoint.disk.read_options import ReadOptions

if TYPE_CHECKING:
    from torchrelay.jobs.session import Session


def options_of(session: Session) -> ReadOptions:
    """The processes of a session on this host."""
    mine = session.local_nodes[0]
    processes = sorted({place.process for place in session.nodes if place.host == mine.host})
    return ReadOptions(number=processes.index(mine.process), processes=len(processes))


def options_here(*, verify: bool = True) -> ReadOptions:
    """Without a session: the ranks of torch's process group, if there is one; all may be on this host.

    A wrong guess costs nothing but the order of the reads.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return ReadOptions(verify)
    return ReadOptions(verify, distributed.get_rank(), distributed.get_world_size())
