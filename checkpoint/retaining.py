"""Retention as the engine uses it: what goes is said in the log first, its files go behind the training."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

from torchrelay.checkpoint.ledger import Ledger
from torchrelay.checkpoint.log.keeping import Keeping
from torchrelay.checkpoint.log.sweep import delete_left, is_left
from torchrelay.errors import StorageError
from torchrelay.jobs.peers import Peers, decide


@dataclass(frozen=True)
class Retaining:
    """Carries `keeping` out in the directory of `ledger`; on other ranks than 0 there is nothing to do."""

    ledger: Ledger
    keeping: Keeping

    def now(self, peers: Peers) -> None:
        """Say in the log what goes. All processes together: FencedError when another job has the log."""
        if not self.keeping.everything:
            decide(peers, "save: retention", self._retire)

    def behind(self) -> None:
        """Say so behind the training too, for that waits for the disk; being fenced is found out later.

        No save in flight can need what goes: it refers to nothing but what the newest entry keeps.
        """
        writer = self.ledger.writer
        if writer is None or self.keeping.everything:
            return

        def work() -> None:
            self.keeping.retire(writer)
            delete_left(writer)

        self._ask("old epochs", work)

    def delete_left(self) -> None:
        """Give back the space of what earlier generations left; tell of deletions that failed."""
        self.ledger.tell_failed_deletions()
        writer = self.ledger.writer
        if writer is not None and is_left(writer):
            self._ask("unfinished tries", lambda: delete_left(writer))

    def end(self, peers: Peers) -> None:
        """Return when all is deleted. All processes together: FencedError when another job has the log."""
        if not self.keeping.everything:
            decide(peers, "save: retention ended", self._end)

    def _retire(self) -> None:
        writer = self.ledger.writer
        if writer is None:
            return
        try:
            self.keeping.retire(writer)
        except StorageError as error:
            warnings.warn(f"old epochs could not be deleted: {error}", stacklevel=2)
        else:
            self._ask("old epochs", lambda: delete_left(writer))

    def _end(self) -> None:
        self.ledger.finish_deletions()
        if self.ledger.writer is not None:
            self.ledger.writer.check()

    def _ask(self, what: str, work: Callable[[], object]) -> None:
        self.ledger.deletions.ask(f"{what} could not be deleted", work)
