"""The first line of a distributed script: device, process group, seed, and the current session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torchrelay.errors import NotAllowedNowError, UsageError
from torchrelay.jobs.random import seed as set_seed
from torchrelay.runners.distributed.environment import read_launch_env, world_of_parent
from torchrelay.runners.local_session import LocalSession
from torchrelay.runners.session_base import SessionBase

if TYPE_CHECKING:
    import torch

    from torchrelay.runners.distributed_session import DistributedSession

_made: list[DistributedSession] = []


def init(
    backend: str | None = None, seed: int | None = None, device: str | torch.device | None = None
) -> DistributedSession:
    """Choose the device, make the process group, seed this process; return the current session.

    Under torchrun it is the session of all ranks; plain `python train.py` is a world of one.
    `backend` is nccl where the device is a GPU, else gloo. Objects built after a `seed` are alike
    on all ranks. Called again it returns the session that it made.

    Raises UsageError for an environment or arguments that cannot be, DeadlineError when other
    ranks do not start.
    """
    from torchrelay.runners.distributed_session import DistributedSession

    current = current_session()
    if current is not None and not isinstance(current, DistributedSession):
        raise UsageError(f"{current!r} is current: call torchrelay.init() outside of it")
    session = current or DistributedSession.from_env(backend=backend, device=device)
    if session not in _made:
        _made.append(session)
    if seed is not None:
        set_seed(seed)
    return session


def current_session() -> SessionBase | None:
    """Return the session whose `with` block this is, else the one of `init`; None when there is none."""
    _made[:] = [session for session in _made if not session.closed]
    found = SessionBase.current(required=False) or (_made[-1] if _made else None)
    return found if found is not None and found.process == os.getpid() else None


@contextmanager
def current_or_new_session(session: SessionBase | None = None) -> Iterator[SessionBase]:
    """Yield `session`, else the current one, else a new one: distributed under torchrun, else local.

    A new distributed session stays open and current until the process leaves, because its groups
    are the user's too; a new local one is closed.
    """
    found = session or current_session()
    if found is not None:
        yield found
    elif (world := world_of_parent()) is not None and world.env.launched:
        raise NotAllowedNowError(
            f"this process was forked out of rank {world.env.rank}, and is no rank: train in one that is "
            "started anew, without that rank's RANK and WORLD_SIZE, or give train() a LocalSession"
        )
    elif read_launch_env().launched:
        yield init()
    else:
        with LocalSession() as local:
            yield local
