"""Proving an epoch together: every process proves its share, all get one outcome.

A host may see less than there is (a stale cache, a mount that is gone). So where a job has several
hosts, damage counts once a second host has seen it too: the lowest rank of another host looks again.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from dataclasses import field
from typing import Any

from torchrelay.checkpoint.format.log_state import Entry
from torchrelay.checkpoint.format.manifest.schema import Manifest
from torchrelay.checkpoint.reading.proof import Level, Outcome, Proof, Share, prove
from torchrelay.checkpoint.reading.shard_set import ShardSet
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.jobs.session import Peers
from torchrelay.records import dataclass

FULL_PROOF_SECS = 24 * 3600.0
"""How long ranks wait for those that still read all bytes of their share."""


@dataclass(frozen=True)
class JointProof:
    """What all processes agree on; `manifest` is there where the epoch is proved.

    `shards` are the files that this process has opened for its share: a load need not open them again.
    """

    outcome: Outcome
    reason: str = ""
    manifest: Manifest | None = None
    shards: ShardSet | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class _Seen:
    """What one rank saw of a share."""

    rank: int
    outcome: Outcome
    reason: str
    host: str

    def __str__(self) -> str:
        return f"{self.reason} (seen by rank {self.rank} on {self.host})"


def prove_together(
    peers: Peers, storage: Storage, entry: Entry, *, level: Level = "headers", host: str | None = None
) -> JointProof:
    """Prove an entry's manifest and shards to a level; all processes get the worst outcome and its reason.

    Damage counts for all, so that all fall back together; what a rank could not read, or what only one
    of several hosts misses, is unknown for all, unless another saw damage. `host` is this machine's name.
    """
    deadline_secs = FULL_PROOF_SECS if level == "full" else None
    proof = prove(storage, entry, level=level, share=Share(peers.rank, peers.size))
    told = peers.exchange(
        f"prove epoch {entry.position}",
        [proof.outcome.value, proof.reason, host or socket.gethostname()],
        deadline_secs=deadline_secs,
    )
    seen = [_Seen(rank, Outcome(one[0]), one[1], one[2]) for rank, one in enumerate(told)]
    damaged = [one for one in seen if one.outcome is Outcome.DAMAGED]
    if damaged and len({one.host for one in seen}) > 1:
        mine = [one.rank for one in damaged if _witness(seen, one) == peers.rank]
        answers = peers.exchange(
            f"prove epoch {entry.position} again",
            _look_again(storage, entry, level, mine, peers.size),
            deadline_secs=deadline_secs,
        )
        return _judged(seen, damaged, {rank: answer for part in answers for rank, *answer in part})
    return _worst(peers, seen, proof)


def _worst(peers: Peers, seen: Sequence[_Seen], proof: Proof) -> JointProof:
    for outcome in (Outcome.DAMAGED, Outcome.UNKNOWN):
        for one in seen:
            if one.outcome is outcome:
                return JointProof(outcome, one.reason if peers.size == 1 else str(one))
    if proof.shards is not None:
        proof.shards.vouch(proof.holders)  # each was opened by one of us
    return JointProof(Outcome.PROVED, "", proof.manifest, proof.shards)


def _witness(seen: Sequence[_Seen], damaged: _Seen) -> int:
    """The lowest rank of another host."""
    return next(one.rank for one in seen if one.host != damaged.host)


def _look_again(
    storage: Storage, entry: Entry, level: Level, shares: Sequence[int], size: int
) -> list[list[Any]]:
    """Prove the shares of others, until one proves damaged: more would change nothing."""

    def looks() -> Iterator[list[Any]]:
        for rank in shares:
            proof = prove(storage, entry, level=level, share=Share(rank, size))
            yield [rank, proof.outcome.value, proof.reason]
            if proof.outcome is Outcome.DAMAGED:
                return

    return list(looks())


def _judged(seen: Sequence[_Seen], damaged: Sequence[_Seen], again: dict[int, Any]) -> JointProof:
    for one in damaged:
        outcome, _ = again.get(one.rank, (None, ""))
        if outcome == Outcome.DAMAGED.value:
            witness = seen[_witness(seen, one)]
            return JointProof(Outcome.DAMAGED, f"{one}, and by rank {witness.rank} on {witness.host} too")
    first = damaged[0]
    witness = seen[_witness(seen, first)]
    outcome, reason = again[first.rank]
    what = "sees no damage" if outcome == Outcome.PROVED.value else f"could not tell: {reason}"
    return JointProof(Outcome.UNKNOWN, f"{first}, but rank {witness.rank} on {witness.host} {what}")
