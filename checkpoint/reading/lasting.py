"""Whether an epoch that stays can be proved, before older ones are given up for it.

A log that calls an epoch healthy only says that nobody has found it damaged yet. So whoever lets old
epochs go looks first, past what he remembers, at what is to remain.
"""

from __future__ import annotations

from torchrelay.checkpoint.format.log_state import Entry
from torchrelay.checkpoint.log.view import LogView
from torchrelay.checkpoint.reading.proof import Outcome, Proof, Share, prove
from torchrelay.checkpoint.storage.base import Storage

LOOKED_AT = 64
"""Holders of files that one look opens at most: a header costs a read, and the training may wait for it."""


class Lasting:
    """Proves the newest epochs up to their headers, before each retirement.

    Where an epoch lies in the files of more than `LOOKED_AT` nodes a share of them is looked at, another
    one each time. The bytes themselves are not read: that is for whoever loads them, and for `verify`.
    """

    def __init__(self) -> None:
        self._turn = 0
        self._nodes: int | None = None
        """How many nodes the last epoch had that was looked at."""

    def unproved(
        self, storage: Storage, view: LogView, unseen: frozenset[str] = frozenset()
    ) -> tuple[Proof, ...]:
        """Of the positions that a job may resume from the newest that are not proved, up to one that is.

        `unseen` are tries of which not all files are to be seen from here; nothing is said of them.
        Up to one that cannot be read, too, which is then the last: a storage that is away may keep each look
        waiting for minutes, and the other processes with it.
        """
        found: list[Proof] = []
        for entry in view.candidates(boundary=True):
            if entry.try_name in unseen:
                continue
            proof = self._look(storage, entry)
            if proof.proved:
                break
            found.append(proof)
            if proof.outcome is Outcome.UNKNOWN:
                break
        return tuple(found)

    def _look(self, storage: Storage, entry: Entry) -> Proof:
        if self._nodes is None:
            self._remember(prove(storage, entry, want=()))
        shares = max(1, -(-(self._nodes or 1) // LOOKED_AT))
        self._turn += 1
        proof = prove(storage, entry, share=Share(self._turn % shares, shares))
        self._remember(proof)
        return proof

    def _remember(self, proof: Proof) -> None:
        if proof.manifest is not None:
            self._nodes = len(proof.manifest.world.nodes)
