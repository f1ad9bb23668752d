"""Process groups of a session: for training, for flags, for bytes, and for placed tasks.

Only groups created here are destroyed here; a default group that the user created stays open.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torchrelay.errors import PeerError, UsageError
from torchrelay.records import dataclass
from torchrelay.runners.distributed.agreement import LoopWatch
from torchrelay.runners.distributed.environment import LaunchEnv
from torchrelay.runners.distributed.rendezvous import StoreClient


class GroupWire:
    """A `Wire` over a dedicated gloo group, whose timeout limits each broadcast."""

    def __init__(self, group: Any, rank: int) -> None:
        self.rank = rank
        self._group = group

    def broadcast(self, memory: memoryview, source: int) -> None:
        """Send or receive in place; see `jobs.wire`."""
        try:
            dist.broadcast(torch.frombuffer(memory, dtype=torch.uint8), src=source, group=self._group)
        except RuntimeError as error:
            lost = PeerError(
                f"{len(memory)} bytes from rank {source} did not arrive: {error}; restart, or load without "
                "share_reads"
            )
            lost.consequence = True
            raise lost from error


DEFAULT_TIMEOUT_SECS = 1800.0
_MOST_FLAGS = 8  # all agreements have this size, so that ranks out of step still match


def choose_device(env: LaunchEnv, wanted: str | torch.device | None = None) -> torch.device:
    """Return the device of this process: its own GPU if there are any, else the CPU.

    Raises UsageError if this host has fewer GPUs than processes.
    """
    if wanted is not None:
        device = torch.device(wanted)
        if device.type != "cuda" or device.index is not None:
            return device
    elif not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if env.local_rank >= count:
        raise UsageError(
            f"LOCAL_RANK={env.local_rank}, but this host has {count} visible GPUs: start one process per GPU "
            "(torchrun --nproc-per-node=gpu), or set device='cuda:0' if each process sees only its own GPU"
        )
    return torch.device("cuda", env.local_rank)


@dataclass(frozen=True)
class PendingFlags:
    """A posted agreement; `wait` may be called several times."""

    flags: torch.Tensor
    count: int
    work: Any = None
    watch: LoopWatch | None = None

    def wait(self) -> tuple[int, ...]:
        """Block until all processes have posted; return the maximum of every flag."""
        if self.watch is not None:
            self.watch.wait(self.work)
        elif self.work is not None:
            self.work.wait()
        return tuple(int(flag) for flag in self.flags[: self.count])


class Flags:
    """Agreements of some ranks over a dedicated gloo group; a single rank needs no group."""

    def __init__(self, group: Any = None, watch: LoopWatch | None = None) -> None:
        self._group, self._watch = group, watch
        self.posted = 0
        """Number of agreements of this rank."""

    def agree_flags(self, flags: Sequence[int]) -> PendingFlags:
        """Post up to 8 small numbers without blocking; `wait` of the result returns their maximum over ranks.

        All ranks post in the same order. Collectives of the training do not delay them.
        """
        values = torch.tensor([*flags, *[0] * (_MOST_FLAGS - len(flags))], dtype=torch.int64)
        if self._group is None:
            return PendingFlags(values, len(flags))
        self.posted += 1
        work = dist.all_reduce(values, dist.ReduceOp.MAX, group=self._group, async_op=True)
        return PendingFlags(values, len(flags), work, self._watch)

    def catch_up(self, posted: int) -> None:
        """Take part in agreements that other ranks have already posted, to get in step with them."""
        for _ in range(posted - self.posted):
            self.agree_flags(()).wait()


class ProcessGroups:
    """Create the groups of one session, in the same order on all ranks, and destroy them."""

    def __init__(
        self,
        env: LaunchEnv,
        store: StoreClient | None,
        device: torch.device,
        backend: str,
        timeout_secs: float,
        watch: LoopWatch | None,
    ) -> None:
        self._env, self._watch = env, watch
        self._timeout = timedelta(seconds=timeout_secs)
        self._made: list[Any] = []
        self._placed: dict[tuple[int, ...], Any] = {}
        self._flags_of: dict[tuple[int, ...], Flags] = {}
        self._wire: GroupWire | None = None
        self.owns_default = not dist.is_initialized()
        if self.owns_default:
            # The launcher's store outlives attempts: with the default prefix a restarted job would read the
            # gloo addresses of dead processes.
            dist.init_process_group(
                backend,
                store=store.raw("torch") if store else dist.HashStore(),  # type: ignore[attr-defined]
                rank=env.rank,
                world_size=env.world_size,
                timeout=self._timeout,
                device_id=device if device.type == "cuda" else None,
            )
        elif (seen := (dist.get_rank(), dist.get_world_size())) != (env.rank, env.world_size):
            raise UsageError(
                f"the existing process group is rank {seen[0]} of {seen[1]}, but the environment has rank "
                f"{env.rank} of {env.world_size} (RANK, WORLD_SIZE): start with torchrun and let "
                "torchrelay.init() create the group"
            )
        self.default = dist.group.WORLD
        self.flags = self.flags_of(range(env.world_size))
        """Agreements of all ranks."""

    def flags_of(self, ranks: Sequence[int]) -> Flags:
        """Return the agreements of some ranks; all ranks of the job call this, in the same order."""
        members = tuple(sorted(ranks))
        if members not in self._flags_of:
            group = self._new_group(list(members), "gloo") if len(members) > 1 else None
            self._flags_of[members] = Flags(group, self._watch)
        return self._flags_of[members]

    def posted(self) -> dict[str, int]:
        """Return how many agreements this rank has posted, by the ranks that agree."""
        return {",".join(map(str, members)): flags.posted for members, flags in self._flags_of.items()}

    def catch_up(self, posted: Sequence[dict[str, int]]) -> None:
        """Bring this rank's agreements to the numbers `posted` of all ranks."""
        for members, flags in list(self._flags_of.items()):
            if self._env.rank in members:
                key = ",".join(map(str, members))
                flags.catch_up(max(posted[rank].get(key, 0) for rank in members))

    def of_ranks(self, ranks: Sequence[int]) -> Any:
        """Return the group of some ranks, created at the first call; all ranks of the job call this.

        Ranks outside of it get torch's NON_GROUP_MEMBER.
        """
        members = tuple(sorted(ranks))
        if members not in self._placed:
            every = members == tuple(range(self._env.world_size))
            self._placed[members] = self.default if every else self._new_group(list(members), None)
        return self._placed[members]

    def wire(self) -> GroupWire | None:
        """Return the wire for bytes of CPU memory, created at the first call; None for a single rank.

        All ranks call this in the same order. It has a gloo group of its own.
        """
        if self._wire is None and self._env.world_size > 1:
            self._wire = GroupWire(self._new_group(None, "gloo"), self._env.rank)
        return self._wire

    def collectives(self) -> int:
        """Return how many collectives this rank has started in the default group; 0 if unknown."""
        try:
            return int(self.default._get_sequence_number_for_group())  # type: ignore[union-attr]
        except (AttributeError, RuntimeError):
            return 0

    def destroy(self) -> None:
        """Destroy the groups created here, once. Live DDP objects are harmless afterwards."""
        if not dist.is_initialized():  # the user destroyed them
            return
        if self.owns_default:
            dist.destroy_process_group()
        else:
            for group in reversed(self._made):
                dist.destroy_process_group(group)
        self._made.clear()
        self._placed.clear()
        self._flags_of.clear()
        self._wire = None

    def _new_group(self, ranks: list[int] | None, backend: str | None) -> Any:
        """Create a group; all ranks of the job call this."""
        group = dist.new_group(ranks, timeout=self._timeout, backend=backend)
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            self._made.append(group)
        return group
