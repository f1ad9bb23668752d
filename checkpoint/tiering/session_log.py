"""Manage the log of a run with a local directory: the local log is authoritative, the remote one follows.

A launch takes both over, the remote one first, and reconciles them: a local log that is ahead continues, else
it adopts the remote one. Only rank 0 accesses the logs, and here all ranks see its local directory.
"""

from __future__ import annotations

import time
from typing import Any

from torchrelay.checkpoint.coordinator.retention import Retaining
from torchrelay.checkpoint.coordinator.session_log import Ledger, let_go
from torchrelay.checkpoint.format.position import CommittedPosition, Position, State
from torchrelay.checkpoint.load.verify import JointResult, Level, Target, VerificationStatus, verify_together
from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.log.retention import Keeping
from torchrelay.checkpoint.log.tiered_storage import TierStorage, refuse_to_begin, same_job, share_job
from torchrelay.checkpoint.log.view import LogView
from torchrelay.checkpoint.log.writer import LogWriter
from torchrelay.checkpoint.storage.base import check_exclusion
from torchrelay.checkpoint.storage.open import Tier
from torchrelay.checkpoint.tiering import hosts
from torchrelay.checkpoint.tiering.replicator import Others, Replicator
from torchrelay.errors import RelayError, SaveFailedError
from torchrelay.jobs.session import Peers, together, warn

TURN_SECS = 2.0
"""Seconds after which the processes check whether one of them has to exit."""
RESERVE_SECS = 5.0
"""Seconds to keep before the process has to exit, for the work after draining."""


