"""Proving an epoch together: every process proves its share, all get one outcome."""

from __future__ import annotations

from torchrelay.checkpoint.live import Entry
from torchrelay.checkpoint.proof import Level, Outcome, Share, prove
from torchrelay.checkpoint.storage import Storage
from torchrelay.jobs.peers import Peers


def prove_together(
    peers: Peers, storage: Storage, entry: Entry, *, level: Level = "headers"
) -> tuple[Outcome, str]:
    """Prove an entry's manifest and shards to a level; returns the worst outcome and its reason.

    Damage that one process saw counts for all, so that all fall back together; what one could not
    read is unknown for all, unless another saw damage.
    """
    proof = prove(storage, entry, level=level, share=Share(peers.rank, peers.size))
    told = peers.exchange(f"prove epoch {entry.position}", [proof.outcome.value, proof.reason])
    for outcome in (Outcome.DAMAGED, Outcome.UNKNOWN):
        for rank, (value, reason) in enumerate(told):
            if Outcome(value) is outcome:
                return outcome, reason if peers.size == 1 else f"{reason} (seen by rank {rank})"
    return Outcome.PROVED, ""
