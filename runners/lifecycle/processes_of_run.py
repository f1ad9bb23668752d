"""Sessions of profiles that follow each other over the same processes, which meet once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrelay.runners.distributed.environment import current_world
from torchrelay.runners.session.base import SessionBase
from torchrelay.runners.session.distributed import DistributedSession

if TYPE_CHECKING:
    import torch


def session_on(device: torch.device) -> DistributedSession:
    """A session of its own, over the processes that have met if they compute on `device`, else met anew."""
    world = current_world()
    if world is not None and world.device == device:
        return DistributedSession(world)
    if world is not None:
        world.close()
    return DistributedSession.from_env(device=device)


def let_go(session: SessionBase, *, world_stays: bool) -> None:
    """Let go of what a profile kept; the processes stay together for the next one where `world_stays`."""
    if session.closed:
        return
    if world_stays and isinstance(session, DistributedSession):
        session.release()
    else:
        session.close()
