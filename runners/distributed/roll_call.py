"""Which processes make up this attempt: a handshake that no key of an earlier one can answer.

The launcher's store outlives attempts, and a host that joins again does not even raise the restart
count, so a prefix of run and count is not enough. Therefore:

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

from torchrelay.errors import DeadlineError
from torchrelay.records import dataclass
from torchrelay.runners.distributed.store import Deadline, StoreClient


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


def agree_on_nonce(store: StoreClient, rank: int, size: int, *, timeout_secs: float) -> str:
    """Return a nonce that is new and the same for all `size` processes of this attempt.

    Raises DeadlineError naming the ranks that did not answer (told by rank 0, which sees them).
    """
    token = secrets.token_hex(8)
    deadline = Deadline(timeout_secs)
    store.put(_hello(rank), token.encode())
    return _lead(store, size, deadline) if rank == 0 else _follow(store, rank, size, token, deadline)


def _lead(store: StoreClient, size: int, deadline: Deadline) -> str:
    hellos = [_hello(rank) for rank in range(size)]
    roll = Roll("", ())
    while not deadline.over:
        if store.wait(hellos):
            roll = _publish(store, hellos, roll)
            acks = [_ack(roll.nonce, rank) for rank in range(1, size)]
            if not acks or store.wait(acks):
                store.put(_holds(roll.nonce), b"")
                return roll.nonce
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


def _follow(store: StoreClient, rank: int, size: int, token: str, deadline: Deadline) -> str:
    while not deadline.over:
        if not store.wait(["roll"]):
            continue
        roll = Roll.decode(store.get(["roll"])[0])
        if not roll.has(rank, size, token):
            store.put(_hello(rank), token.encode())  # again: one of an earlier attempt may have replaced it
            time.sleep(0.05)
            continue
        store.put(_ack(roll.nonce, rank), b"")
        if store.wait([_holds(roll.nonce)]):
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
