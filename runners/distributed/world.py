"""The processes of one attempt: their store, agreement, watcher and process groups.

Only process groups created here are destroyed here; a default group that the user created stays open.
"""

from __future__ import annotations

import atexit
import os
import secrets
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from torchrelay.checkpoint.storage.work import hanging
from torchrelay.errors import PeerError, RelayError, UsageError, exit_code_of
from torchrelay.jobs.cluster import NodePlace
from torchrelay.jobs.session import Peers, Solo
from torchrelay.records import dataclass
from torchrelay.runners.distributed import launcher
from torchrelay.runners.distributed.agreement import LoopWatch, StorePeers
from torchrelay.runners.distributed.failure_watcher import Watcher, join_host_monitor, patience_of
from torchrelay.runners.distributed.launcher import LaunchEnv, names_by_rank
from torchrelay.runners.distributed.liveness import ProcessId, by_group, is_orphan, own_process
from torchrelay.runners.distributed.loops import Loops
from torchrelay.runners.distributed.rendezvous import (
    Deadline,
    Hosts,
    StoreClient,
    agree_on_nonce,
    connect,
    ranks_text,
)


class GroupWire:
    """A `Wire` over a dedicated gloo group, whose timeout limits each broadcast."""

    def __init__(self, group: Any, rank: int) -> None:
        self.rank, self._group = rank, group

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
    """Return the device of this process: its own GPU if there are any, else the CPU."""
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
            "(torchrun --nproc-per-node=gpu)"
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
        self.posted = 0  # number of agreements of this rank

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
                f"{env.rank} of {env.world_size} (RANK, WORLD_SIZE): start with torchrun, not mp.spawn, "
                "and let torchrelay.init() create the group"
            )
        self.default = dist.group.WORLD
        self.flags = self.flags_of(range(env.world_size))  # agreements of all ranks

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
        """Return the group of some ranks, created at the first call; all ranks of the job call this."""
        members = tuple(sorted(ranks))
        if members not in self._placed:
            every = members == tuple(range(self._env.world_size))
            self._placed[members] = self.default if every else self._new_group(list(members), None)
        return self._placed[members]

    def wire(self) -> GroupWire | None:
        """Return the wire for bytes of CPU memory, with a gloo group of its own; None for a single rank."""
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
        group = dist.new_group(ranks, timeout=self._timeout, backend=backend)
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            self._made.append(group)
        return group


START_SECS = 300.0
_LATE_AT_THE_END_SECS = 3600.0


