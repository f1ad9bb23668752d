"""Connect the processes of one attempt: their store, agreement, watcher and process groups."""

from __future__ import annotations

import atexit
import os
import secrets
import sys
import traceback
from dataclasses import asdict
from types import TracebackType

import torch

from torchrelay.checkpoint.storage.work import hanging
from torchrelay.errors import PeerError, RelayError, exit_code_of
from torchrelay.jobs.cluster import NodePlace
from torchrelay.jobs.session import Peers, Solo
from torchrelay.runners.distributed import environment
from torchrelay.runners.distributed.agreement import LoopWatch, StorePeers
from torchrelay.runners.distributed.environment import LaunchEnv, names_by_rank
from torchrelay.runners.distributed.failure_watcher import Watcher, patience_of
from torchrelay.runners.distributed.liveness import ProcessId, by_group, is_orphan, own_process
from torchrelay.runners.distributed.loops import Loops
from torchrelay.runners.distributed.monitor_client import join_host_monitor
from torchrelay.runners.distributed.process_groups import ProcessGroups
from torchrelay.runners.distributed.rendezvous import (
    Deadline,
    Hosts,
    StoreClient,
    agree_on_nonce,
    connect,
    ranks_text,
)

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
        environment.enter(self)

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
        text = shown or _text(error)
        consequence = is_consequence(error)
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
        environment.leave(self)
        if sys.excepthook == self._blame_uncaught:
            sys.excepthook = self._excepthook
        if self.watcher is None or self.watcher.failure is None:
            self.groups.destroy()
        self._linger()
        if self.watcher is not None:
            self.watcher.stop()

    def _linger(self) -> None:
        """Announce the exit; the rank that serves the store waits for the others."""
        if self._store is None:
            return
        try:
            if isinstance(self.peers, StorePeers):
                self.peers.leave()
            self._store.put(f"gone/{self.env.rank}", b"")
            if self.env.hosts_store:
                deadline, others = Deadline(_LATE_AT_THE_END_SECS), self._keys("gone")
                while not deadline.over and not self._store.wait(others):
                    if self.watcher is not None and self.watcher.failure is not None:
                        self._store.wait(others, 2 * self.watcher.patience.look)
                        return
        except PeerError:  # the rank that serves the store is gone already
            return

    def _keys(self, what: str) -> list[str]:
        """Return the keys `what/0`, `what/1`, ... of all ranks."""
        return [f"{what}/{rank}" for rank in range(self.env.world_size)]

    def _meet(self, start_secs: float) -> None:
        """Connect to the store and the other ranks, and start agreement and watcher."""
        deadline, parent = Deadline(start_secs), os.getppid() if self.env.elastic else None

        def check() -> None:
            if parent is not None and is_orphan(parent):
                raise PeerError("the torchrun that started this rank is gone: restart the job")

        self._served = connect(self.env, start_secs, check)  # kept: a store that rank 0 serves ends with it
        below = self._served.clone(self.env.store_prefix)
        nonce = agree_on_nonce(
            below, self.env.rank, self.env.world_size, timeout_secs=max(1.0, deadline.left), check=check
        )
        self.nonce = nonce
        self._store = below.clone(nonce)
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
        if self.env.world_size > 1:  # a single rank needs no monitor: it may be stopped for long
            silence, look, master = patience.silence, patience.look, self.env.master_addr
            monitor = join_host_monitor(
                self._store, self.env.rank, self.processes, master, silence=silence, look=look
            )
        self.watcher = Watcher(
            self._store,
            self.env.rank,
            self.processes,
            parent=parent,
            hanging=hanging,
            astray=watch.astray,
            monitor=monitor,
            patience=patience,
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


def _text(error: BaseException) -> str:
    """Return the text of an error that all ranks print: its traceback, or one line for Ctrl-C."""
    if isinstance(error, KeyboardInterrupt):
        return "KeyboardInterrupt (Ctrl-C)"
    return "".join(traceback.format_exception(error))


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
    """Return why a run failed, in one line.

    If the exit of another rank caused the error (a broken connection, say), that failure comes first.
    """
    reason = f"{type(error).__name__}: {error}".removesuffix(": ")
    world = environment.current_world()
    first = world.watcher.failure if world is not None and world.watcher is not None else None
    chain = _chain(error)
    if (
        world is None
        or first is None
        or first.rank == world.env.rank
        or _is_from_peer(chain)
        or not _is_broken(chain)
    ):
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