class TierLedger(Ledger):
    """Log of a run with one local directory, whose `storage` also shows the remote attempts."""

    storage: TierStorage
    tolerates = False  # the newest epoch is unknown without both logs

    def __init__(self, storage: TierStorage, tier: Tier, keeping: Keeping, takeover_secs: float) -> None:
        super().__init__(storage, takeover_secs)
        self.takes_secs = 2 * takeover_secs  # two logs, one after the other
        self.tier = tier
        self.keeping = keeping
        self.replicator: Replicator | None = None
        """On rank 0, while the logs are held."""
        self._remote_writer: LogWriter | None = None

    def view(self) -> LogView:
        """The authoritative log: the local one if it is ahead, else the remote one."""
        if self.writer is not None:
            return self.writer.view
        same_job(self.storage.local, self.storage.remote)
        local = open_log(self.storage.local, self.job_name)
        remote = open_log(self.storage.remote, self.job_name)
        return (
            local
            if self._is_ahead(local, remote, untouched=hosts.notes_of(self.storage).made(remote))
            else remote
        )

    def _looked(self, view: LogView) -> dict[str, Any]:
        """What all processes receive of a view."""
        remote = open_log(self.storage.remote, self.job_name)
        return {**super()._looked(view), "rest": bool(hosts.to_send(view, remote))}

    def _is_ahead(self, local: LogView, remote: LogView, *, untouched: bool) -> bool:
        """Whether the local log is authoritative; False for one that another host's has replaced."""
        if hosts.is_part(self.storage):
            return False
        return hosts.is_ahead(local, remote, untouched=untouched)

    def _taken(self) -> LogWriter:
        """Take the remote log, then the local one, and reconcile them."""
        local, remote = self.storage.local, self.storage.remote
        remote.mkdir("")
        check_exclusion(remote)
        refuse_to_begin(local, remote)
        share_job(local, remote, self.job_name)
        before = open_log(remote, self.job_name)
        remote_writer = self._take_log(remote)
        untouched = hosts.notes_of(self.storage).made(before) and before.slot + 1 == remote_writer.generation
        try:
            writer = self._take_log(local, follows=True)
            try:
                self._reconcile(writer, remote_writer, untouched=untouched)
            except BaseException:
                writer.close()
                raise
        except BaseException:
            let_go(remote_writer, f"the log of {remote_writer.storage.url}")
            raise
        self._remote_writer = remote_writer
        remote_ledger = Ledger(remote, self.takeover_secs)
        remote_ledger.writer = remote_writer
        retaining = Retaining(remote_ledger, self.keeping)
        others = self._others(remote_writer.nonce)
        self.replicator = Replicator(
            self.tier, self.storage, writer, remote_writer, retaining.at_once, others
        )
        self.replicator.start()
        return writer

    def _others(self, run: str) -> Others | None:
        return None

    def _reconcile(self, writer: LogWriter, remote_writer: LogWriter, *, untouched: bool) -> None:
        local, remote = writer.view, remote_writer.view
        if self._is_ahead(local, remote, untouched=untouched):
            return

        def adopt(state: State) -> tuple[State, dict[str, Any]]:
            return hosts.adopted(state, remote.state), dict(hosts.branch_payload(remote.current))

        there = remote.state.tries | hosts.notes_of(self.storage).replicated
        lost = [str(entry.position) for entry in local.line() if entry.attempt_name not in there]
        writer.change("rewind", adopt)
        if lost:
            warn(
                f"{self.storage.remote.url} continued without {self.storage.url}: the run follows it, and "
                f"local saves that were not uploaded (epoch {', '.join(lost)}) are abandoned",
                stacklevel=2,
            )

    @property
    def generation(self) -> int:
        """Generation of the remote log: local ones restart with a new directory."""
        return super().generation if self._remote_writer is None else self._remote_writer.generation

    def ask(self) -> None:
        """Check both logs: a job on another host has its own local log, and takes only the remote one."""
        super().ask()
        if self._remote_writer is not None:
            self._remote_writer.ask()

    def last_generation(self) -> int:
        """Generation of the remote log, as `generation`."""
        return open_log(self.storage.remote, self.job_name).generation

    def commit(self, entry: CommittedPosition) -> None:
        """Append the commit record locally, and begin to upload."""
        super().commit(entry)
        if self.replicator is not None:
            self.replicator.wake()

    def rewind(self, peers: Peers, base: Position | None, request: dict[str, Any]) -> None:
        """As without a tier; the remote log follows in the background."""
        super().rewind(peers, base, request)
        if self.replicator is not None:
            self.replicator.wake()

    def needed(self) -> frozenset[str]:
        """Attempts that are not replicated, which stay local."""
        return frozenset() if self.replicator is None else self.replicator.needed

    def wait_for_room(self, peers: Peers) -> None:
        """Return when the next save leaves at most `lag` positions only local.

        Raises SaveFailedError on all processes after `patience_secs`, FencedError if another job has the
        remote log.
        """
        if not self.in_run:
            return
        until = time.monotonic() + self.tier.patience_secs
        turns = [[False, False]]
        # In turns, because a signal may have reached another process than the one that waits.
        while not (turns[0][0] or any(leaves for _, leaves in turns)):
            turns = together(peers, "save: lag", lambda: [self._has_room(until), self.hurried()])

    def _has_room(self, until: float) -> bool:
        if self.replicator is None:
            return True
        self.replicator.check()
        self._warn_of_failures()
        left = max(0.0, until - time.monotonic())
        if self.replicator.wait(self.tier.lag - 1, min(left, TURN_SECS), self.hurried):
            return True
        if left > TURN_SECS or self.hurried():
            return False
        self._warn_of_failures()
        raise SaveFailedError(
            f"{len(self.replicator.pending)} saved positions are in {self.storage.url} only, the "
            f"maximum, and none was uploaded to {self.storage.remote.url} within "
            f"{self.tier.patience_secs:g} s: fix the connection to it, or allow more (Tier(lag=...))"
        )

    def drain(self, peers: Peers) -> bool:
        """Wait for pending uploads while there is time; the rest is uploaded at the next launch."""
        until, over = time.monotonic() + self.tier.drain_secs, False
        while not over:  # in turns: a signal may come while this waits, and to any process
            turns = together(peers, "replicate the rest", lambda: self._drained(until))
            spare = [secs for _, _, secs in turns if secs is not None]
            over = bool(turns[0][0]) or min([turns[0][1], *spare]) <= 0
        if self.replicator is not None and (pending := self.replicator.pending):
            rest = ", ".join(str(entry.position) for entry in pending)
            warn(
                f"epoch {rest} is in {self.storage.url} only: the next start with this directory sends it to "
                f"{self.storage.remote.url}",
                stacklevel=2,
            )
        self._warn_of_failures()
        return True

    def _drained(self, until: float) -> list[Any]:
        """Whether nothing is left to upload, and how long this process may wait."""
        left, spare = until - time.monotonic(), self._spare_secs()
        done = True
        if self.replicator is not None:
            secs = min(TURN_SECS, left) if spare is None else min(TURN_SECS, left, spare)
            done = self.replicator.wait(0, max(0.0, secs))
        return [done, until - time.monotonic(), self._spare_secs()]

    def _spare_secs(self) -> float | None:
        left = self.secs_left()
        return None if left is None else left - RESERVE_SECS

    def _warn_of_failures(self) -> None:
        for failure in self.replicator.take_failures() if self.replicator is not None else ():
            warn(failure, stacklevel=2)

    def take_replicated(self) -> list[Position]:
        """Positions uploaded since the last call, on rank 0; others get an empty list."""
        return [] if self.replicator is None else self.replicator.take_replicated()

    def close(self) -> None:
        """Stop uploads, and release both logs."""
        self._stop_sending()
        super().close()

    def _stop_sending(self) -> None:
        """End the thread, and release the remote log."""
        replicator, self.replicator = self.replicator, None
        remote_writer, self._remote_writer = self._remote_writer, None
        stopped = replicator is None or replicator.stop()
        if remote_writer is not None and stopped:
            let_go(remote_writer, f"the log of {remote_writer.storage.url}")
        elif remote_writer is not None:
            remote_writer.close()  # a call may still return: the log must not seem complete

    def instead_of(self, peers: Peers, failed: Target, error: RelayError, say: Any) -> Target:
        """The same position from the remote, if only its local blocks are damaged; else an older one."""
        if failed.entry.attempt_name not in self.storage.remote_only:
            result = self._verify_jointly(peers, failed.entry, level="full")
            if (
                result.outcome is VerificationStatus.VERIFIED
                and failed.entry.attempt_name in self.storage.remote_only
            ):
                return self._target(failed.entry, result)
        return super().instead_of(peers, failed, error, say)

    def _verify_jointly(
        self, peers: Peers, entry: CommittedPosition, *, level: Level = "headers"
    ) -> JointResult:
        """If only local files are damaged, the remote ones are verified and used instead."""
        result = verify_together(peers, self.storage, entry, level=level)
        if result.outcome is not VerificationStatus.DAMAGED or entry.attempt_name in self.storage.remote_only:
            return result
        second = self._verify_remote(peers, entry, level, result.reason)
        return result if second.outcome is VerificationStatus.DAMAGED else second

    def _verify_remote(
        self, peers: Peers, entry: CommittedPosition, level: Level, reason: str
    ) -> JointResult:
        """Verify an epoch at the remote, and read it there from now on if that succeeds."""
        self.storage.remote_only.update(entry.tries)
        result = verify_together(peers, self.storage, entry, level=level)
        if result.outcome is not VerificationStatus.VERIFIED:
            self.storage.remote_only.difference_update(entry.tries)
        elif peers.rank == 0:
            text = f"the local files of epoch {entry.position} are damaged ({reason}): it is read from"
            warn(f"{text} {self.storage.remote.url}", stacklevel=3)
        return result
