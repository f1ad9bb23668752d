"""Keeps the far log as far as the near one: a thread of rank 0, from the start of a run to its end.

One step at a time, each of which leaves the far place valid: follow a rewind, or send and commit the oldest
epoch that it lacks. A step that fails is kept for people, and tried again; being fenced ends the thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torchrelay.checkpoint.format.position import CommittedPosition, Position, State
from torchrelay.checkpoint.load.verify import VerificationStatus, prove
from torchrelay.checkpoint.log.record import entry_json
from torchrelay.checkpoint.log.tiered_storage import Notes, TierStorage, forgotten, read_notes, write_notes
from torchrelay.checkpoint.log.view import LogView
from torchrelay.checkpoint.log.writer import LogWriter
from torchrelay.checkpoint.storage.open import Tier
from torchrelay.checkpoint.storage.work import headway
from torchrelay.checkpoint.tiering import hosts
from torchrelay.checkpoint.tiering.host_uploads import LostPartError, Others, damage_of, send_among
from torchrelay.checkpoint.tiering.upload import (
    STOP_SECS,
    Awaiting,
    Moved,
    PlaceReport,
    Sending,
    StoppedError,
    delete_parts,
    longer,
    part_path,
    read_part,
    yield_to_training,
)
from torchrelay.errors import DamagedError, FencedError, StorageError

Json = Any
FIRST_LOOK_SECS, LONGEST_LOOK_SECS = 0.05, 2.0
"""How long is waited before it is asked again what other hosts have sent."""
Retain = Callable[[LogWriter], str]
"""Lets old epochs go at the far place, at once; returns doubts, for people."""


class Replicator(Awaiting):
    """The near files of `storage` are sent; both writers are ours. Begins to work with `start`.

    `others`: what lies in the near directories of other hosts is sent by these.
    """

    def __init__(
        self,
        tier: Tier,
        storage: TierStorage,
        writer: LogWriter,
        far: LogWriter,
        retain: Retain,
        others: Others | None = None,
    ) -> None:
        self._tier, self._storage, self._near = tier, storage, storage.near
        self._writer, self._far, self._retain, self._others = writer, far, retain, others
        self.moved = Moved()
        noted = read_notes(self._near)
        mine = noted is not None and noted.far == far.storage.url
        self._notes = noted if noted is not None and mine else Notes(far.storage.url)
        super().__init__()
        self._fenced: FencedError | None = None
        self._failures: list[str] = []
        self._replicated: list[Position] = []
        self._thread = threading.Thread(target=self._run, name="torchrelay tier", daemon=True)
        self._note()

    # For the run

    def start(self) -> None:
        """Begin with what an earlier start left."""
        self._thread.start()

    def wake(self) -> None:
        """The near log has something new."""
        with self._changed:
            self._awake = True
            self._changed.notify_all()

    @property
    def pending(self) -> tuple[CommittedPosition, ...]:
        """What is `local` only, oldest first. Asks no storage."""
        return hosts.to_send(self._writer.view, self._far.view)

    @property
    def needed(self) -> frozenset[str]:
        """Tries that must stay near, whatever retention wants."""
        far = self._far.view
        return frozenset(entry.try_name for entry in self.pending) | hosts.anchor(far)

    @property
    def newest(self) -> Position | None:
        """The newest position of the run that is replicated."""
        found = hosts.newest_replicated(self._writer.view, self._far.view)
        return None if found is None else found.position

    def check(self) -> None:
        """Raise FencedError where another job has the far log. Asks no storage."""
        if self._fenced is not None:
            raise self._fenced
        self._far.check()

    def wait(self, most: int, patience_secs: float, hurried: Callable[[], bool] = lambda: False) -> bool:
        """Return when at most so many positions are `local` only; False after `patience_secs`, or if hurried.

        Raises FencedError.
        """
        deadline = time.monotonic() + patience_secs
        with self._changed:
            while len(self.pending) > most or (not most and self._branches_differ):
                self.check()
                left = deadline - time.monotonic()
                if left <= 0 or hurried() or self._stopping:
                    return False
                self._changed.wait(min(left, 0.5))
        return True

    @property
    def _branches_differ(self) -> bool:
        return hosts.branches_differ(self._writer.view, self._far.view)

    def take_failures(self) -> list[str]:
        """What failed since the last time, for people; the last of many alike."""
        with self._changed:
            taken, self._failures = self._failures, []
        return taken

    def take_replicated(self) -> list[Position]:
        """What was replicated since the last time."""
        with self._changed:
            taken, self._replicated = self._replicated, []
        return taken

    def stop(self) -> bool:
        """End the thread at its next piece; what is not sent stays near. False if a call does not return."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(STOP_SECS)
        return not self._thread.is_alive()

    # In the thread

    def _run(self) -> None:
        yield_to_training()
        pause = 0.0
        while self._is_wanted(pause):
            try:
                while not self._stopping and self._step():
                    self._tell_waiting()
                    pause = 0.0
                pause = 0.0
            except StoppedError:
                return
            except FencedError as error:
                self._fenced = error
                self._tell_waiting()
                return
            except Exception as error:
                pause = longer(pause)
                self._fail(str(error))

    def _step(self) -> bool:
        """Do one thing; False where nothing is left to do."""
        near, far = self._writer.view, self._far.view
        if hosts.branches_differ(near, far):
            self._far.change("rewind", self._follow)
            return True
        entries = hosts.to_send(near, far)
        if not entries:
            return False
        self._replicate(entries[0])
        return True

    def _follow(self, state: State) -> tuple[State, Mapping[str, Json]]:
        near = self._writer.view
        return hosts.branched_like(state, near.state), hosts.branch_payload(near.current)

    def _replicate(self, entry: CommittedPosition) -> None:
        try:
            with headway(f"replicating epoch {entry.position}"):
                if not self._send(entry):
                    return
        except (OSError, DamagedError) as error:
            if self._writer.view.entry(entry.key) is None:
                return  # a whole epoch has taken the place of this position meanwhile
            self._judge(entry, error)
            return
        self._commit(entry)

    def _send(self, entry: CommittedPosition) -> bool:
        """False where the epoch is not wanted any more."""
        kept = self._far.view.state.tries
        if self._others is not None:
            sending = self._sending()
            return send_among(
                sending,
                entry,
                kept,
                lambda: self._gathered(entry, sending),
                lambda: self._delete_parts(entry),
            )
        self._sending().send(entry, kept)
        return True

    def _delete_parts(self, entry: CommittedPosition) -> None:
        """The leaders of the other places tell theirs anew, unless the far log names the epoch by now."""
        if self._others is not None:
            delete_parts(self._far.storage, entry.try_name, self._others.run, self._others.leaders)

    def _gathered(self, entry: CommittedPosition, sending: Sending) -> Mapping[int, PlaceReport] | None:
        """What the leaders of the other places tell of an epoch, waited for as long as it is wanted."""
        others, found, pause = self._others or Others("", ()), dict[int, PlaceReport](), FIRST_LOOK_SECS
        while True:
            for leader in others.leaders:
                if leader not in found:
                    part = read_part(self._far.storage, part_path(entry.try_name, others.run, leader))
                    if part is not None:
                        found[leader] = part
            if len(found) == len(others.leaders):
                return found
            self._check_going_on()
            if entry not in self.pending:
                return None
            with self._changed:
                self._changed.wait_for(lambda: self._stopping, pause)
            if pause == LONGEST_LOOK_SECS:
                sending.check_manifest(entry)  # without it the others wait, too
            pause = min(1.5 * pause, LONGEST_LOOK_SECS)

    def _commit(self, entry: CommittedPosition) -> None:
        def change(state: State) -> tuple[State, Mapping[str, Json]] | None:
            after = hosts.mirrored(state, replace(entry, health="ok"))
            return None if after is None else (after, {"entry": entry_json(entry)})

        self._far.change("commit", change)
        with self._changed:
            self._replicated.append(entry.position)
            self._changed.notify_all()
        self._notes = replace(self._notes, sent={})
        self.moved.settle()
        self._delete_parts(entry)
        doubts = ""
        try:
            doubts = self._retain(self._far)
        except StorageError as error:
            doubts = str(error)
        self._note()
        if doubts:
            self._fail(f"old epochs could not be deleted in {self._far.storage.url}: {doubts}", whole=True)

    def _judge(self, entry: CommittedPosition, error: Exception) -> None:
        """An epoch that is damaged near, or lacks files, is never sent; all else is tried again."""
        if isinstance(error, LostPartError):
            reason: str | None = str(error)
        elif isinstance(error, DamagedError):
            reason = self._damage(entry)
        else:
            raise error
        if reason is None:
            raise error
        self._writer.quarantine(entry.key, reason)
        what = "is given up" if isinstance(error, LostPartError) else "is damaged and is not replicated"
        self._fail(f"epoch {entry.position} {what}: {reason}", whole=True)

    def _damage(self, entry: CommittedPosition) -> str | None:
        """Of what this place has; what it lacks may lie at the far place, or with another host."""
        if self._others is not None:
            return damage_of(self._near, entry)
        proof = prove(self._storage, entry, level="full")
        return proof.reason if proof.outcome is VerificationStatus.DAMAGED else None

    def _sending(self) -> Sending:
        check, ask = self._check_going_on, self._far.ask
        return Sending(
            self._near,
            self._far.storage,
            self._tier.uploads,
            check,
            ask,
            self._is_sent,
            self._sent,
            self.moved.count,
            lambda try_name: try_name in self._far.view.state.tries,
            self._forget_sent,
        )

    def _check_going_on(self) -> None:
        if self._stopping:
            raise StoppedError
        self._far.check()

    def _is_sent(self, path: str, nbytes: int, digest: str) -> bool:
        return self._notes.sent.get(path) == (nbytes, digest)

    def _sent(self, path: str, nbytes: int, digest: str) -> None:
        with self._changed:
            self._notes = replace(self._notes, sent={**self._notes.sent, path: (nbytes, digest)})
            self._note()

    def _forget_sent(self, path: str) -> None:
        with self._changed:
            self._notes = forgotten(self._near, self._notes, path)

    def _note(self) -> None:
        """A note that cannot be written costs a second sending."""
        far = self._far.view
        self._notes = replace(
            self._notes,
            holder=_holder(far),
            replicated=frozenset(entry.try_name for entry in far.entries),
            generation=self._far.generation,
            part=False,
        )
        with suppress(StorageError):
            write_notes(self._near, self._notes)

    def _fail(self, reason: str, *, whole: bool = False) -> None:
        text = (
            reason if whole else f"what is saved near cannot be sent to {self._far.storage.url} now: {reason}"
        )
        with self._changed:
            if text not in self._failures:
                self._failures.append(text)
            self._changed.notify_all()

    def _tell_waiting(self) -> None:
        with self._changed:
            self._changed.notify_all()


def _holder(view: LogView) -> str | None:
    nonce = view.holder.get("nonce")
    return nonce if isinstance(nonce, str) else None
