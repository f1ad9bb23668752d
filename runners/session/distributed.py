"""`DistributedSession`: every process plays one node of the job, over torch.distributed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torchrelay.errors import NotAllowedNowError, PeerError, RelayError
from torchrelay.jobs.cluster import NodePlace, check_node_name
from torchrelay.jobs.job import TaskGroup
from torchrelay.jobs.session import Wire
from torchrelay.runners.distributed.environment import LaunchEnv, current_world, read_launch_env
from torchrelay.runners.distributed.process_groups import (
    DEFAULT_TIMEOUT_SECS,
    PendingFlags,
    choose_device,
)
from torchrelay.runners.distributed.world import START_SECS, World, code_of, is_consequence
from torchrelay.runners.session.base import SessionBase
from torchrelay.runners.session.steps import Agreeing

if TYPE_CHECKING:
    import torch

MEETING_SECS = 5.0
"""How long a rank whose task failed lets the others come and hear of it, before it ends the job."""


class DistributedSession(SessionBase):
    """Runs groups on all ranks of a launched job; each process hosts the node of its rank.

    A task that fails is raised on all ranks as soon as they have met. Where they do not come within
    seconds, because they wait in a collective for the rank that failed, every rank prints the failure
    and its process ends (see `runners.distributed.failure_watcher`).

    `close` destroys the process groups that the session made, and no others.
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
        """Meet the other processes that torchrun started; plain `python train.py` is a world of one.

        The device is the GPU of the local rank where there are any, the backend nccl there and gloo
        on the CPU; flags travel on a gloo group beside it. A default process group that exists is
        used and left alone. `timeout_secs` limits each collective, `start_secs` the meeting.

        Raises UsageError naming the variable of the environment that cannot be, DeadlineError naming
        ranks that did not start, NotAllowedNowError while another distributed session is open.
        """
        if current_world() is not None:
            raise NotAllowedNowError(
                "this process has a distributed session already: use it, or close it first"
            )
        env = read_launch_env()
        chosen = choose_device(env, device)
        backend = backend or ("nccl" if chosen.type == "cuda" else "gloo")
        return cls(World(env, chosen, backend, timeout_secs=timeout_secs, start_secs=start_secs))

    def __repr__(self) -> str:
        return f"DistributedSession(rank {self.env.rank} of {self.env.world_size})"

    @property
    def env(self) -> LaunchEnv:
        """What the launcher said, with the launcher's id and restart count."""
        return self.world.env

    @property
    def nodes(self) -> tuple[NodePlace, ...]:
        """All nodes of the job, one per rank."""
        return self._places

    @property
    def local_nodes(self) -> tuple[NodePlace, ...]:
        """The node that this process plays."""
        return (self._places[self.env.rank],)

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.world.device

    def place(self, node_names: Sequence[str]) -> None:
        """Give declared nodes their ranks; raises UsageError for more nodes than ranks."""
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
        """Post small numbers and return at once; the maximum over all ranks comes by `wait`."""
        return self.world.groups.flags.agree_flags(flags)

    def agreement_of(self, ranks: Sequence[int]) -> Agreeing | None:
        """What some ranks agree by, over a group of their own; None for a single one."""
        return self.world.groups.flags_of(ranks) if len(ranks) > 1 else None

    def _all_failed(self) -> None:
        """Bring the ranks in step again: one may have left a loop in which others had posted an agreement.

        Torch would wait for the answer when it takes the group away, with Python's lock held.
        """
        with suppress(PeerError, RuntimeError):  # the failure that all know of says more
            groups = self.world.groups
            groups.catch_up(self.peers.exchange("loops after a failure", groups.posted()))

    def group_of_ranks(self, ranks: Sequence[int]) -> Any:
        """The process group of some ranks; None for a single one, which has nobody to talk to."""
        return self.world.groups.of_ranks(ranks) if len(ranks) > 1 else None

    def wire(self) -> Wire | None:
        """What moves bytes between the ranks over a gloo group of its own, made at the first call."""
        return self.world.groups.wire()

    def run(self, work: Any) -> Any:
        """Run a TaskGroup, Task, SessionGroup or callable on the nodes it names; blocks until done."""
        try:
            return super().run(work)
        finally:
            if self._alarm is not None:
                self._alarm.cancel()

    def task_failed(self, what: str, error: BaseException) -> None:
        """Give the others a moment to come and hear of the failure, then end the job with it."""
        if not isinstance(error, Exception):  # an exit or an interrupt meets nobody
            self.world.blame(what, error)
            return
        if isinstance(error, RelayError):
            error.consequence = is_consequence(error)
        self._alarm = threading.Timer(MEETING_SECS, self.world.blame, (what, error))
        self._alarm.daemon = True
        self._alarm.start()

    def code_of(self, error: BaseException) -> int:
        """A connection that another rank's end has broken is that rank's failure, not one of the program."""
        first = self.world.watcher.failure if self.world.watcher else None
        return first.exit_code if first is not None and is_consequence(error) else code_of(error)

    def release(self) -> None:
        """Let go of all workspaces as `close` does; the processes and groups in `world` go on."""
        super().close()

    def close(self) -> None:
        """Destroy the process groups that were made here and leave the others; may be called again."""
        super().close()
        self.world.close()