class World:
    """All processes of a job, as seen by one of them; `close` ends it.

    Without a launcher there is neither store nor watcher, only a process group of one.
    """

    def __init__(
        self, env: LaunchEnv, device: torch.device, backend: str, *, timeout_secs: float, start_secs: float
    ) -> None:
        self.env = env
        self.device = device
        self.processes: tuple[ProcessId, ...] = (own_process(env.rank),)
        self.peers: Peers = Solo()
        self.watcher: Watcher | None = None
        self.loops = Loops()
        self._loop_watch: LoopWatch | None = None
        self._places = [asdict(_own_place(env, self.processes[0].host))]
        self._served: StoreClient | None = None
        self._store: StoreClient | None = None
        self.nonce = ""
        self._closed = False
        if env.launched:
            self._meet(start_secs)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        try:
            self.groups = ProcessGroups(env, self._store, device, backend, timeout_secs, self._loop_watch)
        except Exception as error:
            self.blame("creating the process groups", error)
            raise
        self.loops.collectives = self.groups.collectives
        self._excepthook, sys.excepthook = sys.excepthook, self._blame_uncaught
        atexit.register(self.close)
        launcher.worlds.append(self)

    def places(self, declared: tuple[str, ...]) -> tuple[NodePlace, ...]:
        """Return the places of all nodes if the job declares these names."""
        names = names_by_rank(declared, self.env.world_size)
        return tuple(
            NodePlace(**(place | {"name": name})) for name, place in zip(names, self._places, strict=True)
        )

    def blame(self, task: str, error: BaseException, shown: str | None = None) -> bool:
        """Report this rank's error as the job's failure, unless another was first; True if all ranks know.

        `shown` replaces the traceback; Ctrl-C has none. An error that looks like a lost connection first
        waits briefly for its cause to be reported.
        """
        if self.watcher is None:
            return False
        interrupted = isinstance(error, KeyboardInterrupt)
        trace = "KeyboardInterrupt (Ctrl-C)" if interrupted else "".join(traceback.format_exception(error))
        text, consequence = shown or trace, is_consequence(error)
        return self.watcher.report_failure(task, text, code_of(error), consequence=consequence) is not None

    def _blame_uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Report an uncaught exception of the script after Python has printed it."""
        self._excepthook(kind, error, trace)
        if not isinstance(error, (KeyboardInterrupt, SystemExit)):
            self.blame("the script", error)

    def wait_for_all_ranks(self, secs: float) -> bool:
        """Wait at most `secs` until all ranks reach their end; return whether they did."""
        if self._store is None or self.env.world_size == 1:
            return True
        keys, deadline = self._keys("end"), Deadline(secs)
        self._store.put(keys[self.env.rank], b"")
        while not deadline.over and (self.watcher is None or self.watcher.failure is None):
            if self._store.wait(keys, deadline.left):
                return True
        return False

    def late_ranks(self) -> str:
        """Name the ranks that have not reached their end."""
        store = self._store
        return ranks_text(
            [rank for rank, key in enumerate(self._keys("end")) if store and not store.has(key)]
        )

    def close(self) -> None:
        """Destroy the created groups, announce the exit of this rank, stop watching. Once.

        A rank that serves the store stays until the others have left, because they need it.
        """
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        launcher.worlds.remove(self)
        if sys.excepthook == self._blame_uncaught:
            sys.excepthook = self._excepthook
        if self.watcher is None or self.watcher.failure is None:
            self.groups.destroy()
        store = self._store
        with suppress(PeerError):  # the rank that serves the store is gone already
            if isinstance(self.peers, StorePeers):
                self.peers.leave()
            if store is not None:
                store.put(f"gone/{self.env.rank}", b"")
                deadline, others = Deadline(_LATE_AT_THE_END_SECS), self._keys("gone")
                while self.env.hosts_store and not deadline.over and not store.wait(others):
                    if self.watcher is not None and self.watcher.failure is not None:
                        store.wait(others, 2 * self.watcher.patience.look)
                        break
        if self.watcher is not None:
            self.watcher.stop()

    def _keys(self, what: str) -> list[str]:
        return [f"{what}/{rank}" for rank in range(self.env.world_size)]

    def _meet(self, start_secs: float) -> None:
        """Connect to the store and the other ranks, and start agreement and watcher."""
        deadline, parent = Deadline(start_secs), os.getppid() if self.env.elastic else None

        def check() -> None:
            if parent is not None and is_orphan(parent):
                raise PeerError("the torchrun that started this rank is gone: restart the job")

        self._served = connect(self.env, start_secs, check)  # kept: a store that rank 0 serves ends with it
        below = self._served.clone(f"tr/{self.env.run_id or 'job'}")
        self.nonce = agree_on_nonce(  # separates the attempts of a launch
            below, self.env.rank, self.env.world_size, timeout_secs=max(1.0, deadline.left), check=check
        )
        self._store = below.clone(self.nonce)
        peers = StorePeers(self._store.clone("peers"), self.env.rank, self.env.world_size)
        own = own_process(self.env.rank)
        start = {"process": asdict(own), "place": asdict(_own_place(self.env, own.host))}
        starts = peers.exchange("start", start)
        self.processes = tuple(ProcessId(**other["process"]) for other in starts)
        self._places = [other["place"] for other in starts]
        watch = self._loop_watch = LoopWatch(
            self._store,
            self.env.rank,
            self.env.world_size,
            self.loops,
            failure=lambda: self.watcher.failure_text() if self.watcher else None,
            ask=lambda ranks: self.watcher.ask(ranks) if self.watcher else {},
        )
        patience, monitor = patience_of(os.environ), None
        rank = (self._store, self.env.rank, self.processes)
        if self.env.world_size > 1:  # a single rank needs no monitor: it may be stopped for long
            monitor = join_host_monitor(*rank, self.env.master_addr, patience)
        self.watcher = Watcher(
            *rank, parent=parent, monitor=monitor, hanging=hanging, astray=watch.astray, patience=patience
        ).start()
        peers.name_of = lambda rank: str(self.processes[rank])
        peers.failure = self.watcher.failure_text
        peers.ask = self.watcher.ask
        peers.waiting = watch.show_waiting
        if self.env.agent_store:  # the launcher's store outlives the attempts, and no other launch has it
            peers.launch = self._served.put_once("tr/launch", secrets.token_hex(8).encode()).decode()
        peers.hosts = Hosts.of(by_group(self.processes).values())
        self.peers = peers


def _own_place(env: LaunchEnv, host: str) -> NodePlace:
    """Return the place of this rank under its default node name."""
    return NodePlace(
        name=f"trainer_{env.rank}",
        rank=env.rank,
        world_size=env.world_size,
        host=host,
        host_index=env.host_index,
        local_rank=env.local_rank,
        role=env.role,
        process=env.rank,
    )


_SIGNS = ("connection closed by peer", "connection reset", "broken pipe", "timed out waiting", "nccl", "gloo")


def is_consequence(error: BaseException) -> bool:
    """Return True if an error looks as if another process caused it."""
    chain = _chain(error)
    return _is_broken(chain) or _is_from_peer(chain)


def code_of(error: BaseException) -> int:
    """Return the exit code: a task that failed by a broken connection counts as a lost peer."""
    code = exit_code_of(error)
    chain = _chain(error)
    return PeerError.exit_code if code == 1 and not _is_from_peer(chain) and _is_broken(chain) else code


def why_of(error: BaseException) -> str:
    """Return why a run failed, in one line; if another rank's exit caused it, that comes first."""
    reason = f"{type(error).__name__}: {error}".removesuffix(": ")
    world = launcher.current_world()
    first = world.watcher.failure if world is not None and world.watcher is not None else None
    chain = _chain(error)
    if world is None or first is None or first.rank == world.env.rank:
        return reason
    if _is_from_peer(chain) or not _is_broken(chain):
        return reason
    headline = first.headline()
    return reason if headline in reason else f"{headline}; consequence on this rank: {reason}"


def _is_from_peer(chain: list[BaseException]) -> bool:
    """Return True if any of the errors was reported by another rank."""
    return any(isinstance(one, RelayError) and one.of_rank is not None for one in chain)


def _is_broken(chain: list[BaseException]) -> bool:
    """Return True if any of the errors is that of a connection to another process."""
    return any(
        isinstance(one, (PeerError, torch.distributed.DistError))
        or (isinstance(one, RuntimeError) and any(sign in str(one).lower() for sign in _SIGNS))
        for one in chain
    )


def _chain(error: BaseException) -> list[BaseException]:
    """Return an error and its causes."""
    chain: list[BaseException] = []
    step: BaseException | None = error
    while step is not None and step not in chain:
        chain.append(step)
        step = step.__cause__ or (None if step.__suppress_context__ else step.__context__)
    return chain
