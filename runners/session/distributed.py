"""`DistributedSession`: a session in which every process hosts one node, over torch.distributed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torchrelay.errors import NotAllowedNowError, PeerError, RelayError
from torchrelay.jobs.cluster import NodePlace, check_node_name
from torchrelay.jobs.job import TaskGroup
from torchrelay.jobs.session import Wire
from torchrelay.runners.distributed.launcher import LaunchEnv, current_world, read_launch_env
from torchrelay.runners.distributed.world import (
    DEFAULT_TIMEOUT_SECS,
    START_SECS,
    PendingFlags,
    World,
    choose_device,
    code_of,
    is_consequence,
)
from torchrelay.runners.session.base import SessionBase
from torchrelay.runners.session.steps import Agreeing

if TYPE_CHECKING:
    import torch

MEETING_SECS = 5.0
"""Time that a rank whose task failed waits for the others to meet, before it ends the job."""


class DistributedSession(SessionBase):
    """Run groups on all ranks of a launched job; each process hosts the node of its rank.

    A failed task is raised on all ranks as soon as they have met. If they do not meet within seconds, because
    they wait in a collective for the failed rank, every rank prints the failure and exits (see
    `runners.distributed.failure_watcher`).

    `close` destroys the process groups created by the session, and no others.
    """

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.peers, self.loops = world.peers, world.loops
        self._declared: tuple[str, ...] = ()
        self._places = world.places(())
        self._alarm: threading.Timer | None = None

    @classmethod
    def from_env(
        cls,
        backend: str | None = None,
        *,
        device: str | torch.device | None = None,
        timeout_secs: float = DEFAULT_TIMEOUT_SECS,
        start_secs: float = START_SECS,
    ) -> DistributedSession:
        """Connect the processes that torchrun started; plain `python train.py` is a world of one.

        An existing default process group is used and not destroyed.

        Args:
            backend: Backend of collectives; default: nccl with GPUs, else gloo. Flags use a separate gloo
                group.
            device: Device of this process; default: the GPU of the local rank if there is one.
            timeout_secs: Time limit of each collective.
            start_secs: Time limit of the rendezvous.

        Returns:
            The session.

        Raises:
            UsageError: A variable of the environment is invalid.
            DeadlineError: Ranks did not start in time.
            NotAllowedNowError: Another distributed session is open.

        Example:
            with DistributedSession.from_env() as session:
                JobRunner(job, "runs/x").train(session)
        """
        if current_world() is not None:
            raise NotAllowedNowError("this process already has a distributed session: close it first")
        env = read_launch_env()
        chosen = choose_device(env, device)
        backend = backend or ("nccl" if chosen.type == "cuda" else "gloo")
        return cls(World(env, chosen, backend, timeout_secs=timeout_secs, start_secs=start_secs))

    def __repr__(self) -> str:
        return f"DistributedSession(rank {self.env.rank} of {self.env.world_size})"

    @property
    def env(self) -> LaunchEnv:
        """The launch environment, with the launcher's id and restart count."""
        return self.world.env

    @property
    def nodes(self) -> tuple[NodePlace, ...]:
        """All nodes of the job, one per rank."""
        return self._places

    @property
    def local_nodes(self) -> tuple[NodePlace, ...]:
        """The node that this process hosts."""
        return (self._places[self.env.rank],)

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.world.device

    def place(self, node_names: Sequence[str]) -> None:
        """Place declared nodes on ranks; raises UsageError for more nodes than ranks."""
        self._check_open()
        declared = tuple(check_node_name(name) for name in node_names)
        self._places = self.world.places(declared)
        self._declared = declared

    def prepare(self, group: TaskGroup) -> None:
        """Place nodes that a group names and no job has declared."""
        known = {place.name for place in self._places}
        unknown = [name for name in group.used_nodes() if name not in known]
        if unknown:
            self.place([*self._declared, *unknown])

    def agree_flags(self, flags: tuple[int, ...]) -> PendingFlags:
        """Post small numbers without blocking; `wait` returns the maximum over all ranks."""
        return self.world.groups.flags.agree_flags(flags)

    def agreement_of(self, ranks: Sequence[int]) -> Agreeing | None:
        """Return the agreement of some ranks, over a group of their own; None for one."""
        return self.world.groups.flags_of(ranks) if len(ranks) > 1 else None

    def _all_failed(self) -> None:
        """Bring the ranks in step again: one may have left a loop in which others had posted an agreement.

        Otherwise torch would wait for it when it destroys the group, holding Python's lock.
        """
        with suppress(PeerError, RuntimeError):  # the known failure is more informative
            groups = self.world.groups
            groups.catch_up(self.peers.exchange("loops after a failure", groups.posted()))

    def group_of_ranks(self, ranks: Sequence[int]) -> Any:
        """Return the process group of some ranks; None for a single one."""
        return self.world.groups.of_ranks(ranks) if len(ranks) > 1 else None

    def wire(self) -> Wire | None:
        """Return the transport of bytes between ranks, over a gloo group created at the first call."""
        return self.world.groups.wire()

    def run(self, work: Any) -> Any:
        """Run a TaskGroup, Task, SessionGroup or callable on the nodes it names; blocks until done."""
        try:
            return super().run(work)
        finally:
            if self._alarm is not None:
                self._alarm.cancel()

    def task_failed(self, what: str, error: BaseException) -> None:
        """Wait briefly for the other ranks to meet, then end the job with the failure.

        Args:
            what: The task or group that failed.
            error: The exception.

        Example:
            session.task_failed("group epoch", error)
        """
        if not isinstance(error, Exception):  # for an exit or an interrupt there is no meeting
            self.world.blame(what, error)
            return
        if isinstance(error, RelayError):
            error.consequence = is_consequence(error)
        self._alarm = threading.Timer(MEETING_SECS, self.world.blame, (what, error))
        self._alarm.daemon = True
        self._alarm.start()

    def code_of(self, error: BaseException) -> int:
        """Return the exit code; a broken connection has the code of the rank that caused it."""
        first = self.world.watcher.failure if self.world.watcher else None
        return first.exit_code if first is not None and is_consequence(error) else code_of(error)

    def release(self) -> None:
        """Release all workspaces as `close` does; processes and groups in `world` stay."""
        super().close()

    def close(self) -> None:
        """Destroy the process groups created here, and no others; may be called again."""
        super().close()
        self.world.close()
