"""Connect processes: the launcher's store, the ranks of this attempt, and the ranks of each host.

A blocking call holds its client, so every user has its own connection by `clone()`. No call waits longer than
`POLL_SECS` at a time; callers keep deadlines by their own monotonic clocks. Values are bytes of any length;
long ones are stored in parts.

The launcher's store outlives attempts, and no number of the launcher distinguishes them: each torchrun counts
only the failures of its own host. Therefore:

1. (all ranks)  post a new token under the own rank
2. (rank 0)     gather the tokens, publish the roll [nonce, tokens]; again after any token changed
3. (all ranks)  a roll with the own token is of this attempt: acknowledge its nonce
4. (rank 0)     all acknowledged: publish that the nonce holds; all ranks continue below it

A stale token only makes rank 0 publish a roll that the new owner does not acknowledge.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, TypeVar

import torch.distributed as dist

from torchrelay.errors import DeadlineError, PeerError
from torchrelay.jobs.runtime import Worker, WorkItem
from torchrelay.records import dataclass
from torchrelay.runners.distributed.launcher import LaunchEnv

POLL_SECS = 1.0
_CONNECT_SECS, _CONNECT_PAUSE_SECS = 20.0, 0.2
_LONG = timedelta(days=1)

Store = Any
"""A torch store; torch's annotations do not export its class."""

_PART_BYTES = 4 << 20  # the store closes the connection above 8 MiB
_WHOLE = b"="
_PARTS = b"#"


