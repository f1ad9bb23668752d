"""Retention as the engine uses it: what goes is said in the log first, its files go behind the training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field

from torchrelay.checkpoint.coordinator.session_log import Ledger
from torchrelay.checkpoint.format.manifest.position import Key
from torchrelay.checkpoint.load.info import KnownMetrics
from torchrelay.checkpoint.load.verify import Lasting, Outcome
from torchrelay.checkpoint.log.retention import Keeping, delete_left, is_left
from torchrelay.checkpoint.log.view import LogView
from torchrelay.checkpoint.log.writer import LogWriter
from torchrelay.errors import StorageError
from torchrelay.jobs.session import Peers, decide, warn
from torchrelay.records import dataclass


@dataclass(frozen=True)
class Retaining:
    """Carries `keeping` out in the directory of `ledger`; on other ranks than 0 there is nothing to do."""

    ledger: Ledger
    keeping: Keeping
    lasting: Lasting = field(default_factory=Lasting)
    metrics: KnownMetrics = field(default_factory=KnownMetrics)
    told: set[str] = field(default_factory=set)
    """Doubts that people have heard of."""

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
            unsure = self._retire_but(writer)
            delete_left(writer)
            if unsure:
                raise StorageError(unsure)

        self._ask("old epochs", work)

    def delete_left(self) -> None:
        """Give back the space of what earlier generations left; tell of deletions that failed."""
        self.ledger.tell_failed_deletions()
        writer = self.ledger.writer
        if writer is not None and is_left(writer):
            self._ask("unfinished tries", lambda: delete_left(writer))

    def end(self, peers: Peers) -> None:
        """Return when all is deleted. All processes together: FencedError when another job has the log."""
        if self.keeping.everything:
            self.delete_left()  # positions inside the last epoch, which its commit has passed
            self.ledger.finish_deletions()
        else:
            decide(peers, "save: retention ended", self._end)

    def _retire(self) -> None:
        writer = self.ledger.writer
        if writer is None:
            return
        try:
            unsure = self._retire_but(writer)
        except StorageError as error:
            unsure = str(error)
        else:
            self._ask("old epochs", lambda: delete_left(writer))
        if unsure:
            warn(f"old epochs could not be deleted: {unsure}", stacklevel=2)

    def _retire_but(self, writer: LogWriter) -> str:
        """Give up what may go, as long as an epoch that stays is proved; returns doubts, for people."""
        view = writer.view
        keeping, doubts = self._knowing(view)
        if not (keeping.chosen(view) or keeping.chosen_optimizers(view)):
            return "; ".join(doubts)  # nothing goes, so nothing need be proved
        unproved = self.lasting.unproved(self.ledger.storage, view, self.ledger.unseen())
        if not any(proof.outcome is Outcome.UNKNOWN for proof in unproved):
            suspects: frozenset[Key] = frozenset(proof.entry.key for proof in unproved)
            keeping.retire(writer, suspects, self.ledger.needed())
        if unproved:
            doubts.append(f"{'; '.join(proof.told for proof in unproved)}: older ones stay in its place")
        return "; ".join(doubts)

    def at_once(self, writer: LogWriter) -> str:
        """Say what goes, and delete it, in the calling thread; returns doubts, for people."""
        unsure = "" if self.keeping.everything else self._retire_but(writer)
        delete_left(writer)
        return unsure

    def _knowing(self, view: LogView) -> tuple[Keeping, list[str]]:
        """The rules with the metrics that they ask for, and doubts that nobody was told of yet."""
        if self.keeping.best is None:
            return self.keeping, []
        self.metrics.look(self.ledger.storage, view)
        doubts = [one for one in self.metrics.doubts(self.keeping.best) if one not in self.told]
        self.told.update(doubts)
        return self.metrics.told(self.keeping), doubts

    def _end(self) -> None:
        self.ledger.finish_deletions()
        if self.ledger.writer is not None:
            self.ledger.writer.check()

    def _ask(self, what: str, work: Callable[[], object]) -> None:
        self.ledger.deletions.ask(f"{what} could not be deleted", work)
