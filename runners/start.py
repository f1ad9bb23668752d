"""The first line of a distributed script: device, process group, seed, and the current session."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torchrelay.errors import UsageError
from torchrelay.jobs.seeding import seed as set_seed
from torchrelay.runners.distributed_session import DistributedSession
from torchrelay.runners.launch_env import read_launch_env
from torchrelay.runners.local_session import LocalSession

if TYPE_CHECKING:
    import torch

    from torchrelay.runners.session_base import SessionBase

_current: list[SessionBase] = []


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
    made = current_session()
    if made is not None and not isinstance(made, DistributedSession):
        raise UsageError("a local session is current: close it before torchrelay.init()")
    session = made or DistributedSession.from_env(backend=backend, device=device)
    if seed is not None:
        set_seed(seed)
    make_current(session)
    return session


def current_session() -> SessionBase | None:
    """Return the session that is current and open; None when there is none."""
    while _current and _current[-1].closed:
        _current.pop()
    return _current[-1] if _current else None


def make_current(session: SessionBase) -> None:
    """Make a session the current one until it is closed."""
    if session not in _current:
        _current.append(session)


@contextmanager
def current_or_new_session(session: SessionBase | None = None) -> Iterator[SessionBase]:
    """Yield `session`, else the current one, else a new one: distributed under torchrun, else local.

    A new distributed session stays open and current until the process leaves, because its groups
    are the user's too; a new local one is closed.
    """
    found = session or current_session()
    if found is not None:
        yield found
    elif read_launch_env().launched:
        yield init()
    else:
        with LocalSession() as local:
            yield local
