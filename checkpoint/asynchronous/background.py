"""The saves of an engine that go on behind the training: at most one at a time, in one thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from torchrelay.checkpoint.asynchronous import gate
from torchrelay.checkpoint.asynchronous.arena import Arena
from torchrelay.checkpoint.asynchronous.estimate import free_share, likely_bytes
from torchrelay.checkpoint.asynchronous.samples import Verify
from torchrelay.checkpoint.asynchronous.stage import Stage, bytes_to_stage, stage, tensors_of
from torchrelay.checkpoint.planning.assignments import Plan
from torchrelay.checkpoint.position import Position
from torchrelay.checkpoint.save import Clock, SaveJob, carry_out
from torchrelay.errors import UsageError
from torchrelay.jobs.peers import Peers
from torchrelay.jobs.session import Session
from torchrelay.metadata.stats import NodeStats

BESIDE_TRAINING = 1
"""Writers of a file while the training goes on: more would take the processor from it."""


@dataclass(frozen=True)
class Outcome:
    """What became of a save: its times, or the error that all processes have alike."""

    position: Position
    stats: NodeStats | None = None
    error: Exception | None = None


class Background:
    """Stages at the boundary, copies, writes and commits in its thread; keeps outcomes until asked.

    `staging_limit` bytes of this process are staged at most (None: half of its share of the memory that
    is free when first asked); what is more is written before the boundary returns.
    """

    def __init__(self, staging_limit: int | None, verify: Verify) -> None:
        self.staging_limit = staging_limit
        self.verify = verify
        self.blocking: set[str] = set()
        """Blobs that somebody wrote behind the gate's back."""
        self._arena = Arena()
        self._outcomes: deque[Outcome] = deque()
        self._flight: _Flight | None = None
        self._line: tuple[Peers, Peers] | None = None

    # At the start

    def prepare(self, session: Session) -> None:
        """Touch the memory that the first save will likely need, while nobody waits for it yet."""
        self._reserve(session, likely_bytes(session))

    def _reserve(self, session: Session, nbytes: int) -> bool:
        """Whether there is room for so many bytes now."""
        if self.staging_limit is None:
            self.staging_limit = free_share(session) // 2
        if nbytes > self.staging_limit:
            return False
        try:
            self._arena.reserve(nbytes)
        except MemoryError:
            return False
        return True

    # At a boundary

    def begin(self, session: Session, job: SaveJob, plan: Plan, clock: Clock) -> None:
        """Copy what must be copied now and go on in the background; an earlier save is waited for first.

        Does not raise what happens to this process alone: the background tells it to all.
        """
        self.wait()
        job = replace(job, peers=self._peers(session))
        flight = _Flight(job, plan, clock)
        try:
            with clock.spent("stage"):
                pieces = [tensors_of(state, plan) for state in job.states]
                if self._reserve(session, bytes_to_stage(pieces)):
                    flight.stage, states = stage(job.states, pieces, self._arena, self.verify, self.blocking)
                    flight.job = replace(job, states=states, writers=BESIDE_TRAINING)
                    flight.stage.close_gate(_owners(job, flight.stage))
        except Exception as error:
            flight.failed = error
        for place in session.local_nodes:
            session.workspace(place.name).gate = gate.gate
        self._flight = flight
        flight.start(self._ended)
        if flight.stage is None:
            flight.on_disk.wait()

    def _peers(self, session: Session) -> Peers:
        """The processes on the background's own line, opened at the first save of a session."""
        if self._line is None or self._line[0] is not session.peers:
            self._line = (session.peers, session.peers.apart())
        return self._line[1]

    def _ended(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)

    # Later

    def wait(self) -> None:
        """Return when nothing is in flight; outcomes are kept. Talks to nobody."""
        flight = self._flight
        if flight is None:
            return
        flight.join()
        self._flight = None
        if flight.stage is not None:
            flight.stage.release()
            self.blocking.update(piece.blob for piece in flight.stage.changed)

    def take_outcomes(self) -> list[Outcome]:
        """What became of the saves that ended since the last time, in their order."""
        taken = list(self._outcomes)
        self._outcomes.clear()
        return taken


class _Flight:
    """One save on its way."""

    def __init__(self, job: SaveJob, plan: Plan, clock: Clock) -> None:
        self.job, self.plan, self.clock = job, plan, clock
        self.stage: Stage | None = None
        self.failed: Exception | None = None
        self.on_disk = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, ended: Callable[[Outcome], None]) -> None:
        thread = threading.Thread(target=self._run, args=(ended,), name="torchrelay save", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads in this process, but the others are on their way
            self._run(ended)
        else:
            self._thread = thread

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _run(self, ended: Callable[[Outcome], None]) -> None:
        position = self.job.position
        try:
            self._copy()
            outcome = Outcome(
                position, carry_out(replace(self.job, written=self._written), self.plan, self.clock)
            )
        except Exception as error:
            outcome = Outcome(position, error=error)
        finally:
            self.on_disk.set()
        ended(outcome)

    def _copy(self) -> None:
        """Make the late copies; a failure is kept, because the others must hear of it in their turn."""
        if self.stage is None or self.failed is not None:
            return
        try:
            with self.clock.spent("stage"):
                self.stage.copy()
        except Exception as error:
            self.failed = error

    def _written(self) -> None:
        """Called when the pieces are on the disk: only what was at the boundary may count."""
        if self.failed is not None:
            raise self.failed
        if self.stage is not None:
            self.stage.check()
        self.on_disk.set()


def _owners(job: SaveJob, copies: Stage) -> list[object]:
    """The registered objects that hold what is copied late."""
    blobs = {piece.blob for piece in copies.late}
    objects: Iterable[tuple[str, object]] = (one for state in job.states for one in state.objects.items())
    return [value for name, value in objects if name in blobs]


def background_of(asynchronous: bool, staging_limit: int | None, verify: str) -> Background | None:
    """The background of an asynchronous manager; raises UsageError for values that cannot be."""
    if type(asynchronous) is not bool:
        raise UsageError(f"asynchronous is {asynchronous!r:.80}; it is True or False")
    if staging_limit is not None and (type(staging_limit) is not int or staging_limit < 0):
        raise UsageError(f"staging_limit is {staging_limit!r:.80}; it is a number of bytes, or None")
    if staging_limit is not None and not asynchronous:
        raise UsageError("staging_limit is for asynchronous saves: give asynchronous=True too")
    if verify not in ("samples", "full"):
        raise UsageError(f"verify_staging is {verify!r:.80}; it is 'samples' or 'full'")
    return Background(staging_limit, "full" if verify == "full" else "samples") if asynchronous else None
