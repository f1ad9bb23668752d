"""Sessions of one process: `init`, the current session, and `LocalSession`, which hosts all nodes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torchrelay.errors import NotAllowedNowError, UsageError
from torchrelay.jobs.cluster import NodePlace, check_node_name
from torchrelay.jobs.job import TaskGroup
from torchrelay.jobs.random import RandomStreams
from torchrelay.jobs.random import seed as set_seed
from torchrelay.jobs.session import Solo, is_grouped
from torchrelay.runners.distributed.launcher import numbered_first, read_launch_env, world_of_parent
from torchrelay.runners.session.base import SessionBase

if TYPE_CHECKING:
    import torch

    from torchrelay.runners.session.distributed import DistributedSession


_DEFAULT = ("trainer_0",)


class _Agreed(tuple[int, ...]):
    """The agreement of a single process with itself."""

    def wait(self) -> tuple[int, ...]:
        """Return the own flags."""
        return self


class LocalSession(SessionBase):
    """Run groups in this process, without process groups.

    Every node has its own workspace for the life of the session. If there are several nodes, each also has
    its own random streams, which start as copies of the process's and are swapped in while the node runs.

    Args:
        nodes: Names of the emulated nodes in rank order; default: the declared nodes of the job or group that
            runs, else `trainer_0`.

    Raises:
        UsageError: Names are invalid, repeated or missing.
    """

    def __init__(self, nodes: Sequence[str] | None = None) -> None:
        super().__init__()
        self.peers = Solo()
        self._fixed = nodes is not None
        self._declared = False
        self._places = _places(_checked(nodes) if nodes is not None else _DEFAULT)
        self._streams: dict[str, RandomStreams] = {}
        self._swapped_in: str | None = None

    def __repr__(self) -> str:
        return f"LocalSession({', '.join(place.name for place in self._places)})"

    @property
    def nodes(self) -> tuple[NodePlace, ...]:
        """All nodes; all are hosted here."""
        return self._places

    @property
    def local_nodes(self) -> tuple[NodePlace, ...]:
        """All nodes; all are hosted here."""
        return self._places

    @property
    def device(self) -> torch.device:
        """The current GPU if there is one, else the CPU."""
        import torch

        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def place(self, node_names: Sequence[str]) -> None:
        """Emulate the declared nodes of a job, `trainer_0` if it declares none.

        Workspaces of earlier nodes are kept. Raises UsageError for a node that was not passed to the session.
        """
        self._check_open()
        known = [place.name for place in self._places]
        unknown = [name for name in node_names if name not in known]
        if self._fixed and unknown:
            raise UsageError(
                f"the job declares node {unknown[0]!r}, but this session has only {', '.join(known)}: "
                "add it to LocalSession(nodes=[...])"
            )
        if not self._fixed:
            names = numbered_first(_checked(node_names)) if node_names else _DEFAULT
            self._places, self._declared = _places(names), bool(node_names)

    def prepare(self, group: TaskGroup) -> None:
        """Also emulate nodes of a group that no job has declared."""
        names = [place.name for place in self._places]
        if not self._fixed and not set(group.used_nodes()) <= set(names):
            known = names if self._declared else []
            self.place([*known, *(name for name in group.used_nodes() if name not in known)])

    def agree_flags(self, flags: tuple[int, ...]) -> _Agreed:
        """Return the own flags: there are no other processes."""
        return _Agreed(flags)

    # Random streams

    def streams(self, node: str) -> RandomStreams:
        """Return the current random streams of a node."""
        self._local(node)
        if self._uses_process_streams(node):
            return RandomStreams.capture()
        return self._streams.setdefault(node, RandomStreams.capture())

    def set_streams(self, node: str, streams: RandomStreams) -> None:
        """Set the random streams of a node.

        Args:
            node: Name of the node.
            streams: The states to continue from.

        Example:
            session.set_streams("trainer_0", streams)
        """
        self._local(node)
        if self._uses_process_streams(node):
            streams.restore()
        else:
            self._streams[node] = streams

    @contextmanager
    def on_node(self, node: str) -> Iterator[None]:
        """Run the block with the random streams of `node`, then restore the previous ones."""
        self._local(node)
        if self._uses_process_streams(node):
            yield
            return
        before, outer = RandomStreams.capture(), self._swapped_in
        self._streams.setdefault(node, before).restore()
        self._swapped_in = node
        try:
            yield
        finally:
            self._streams[node] = RandomStreams.capture()
            self._swapped_in = outer
            before.restore()

    def _uses_process_streams(self, node: str) -> bool:
        """Return True if the node's streams are those of the process now."""
        return len(self._places) == 1 or self._swapped_in == node


def _places(names: Sequence[str]) -> tuple[NodePlace, ...]:
    return tuple(
        NodePlace(name, rank, len(names), local_rank=rank, process=0) for rank, name in enumerate(names)
    )


def _checked(names: Sequence[str]) -> tuple[str, ...]:
    if isinstance(names, str) or not names:
        raise UsageError(f"invalid nodes={names!r}: expected a list of one or more node names")
    found = tuple(check_node_name(name) for name in names)
    twice = [name for name in found if found.count(name) > 1]
    if twice:
        raise UsageError(f"node {twice[0]!r} is named twice: use a name of its own for each node")
    return found


_made: list[DistributedSession] = []


def init(
    backend: str | None = None, seed: int | None = None, device: str | torch.device | None = None
) -> DistributedSession:
    """Choose the device, create the process group, seed this process; return the current session.

    Under torchrun it is the session of all ranks; plain `python train.py` is a world of one. Objects built
    after a `seed` are identical on all ranks. Later calls return the same session.

    Args:
        backend: Backend of collectives; default: nccl with GPUs, else gloo.
        seed: Seed of Python, numpy and torch.
        device: Device of this process; default: the GPU of the local rank if there is one.

    Returns:
        The session.

    Raises:
        UsageError: The environment or an argument is invalid.
        DeadlineError: Other ranks did not start in time.

    Example:
        session = torchrelay.init(seed=1)
    """
    from torchrelay.runners.session.distributed import DistributedSession

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
    """Return the session of the enclosing `with` block, else the one of `init`, else None."""
    _made[:] = [session for session in _made if not session.closed]
    found = SessionBase.current(required=False) or (_made[-1] if _made else None)
    return found if found is not None and found.process == os.getpid() else None


@contextmanager
def current_or_new_session(session: SessionBase | None = None) -> Iterator[SessionBase]:
    """Yield `session`, else the current one, else a new one: distributed in a group of ranks, else local.

    A new distributed session stays open and current until the process exits, because its groups are also the
    user's; a new local one is closed.
    """
    found = session or current_session()
    if found is not None:
        yield found
    elif (world := world_of_parent()) is not None and world.env.launched:
        raise NotAllowedNowError(
            f"this process was forked from rank {world.env.rank}, so it is not a rank: pass train() a "
            "LocalSession"
        )
    elif read_launch_env().launched or is_grouped():
        yield init()
    else:
        with LocalSession() as local:
            yield local
