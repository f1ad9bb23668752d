"""Manage the log of a run whose hosts may have local directories on their own disks.

With one place it is a `TierLedger`. With several, a launch first uploads everything that is only local, each
leader the files of its place, so that all ranks can read each file locally or remotely. Then rank 0 holds
both logs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

from torchrelay.checkpoint.coordinator.session_log import let_go
from torchrelay.checkpoint.format.canonical_json import Fields
from torchrelay.checkpoint.format.manifest import codec
from torchrelay.checkpoint.format.names import ATTEMPT_NAME, DATA
from torchrelay.checkpoint.format.position import CommittedPosition, Position, Retirement, State
from torchrelay.checkpoint.load.verify import (
    FULL_VERIFICATION_SECS,
    JointResult,
    Level,
    Target,
    VerificationStatus,
    verify_together,
)
from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.log.record import entry_json, entry_of, retirement_json, retirement_of
from torchrelay.checkpoint.log.tiered_storage import share_job
from torchrelay.checkpoint.log.view import Look
from torchrelay.checkpoint.save.commit import Apart
from torchrelay.checkpoint.tiering import hosts
from torchrelay.checkpoint.tiering.hosts import Places, guessed, seen
from torchrelay.checkpoint.tiering.replicator import Others, PartSender, damage_in
from torchrelay.checkpoint.tiering.session_log import TierLedger
from torchrelay.errors import DamagedError, StorageError
from torchrelay.jobs.session import Peers, decide, together, warn
from torchrelay.records import Json

TURN_SECS = 0.5
"""Seconds between progress reports while a launch uploads local files."""
_REPORTED = "what rank 0 reported"


class HostsLedger(TierLedger):
    """Log of a run with one or several local directories; see the module."""

    _places: Places | None = None
    """The places found by `open`."""
    _guess: Places | None = None
    """The places known without a write."""
    _reader = 0
    _sender: PartSender | None = None
    """On leaders except rank 0, while the log is held."""
    _state: State | None = None
    """On rank 0: what the leaders know of the log."""
    _sent_before: Sequence[Position] = ()
    _leftovers: tuple[Retirement, ...] = ()
    """On leaders: leftovers of earlier launches."""

    @property
    def places(self) -> Places:
        """The ranks that share each local directory."""
        return self._places or self._guess or Places()

    def reader_of(self, peers: Peers) -> int:
        """Before the log is taken: the rank with the authoritative local log, on any host."""
        self._know(peers)
        return self._reader if self.holding is None else 0

    def look(self, peers: Peers, *, tolerant: bool = False) -> Look:
        """As `TierLedger.look`; reads the authoritative local log on any host."""
        self._survey(peers)
        return super().look(peers)

    def check(self, peers: Peers, epoch: int) -> None:
        """Skip an epoch on several hosts: it is verified after its upload, once the log is taken."""
        self._know(peers)
        if self.places.many:
            self._asked_for(peers, epoch)
        else:
            super().check(peers, epoch)

    def _know(self, peers: Peers) -> None:
        if self._places is None and self._guess is None:
            self._survey(peers)

    def _survey(self, peers: Peers) -> list[hosts.LocalLogStatus]:
        """Find the authoritative local log; its report comes first, then others with their own entries."""
        if self._places is None:
            self._guess = guessed(peers, self.storage.root)
        self._reader = 0
        if not self.places.many:
            return []

        def report() -> dict[str, Json] | None:
            lead = self.places.leads
            status = hosts.claim(self.storage, self.job_name, self.places.rank) if lead else None
            return None if status is None else asdict(status)

        found = [hosts.status_of(one) for one in together(peers, "near logs", report) if one is not None]
        counts = hosts.teller(found)
        self._reader = 0 if counts is None else counts.rank
        return [*([] if counts is None else [counts]), *hosts.given_up(found, counts)]

    def open(self, peers: Peers, *, tolerant: bool = False) -> bool:
        """Take the logs over; with several places everything that is only local is uploaded first.

        False if a process has to exit before that: the next launch uploads the rest. Raises also UsageError
        for a local directory of another job, StorageError if an upload made no progress within
        `patience_secs`.
        """
        self._places = seen(peers, self.storage, self.storage.root)
        found = self._survey(peers)
        if not self.places.many:
            return super().open(peers)
        counts = [one for one in found if one.rank == self._reader and one.ahead]
        for other in found[len(counts) :] if peers.rank == 0 else ():
            if other.rank != 0:  # rank 0's place reports its loss when it adopts the remote log
                warn(
                    f"the local log of rank {other.rank} has an older history: its epochs that were only "
                    f"local (epoch {', '.join(other.alone)}) are abandoned",
                    stacklevel=2,
                )
        if counts and counts[0].rank != 0 and counts[0].sends and not self._send_from(peers, counts[0].rank):
            return False
        super().open(peers)
        self._begin(peers, 0)
        sent = self._all_sent(peers, 0)
        if sent and self._sender is not None:
            self._sender.give_way()
        return sent

    def _send_from(self, peers: Peers, by: int) -> bool:
        """The log is on another host than rank 0: its leader holds both logs until all is uploaded.

        False if a process has to exit before that.
        """

        def take() -> None:
            self._check_exclusion()
            self.writer = self._taken()

        decide(peers, "take the log of another host", take, deadline_secs=self.takes_secs + 60.0, by=by)
        self._begin(peers, by)
        sent = self._all_sent(peers, by)
        uploaded = decide(peers, "release the log of another host", self._end_sending, by=by)
        if self._sender is not None:
            self._end_sending()
        self._sent_before = [Position(epoch, step) for epoch, step in uploaded] if peers.rank == 0 else []
        return sent

    def _end_sending(self) -> list[Json]:
        """Release both logs, or stop uploading; returns what was uploaded meanwhile."""
        sent = self.take_replicated()
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.stop()
        self._stop_sending()
        writer, self.writer = self.writer, None
        if writer is not None:
            let_go(writer, f"the log of {writer.storage.url}")
        return [[position.epoch, position.step] for position in sent]

    def take_replicated(self) -> list[Position]:
        """As `TierLedger.take_replicated`; first the uploads of another host's log at the launch."""
        before, self._sent_before = self._sent_before, []
        return [*before, *super().take_replicated()]

    def _others(self, run: str) -> Others | None:
        places = self.places
        if not places.many:
            return None
        return Others(run, tuple(leader for leader in places.leaders if leader != places.rank))

    def _begin(self, peers: Peers, by: int) -> None:
        """Have the leaders of the other places upload what is only local."""

        def report() -> Json:
            writer, remote = self.required(), self._remote_writer
            self._state = writer.view.state
            return {
                "run": "" if remote is None else remote.nonce,
                "wanted": self._wanted(),
                "live": sorted(self._state.tries) if writer.view.certain else None,
            }

        reported = decide(peers, "what is only local", report, by=by)

        def begin() -> None:
            if not self.places.leads or peers.rank == by:
                return
            share_job(self.storage.local, self.storage.remote, self.job_name)
            sender = PartSender(self.tier, self.storage, self.job_name, reported["run"], peers.rank)
            sender.set_wanted([entry_of(one, _REPORTED) for one in reported["wanted"]])
            sender.start()
            self._sender = sender
            if reported["live"] is not None and by == 0:
                names = self.storage.local.list(DATA)
                gone = (
                    name for name in names if ATTEMPT_NAME.fullmatch(name) and name not in reported["live"]
                )
                self._leftovers = tuple(map(Retirement, gone))

        together(peers, "local directories of the job", begin)

    def _wanted(self) -> list[Json]:
        return [] if self.replicator is None else [entry_json(entry) for entry in self.replicator.pending]

    def _all_sent(self, peers: Peers, by: int) -> bool:
        """Return when nothing is only local; False to exit early. StorageError without progress."""
        moved, since = -1, time.monotonic()
        while True:
            quiet = time.monotonic() - since > self.tier.patience_secs
            reports = together(peers, "upload what is only local", partial(self._sent_now, quiet=quiet))
            if peers.rank == 0:
                self._warn_failures([failure for one in reports for failure in one["failures"]])
            if reports[by]["done"] or any(one["leaves"] for one in reports):
                return bool(reports[by]["done"])
            if reports[by]["quiet"]:
                raise StorageError(
                    f"epoch {reports[by]['left']} is in local directories only and could not be sent to "
                    f"{self.storage.remote.url} for {self.tier.patience_secs:g} s; nothing was changed: fix "
                    "the connection to it and start again"
                )
            now = sum(one["moved"] for one in reports)
            if now != moved:
                moved, since = now, time.monotonic()

    def _sent_now(self, *, quiet: bool) -> dict[str, Json]:
        found: dict[str, Json] = {"done": True, "quiet": quiet, "moved": 0, "left": "", "failures": []}
        found["leaves"] = self.hurried()
        if self._sender is not None:
            found["moved"], found["failures"] = self._sender.moved.nbytes, self._sender.take_failures()
        if self.replicator is not None:
            found["done"] = self.replicator.wait(0, TURN_SECS)
            pending = self.replicator.pending
            found["left"] = ", ".join(str(entry.position) for entry in pending)
            # Fewer pending epochs are progress too.
            found["moved"] = self.replicator.moved.nbytes - len(pending)
            found["failures"] = self.replicator.take_failures()
        return found

    def _warn_failures(self, failures: list[str]) -> None:
        for failure in failures:
            warn(failure, stacklevel=3)

    def apart(self) -> Apart | None:
        """Every place's leader creates directories there, and is notified of commits."""
        return Apart(self.places.mates, self._committed) if self.places.many else None

    def _committed(self, entry: CommittedPosition) -> None:
        if self._sender is not None:
            self._sender.add(entry)

    def unseen(self) -> frozenset[str]:
        """Attempts that are only local are on several hosts."""
        pending = () if self.replicator is None or not self.places.many else self.replicator.pending
        return frozenset(entry.attempt_name for entry in pending)

    def wait_for_room(self, peers: Peers) -> None:
        """As `TierLedger.wait_for_room`; leaders receive what to upload and what to delete."""
        if self.in_run:
            self._exchange_news(peers)
        super().wait_for_room(peers)

    def drain(self, peers: Peers) -> bool:
        """As `TierLedger.drain`."""
        self._exchange_news(peers)
        drained = super().drain(peers)
        self._exchange_news(peers)
        return drained

    def _exchange_news(self, peers: Peers) -> None:
        """Exchange news between rank 0 and the leaders."""
        if not self.places.many:
            return
        news = together(peers, "tier: places", self._news)
        if peers.rank == 0:
            self._warn_failures([failure for one in news for failure in one["failures"]])
        elif self._sender is not None:
            self._sender.set_wanted([entry_of(one, _REPORTED) for one in news[0]["wanted"]])
            gone = (*self._leftovers, *(retirement_of(Fields(one, _REPORTED)) for one in news[0]["gone"]))
            self._leftovers = ()
            if gone:
                local = self.storage.local
                self.deletions.ask("old epochs could not be deleted", lambda: hosts.delete(local, gone))

    def _news(self) -> dict[str, Json]:
        """What this process reports: failures, and on rank 0 what the log has changed."""
        if self._sender is not None:
            return {"failures": self._sender.take_failures()}
        if self.writer is None:
            return {"failures": []}
        state, before = self.writer.view.state, self._state
        self._state = state
        gone = () if before is None else hosts.gone_between(before, state)
        return {"failures": [], "wanted": self._wanted(), "gone": [retirement_json(one) for one in gone]}

    def close(self) -> None:
        """As `TierLedger.close`; stops uploads of this process first."""
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.stop()
        self._state, self._leftovers, self._places, self._guess = None, (), None, None
        super().close()

    def verify_epoch(self, peers: Peers, epoch: int, *, whole: bool = True) -> Target:
        """As `Ledger.verify_epoch`; StorageError outside of a run for an epoch divided between hosts."""
        self._know(peers)
        outside = self.places.many and self.holding is None

        def local_only() -> bool:
            entry, remote = self.view().find(epoch), open_log(self.storage.remote, self.job_name)
            return entry is not None and all(one.attempt_name != entry.attempt_name for one in remote.entries)

        if outside and decide(peers, "near only", local_only, by=self.reader_of(peers)):
            raise StorageError(
                f"epoch {epoch} is in the local directories of several hosts only, and none of them has "
                "all of it: start the run, which sends it first, and load it then"
            )
        return super().verify_epoch(peers, epoch, whole=whole)

    def _verify_jointly(
        self, peers: Peers, entry: CommittedPosition, *, level: Level = "headers"
    ) -> JointResult:
        """Each place verifies its local files, then all verify the whole; remotely if that fails."""
        if not self.places.many or entry.attempt_name in self.storage.remote_only:
            return super()._verify_jointly(peers, entry, level=level)
        deadline_secs = FULL_VERIFICATION_SECS if level == "full" else None
        topic = f"local files of epoch {entry.position}"
        reasons = peers.exchange(topic, self._local_damage(entry, level), deadline_secs=deadline_secs)
        reason = next((one for one in reasons if one is not None), None)
        if reason is None:
            result = verify_together(peers, self.storage, entry, level=level)
            if result.outcome is VerificationStatus.VERIFIED:
                return result
            reason = result.reason
        return self._verify_remote(peers, entry, level, reason)

    def _local_damage(self, entry: CommittedPosition, level: Level) -> str | None:
        """Damage of the local files here; each rank of this place checks its share."""
        mates = self.places.mates
        share = mates.index(self.places.rank), len(mates)
        try:
            manifest = codec.read(self.storage, entry)
            return damage_in(self.storage.local, manifest, share=share, headers_only=level != "full")
        except DamagedError as error:
            return str(error)
        except OSError:  # the verification that follows reports it
            return None
