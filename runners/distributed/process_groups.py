"""The process groups of a session: the training's, small ones for flags and bytes, those of placed tasks.

Only groups made here are destroyed here; a default group that the user made stays the user's.
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
    """A `Wire` over a gloo group that nobody else uses; the group's timeout limits each broadcast."""

    def __init__(self, group: Any, rank: int) -> None:
        self.rank = rank
        self._group = group

    def broadcast(self, memory: memoryview, source: int) -> None:
        """Send or receive in place; see `jobs.wire`."""
        try:
            dist.broadcast(torch.frombuffer(memory, dtype=torch.uint8), src=source, group=self._group)
        except RuntimeError as error:
            lost = PeerError(
                f"{len(memory)} bytes from rank {source} did not come: {error}; start again, or load without "
                "share_reads"
            )
            lost.consequence = True
            raise lost from error


DEFAULT_TIMEOUT_SECS = 1800.0
_MOST_FLAGS = 8  # all agreements are alike, also those of ranks that are out of step


def choose_device(env: LaunchEnv, wanted: str | torch.device | None = None) -> torch.device:
    """Return the device of this process: its own GPU where there are any, else the CPU.

    Raises UsageError when there are fewer GPUs than processes on this host.
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
            f"LOCAL_RANK={env.local_rank} but this host shows {count} GPUs: start one process per GPU "
            "(torchrun --nproc-per-node=gpu), ask for device='cuda:0' where every process is shown only its "
            "own GPU, or for device='cpu'"
        )
    return torch.device("cuda", env.local_rank)


@dataclass(frozen=True)
class FlagsOnTheWay:
    """An agreement that was posted; `wait` may be called once or more."""

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
    """Agreements of some ranks over a gloo group that nothing else uses; a single rank has none."""

    def __init__(self, group: Any = None, watch: LoopWatch | None = None) -> None:
        self._group, self._watch = group, watch
        self.posted = 0
        """Agreements that this rank has taken part in."""

    def agree_flags(self, flags: Sequence[int]) -> FlagsOnTheWay:
        """Post small numbers, at most 8, and return at once; the maximum over the ranks comes by `wait`.

        The ranks post in the same order, and never wait behind the training's collectives.
        """
        values = torch.tensor([*flags, *[0] * (_MOST_FLAGS - len(flags))], dtype=torch.int64)
        if self._group is None:
            return FlagsOnTheWay(values, len(flags))
        self.posted += 1
        work = dist.all_reduce(values, dist.ReduceOp.MAX, group=self._group, async_op=True)
        return FlagsOnTheWay(values, len(flags), work, self._watch)

    def catch_up(self, posted: int) -> None:
        """Take part in what other ranks have posted and this one has not, so that all are in step again."""
        for _ in range(posted - self.posted):
            self.agree_flags(()).wait()


class ProcessGroups:
    """Makes the groups of one session, all ranks in the same order, and destroys them."""

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
            # The launcher's store outlives attempts and torch adds no prefix of its own: with the default
            # prefix a restarted job reads the gloo addresses of processes that are gone.
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
                f"the process group that exists is rank {seen[0]} of {seen[1]}, the environment says rank "
                f"{env.rank} of {env.world_size} (RANK, WORLD_SIZE): start with torchrun and let "
                "torchrelay.init() make the group"
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
        """How many agreements this rank has posted, by the ranks that agree."""
        return {",".join(map(str, members)): flags.posted for members, flags in self._flags_of.items()}

    def catch_up(self, posted: Sequence[dict[str, int]]) -> None:
        """Bring this rank's agreements to where those of the others are, of whom `posted` tells."""
        for members, flags in list(self._flags_of.items()):
            if self._env.rank in members:
                key = ",".join(map(str, members))
                flags.catch_up(max(posted[rank].get(key, 0) for rank in members))

    def of_ranks(self, ranks: Sequence[int]) -> Any:
        """Return the group of some ranks, made at the first time; all ranks of the job call this.

        Ranks outside of it get torch's marker for a group that one is not in.
        """
        members = tuple(sorted(ranks))
        if members not in self._placed:
            every = members == tuple(range(self._env.world_size))
            self._placed[members] = self.default if every else self._new_group(list(members), None)
        return self._placed[members]

    def wire(self) -> GroupWire | None:
        """Return what moves bytes of CPU memory, made at the first time; None for a single rank.

        All ranks call this in the same order. Its group is a gloo group that nothing else uses.
        """
        if self._wire is None and self._env.world_size > 1:
            self._wire = GroupWire(self._new_group(None, "gloo"), self._env.rank)
        return self._wire

    def collectives(self) -> int:
        """How many collectives this rank has begun in the group of all ranks; 0 where torch does not say."""
        try:
            return int(self.default._get_sequence_number_for_group())  # type: ignore[union-attr]
        except (AttributeError, RuntimeError):
            return 0

    def destroy(self) -> None:
        """Destroy what was made here, once. Live DDP objects are harmless afterwards."""
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
        group = dist.new_group(ranks, timeout=self._timeout, backend=backend)
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            self._made.append(group)
        return group