class StoreClient:
    """One connection to the store, limited to the keys below one prefix. For one thread at a time.

    Every method raises PeerError if the store does not answer any more.
    """

    def __init__(self, store: Store, where: str) -> None:
        self._store = store
        self._where = where
        self._parts: dict[str, int] = {}  # number of parts, by key, of long values put by this client
        self._waiter: tuple[Store, Worker] | None = None
        """A connection, and a thread that waits without a timeout: torch logs each wait that has one."""
        self._awaited: tuple[list[str], WorkItem[None]] | None = None

    def clone(self, prefix: str = "") -> StoreClient:
        """Open another connection, for another thread; `prefix` limits its keys."""
        with self._guarded():
            store = self._store.clone()
        narrow = dist.PrefixStore(prefix, store) if prefix else store  # type: ignore[attr-defined]
        return StoreClient(narrow, self._where)

    def raw(self, prefix: str) -> Store:
        """Return a new connection below `prefix` for torch itself."""
        return self.clone(prefix)._store

    def put(self, key: str, value: bytes) -> None:
        """Store a value under a key, in parts if it is long."""
        parts = [value[at : at + _PART_BYTES] for at in range(0, len(value), _PART_BYTES)]
        with self._guarded():
            if len(parts) <= 1:
                self._store.set(key, _WHOLE + value)
                return
            self._parts[key] = len(parts)
            for index, part in enumerate(parts):
                self._store.set(f"{key}#{index}", part)
            self._store.set(
                key, _PARTS + str(len(parts)).encode()
            )  # last: when it is visible, all parts are readable

    def put_once(self, key: str, value: bytes) -> bytes:
        """Store a short value unless the key exists; return the value that it has now."""
        with self._guarded():
            kept: bytes = self._store.compare_set(key, "", (_WHOLE + value).decode())
        return kept[1:]

    def get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys that are known to exist."""
        with self._guarded():
            heads = self._store.multi_get(list(keys)) if keys else []
            return [self._whole(key, head) for key, head in zip(keys, heads, strict=True)]

    def has(self, *keys: str) -> bool:
        """Return whether all the keys exist."""
        with self._guarded():
            return bool(self._store.check(list(keys)))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter that starts at 0 and return it; such keys are read by `add(key, 0)`."""
        with self._guarded():
            return int(self._store.add(key, amount))

    def delete(self, *keys: str) -> None:
        """Delete keys that only this client puts, whether they exist or not."""
        with self._guarded():
            for key in keys:
                for index in range(self._parts.pop(key, 0)):
                    self._store.delete_key(f"{key}#{index}")
                self._store.delete_key(key)

    def wait(self, keys: Sequence[str], secs: float = POLL_SECS) -> bool:
        """Wait at most `secs`, limited to one poll, until all keys exist; return whether they do."""
        if self.has(*keys):
            return True
        names = list(keys)
        if self._waiter is None or (self._awaited is not None and self._awaited[0] != names):
            self._waiter, self._awaited = (self.clone()._store, Worker("torchrelay-store")), None
        store, worker = self._waiter
        if self._awaited is None:
            submitted = worker.submit(partial(store.wait, names, _LONG))
            if submitted is None:
                raise PeerError("this process cannot start a thread to wait for the store")
            self._awaited = names, submitted
        item = self._awaited[1]
        if not item.over.wait(max(0.01, min(secs, POLL_SECS))):
            return False
        self._awaited = None
        with self._guarded():
            item.result()
        return True

    def _whole(self, key: str, head: bytes) -> bytes:
        if head[:1] == _WHOLE:
            return head[1:]
        names = [f"{key}#{index}" for index in range(int(head[1:]))]
        return b"".join(self._store.multi_get(names))

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Raise PeerError for connection errors in the block."""
        try:
            yield
        except (dist.DistNetworkError, dist.DistStoreError, ConnectionError) as error:
            reason = str(error).split("\n", 1)[0]
            raise PeerError(f"the store at {self._where} does not answer any more: {reason}") from error


class Deadline:
    """A moment on the own monotonic clock; clocks of different machines are never compared."""

    def __init__(self, secs: float) -> None:
        self.secs = secs
        self._end = time.monotonic() + secs

    @property
    def left(self) -> float:
        """Remaining seconds, never below 0."""
        return max(0.0, self._end - time.monotonic())

    @property
    def over(self) -> bool:
        """True if no time remains."""
        return self.left == 0.0


def connect(env: LaunchEnv, timeout_secs: float, check: Callable[[], None]) -> StoreClient:
    """Connect to the launcher's store, or serve one from rank 0 if the launcher has none.

    `check` is called before each attempt, and raises if this process is to stop trying. Raises DeadlineError
    if no store answers in time, PeerError if the address cannot be served.
    """
    where, deadline = f"{env.master_addr}:{env.master_port}", Deadline(timeout_secs)
    while True:
        check()
        try:
            store = dist.TCPStore(  # type: ignore[attr-defined]
                env.master_addr,
                env.master_port,
                is_master=env.hosts_store,
                timeout=timedelta(seconds=max(0.1, min(_CONNECT_SECS, deadline.left))),
                wait_for_workers=False,
                multi_tenant=True,  # a process group of the user may serve the same port
            )
        except dist.DistError as error:
            reason = str(error).split("\n", 1)[0]
            if env.hosts_store:
                raise PeerError(
                    f"cannot serve the store at {where} (MASTER_ADDR:MASTER_PORT): {reason}"
                ) from error
            if deadline.over:
                raise DeadlineError(
                    f"no store answered at {where} (MASTER_ADDR:MASTER_PORT) within {timeout_secs:g} s: "
                    f"check that rank 0 runs and that the port is open between the hosts ({reason})"
                ) from error
            time.sleep(min(_CONNECT_PAUSE_SECS, deadline.left))
        else:
            store.set_timeout(timedelta(seconds=timeout_secs))
            return StoreClient(store, where)


T = TypeVar("T")


@dataclass(frozen=True)
class Hosts:
    """The ranks of each host in rank order; hosts in the order of their lowest ranks."""

    members: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, groups: Iterable[Iterable[int]]) -> Hosts:
        """Sort groups of ranks."""
        return cls(tuple(sorted(tuple(sorted(group)) for group in groups)))

    @cached_property
    def leaders(self) -> tuple[int, ...]:
        """The lowest rank of each host."""
        return tuple(host[0] for host in self.members)

    def around(self, leader: int) -> tuple[int, ...]:
        """Return the ranks of the host whose lowest rank is `leader`."""
        return self.members[self.leaders.index(leader)]

    def in_rank_order(self, values: Sequence[T]) -> list[T]:
        """Convert values from host order to rank order."""
        return [values[at] for at in self._places] if self._places else list(values)

    @cached_property
    def _places(self) -> tuple[int, ...]:
        """Index of each rank in host order; empty if that equals the rank order."""
        order = [rank for host in self.members for rank in host]
        return () if order == sorted(order) else tuple(sorted(range(len(order)), key=order.__getitem__))


_SHORTEST_SECS, _LONGEST_SECS = 0.01, 0.1
"""Interval of polls; waiting for keys is useless here: those of an earlier attempt exist already."""
_HOLDS_SECS = 0.2  # A roll with an outdated token of another rank is replaced


def agree_on_nonce(
    store: StoreClient,
    rank: int,
    size: int,
    *,
    timeout_secs: float,
    check: Callable[[], None] = lambda: None,
) -> str:
    """Return a new nonce that is the same for all `size` processes of this attempt.

    Raises DeadlineError naming the missing ranks (on rank 0, which sees them). `check` is called repeatedly,
    and raises if this process is to stop waiting.
    """
    token = secrets.token_hex(8)
    deadline = Deadline(timeout_secs)
    store.put(f"hello/{rank}", token.encode())
    if rank == 0:
        return _lead(store, size, token, deadline, check)
    return _follow(store, rank, size, token, deadline, check)


def _lead(store: StoreClient, size: int, token: str, deadline: Deadline, check: Callable[[], None]) -> str:
    """Gather the tokens on rank 0, and publish the roll until all ranks acknowledge it."""
    hellos = [f"hello/{rank}" for rank in range(size)]
    nonce, tokens, pause = "", [""], _SHORTEST_SECS
    while not deadline.over:
        check()
        if store.has(*hellos):
            found = [token.decode() for token in store.get(hellos)]
            if found != tokens:
                nonce, tokens, pause = secrets.token_hex(8), found, _SHORTEST_SECS
                store.put("roll", json.dumps([nonce, tokens]).encode())
            acks = [f"ack/{nonce}/{rank}" for rank in range(1, size)]
            if tokens[0] != token:
                store.put("hello/0", token.encode())
            elif not acks or store.has(*acks):
                store.put(f"holds/{nonce}", b"")
                return nonce
        time.sleep(min(pause, deadline.left))
        pause = min(2 * pause, _LONGEST_SECS)
    late = [
        rank
        for rank in range(1, size)
        if not store.has(f"hello/{rank}") or not (nonce and store.has(f"ack/{nonce}/{rank}"))
    ]
    raise DeadlineError(
        f"waited {deadline.secs:g} s for all {size} ranks to start; missing: {ranks_text(late)}"
    )


def _follow(
    store: StoreClient, rank: int, size: int, token: str, deadline: Deadline, check: Callable[[], None]
) -> str:
    """Post the token of another rank, and acknowledge the roll that contains it."""
    pause = _SHORTEST_SECS
    while not deadline.over:
        check()
        if not store.wait(["roll"]):
            continue
        nonce, tokens = json.loads(store.get(["roll"])[0])
        if len(tokens) != size or tokens[rank] != token:
            # again: a rank of an earlier attempt may have replaced it
            store.put(f"hello/{rank}", token.encode())
            time.sleep(min(pause, deadline.left))
            pause = min(2 * pause, _LONGEST_SECS)
            continue
        store.put(f"ack/{nonce}/{rank}", b"")
        if store.wait([f"holds/{nonce}"], _HOLDS_SECS):
            return str(nonce)
    raise DeadlineError(
        f"rank {rank} waited {deadline.secs:g} s for rank 0 to gather all {size} ranks: "
        "rank 0 or another rank did not start"
    )


def ranks_text(ranks: Sequence[int]) -> str:
    """Name at most 16 ranks in a message."""
    shown = ", ".join(str(rank) for rank in ranks[:16])
    rest = f" and {len(ranks) - 16} more" if len(ranks) > 16 else ""
    return f"rank{'s' if len(ranks) != 1 else ''} {shown}{rest}"
