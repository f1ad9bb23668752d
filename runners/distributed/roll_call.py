"""Which processes make up this attempt: a handshake that no key of an earlier one can answer.

The launcher's store outlives attempts, and no number of the launcher's tells them apart: a torchrun counts
the failures of its own host alone, so of one attempt the count may be another one on each host. Therefore:

1. (all ranks)  post a fresh token under the own rank
2. (rank 0)     gather the tokens, publish the roll {nonce, tokens}; again whenever a token changed
3. (all ranks)  a roll with the own token in it is of this attempt: acknowledge its nonce
4. (rank 0)     all acknowledged: publish that the nonce holds; everybody goes on below it

A stale token only makes rank 0 publish a roll that its fresh owner does not acknowledge.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable

from torchrelay.errors import DeadlineError
from torchrelay.records import dataclass
from torchrelay.runners.distributed.store import Deadline, StoreClient

_SHORTEST_SECS, _LONGEST_SECS = 0.01, 0.1
"""Between two looks. Nobody can wait for keys here: those of an earlier attempt are there already."""
_HOLDS_SECS = 0.2
"""A roll may have an old token of another rank, and is replaced then."""


@dataclass(frozen=True)
class Roll:
    """The tokens of all ranks of one attempt and the nonce that stands for them."""

    nonce: str
    tokens: tuple[str, ...]

    def encode(self) -> bytes:
        """Return the roll as the store keeps it."""
        return json.dumps({"nonce": self.nonce, "tokens": self.tokens}).encode()

    @classmethod
    def decode(cls, data: bytes) -> Roll:
        """Read a roll back."""
        fields = json.loads(data)
        return cls(fields["nonce"], tuple(fields["tokens"]))

    def has(self, rank: int, size: int, token: str) -> bool:
        """Whether this is a roll of `size` ranks that knows `token` as the one of `rank`."""
        return len(self.tokens) == size and self.tokens[rank] == token


def agree_on_nonce(
    store: StoreClient,
    rank: int,
    size: int,
    *,
    timeout_secs: float,
    check: Callable[[], None] = lambda: None,
) -> str:
    """Return a nonce that is new and the same for all `size` processes of this attempt.

    Raises DeadlineError naming the ranks that did not answer (told by rank 0, which sees them). `check` is
    called all the time, and raises where this process is to give up.
    """
    token = secrets.token_hex(8)
    deadline = Deadline(timeout_secs)
    store.put(_hello(rank), token.encode())
    if rank == 0:
        return _lead(store, size, token, deadline, check)
    return _follow(store, rank, size, token, deadline, check)


def _lead(store: StoreClient, size: int, token: str, deadline: Deadline, check: Callable[[], None]) -> str:
    hellos = [_hello(rank) for rank in range(size)]
    roll, pause = Roll("", ()), _SHORTEST_SECS
    while not deadline.over:
        check()
        if store.has(*hellos):
            before, roll = roll, _publish(store, hellos, roll)
            pause = pause if roll is before else _SHORTEST_SECS
            acks = [_ack(roll.nonce, rank) for rank in range(1, size)]
            if not roll.has(0, size, token):
                store.put(_hello(0), token.encode())
            elif not acks or store.has(*acks):
                store.put(_holds(roll.nonce), b"")
                return roll.nonce
        time.sleep(min(pause, deadline.left))
        pause = min(2 * pause, _LONGEST_SECS)
    raise DeadlineError(_who_is_missing(store, size, roll, deadline))


def _publish(store: StoreClient, hellos: list[str], roll: Roll) -> Roll:
    """Publish the tokens as they are now, unless the last roll has them already."""
    tokens = tuple(token.decode() for token in store.get(hellos))
    if tokens == roll.tokens:
        return roll
    fresh = Roll(secrets.token_hex(8), tokens)
    store.put("roll", fresh.encode())
    return fresh


def _who_is_missing(store: StoreClient, size: int, roll: Roll, deadline: Deadline) -> str:
    late = [
        rank
        for rank in range(1, size)
        if not store.has(_hello(rank)) or not (roll.nonce and store.has(_ack(roll.nonce, rank)))
    ]
    return f"waited {deadline.secs:g} s for all {size} ranks to start; missing: {ranks_text(late)}"


def _follow(
    store: StoreClient, rank: int, size: int, token: str, deadline: Deadline, check: Callable[[], None]
) -> str:
    pause = _SHORTEST_SECS
    while not deadline.over:
        check()
        if not store.wait(["roll"]):
            continue
        roll = Roll.decode(store.get(["roll"])[0])
        if not roll.has(rank, size, token):
            store.put(_hello(rank), token.encode())  # again: one of an earlier attempt may have replaced it
            time.sleep(min(pause, deadline.left))
            pause = min(2 * pause, _LONGEST_SECS)
            continue
        store.put(_ack(roll.nonce, rank), b"")
        if store.wait([_holds(roll.nonce)], _HOLDS_SECS):
            return roll.nonce
    raise DeadlineError(
        f"rank {rank} waited {deadline.secs:g} s for rank 0 to gather all {size} ranks; "
        "rank 0 or another rank did not start"
    )


def _hello(rank: int) -> str:
    return f"hello/{rank}"


def _ack(nonce: str, rank: int) -> str:
    return f"ack/{nonce}/{rank}"


def _holds(nonce: str) -> str:
    return f"holds/{nonce}"


def ranks_text(ranks: list[int], most: int = 16) -> str:
    """Name ranks in a message, the first of them where they are many."""
    shown = ", ".join(str(rank) for rank in ranks[:most])
    rest = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return f"rank{'s' if len(ranks) != 1 else ''} {shown}{rest}"
