"""Run asynchronous saves of an engine: at most one at a time, in one reused thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from torchrelay.checkpoint.format.position import Position
from torchrelay.checkpoint.save.assignments import SavePlan
from torchrelay.checkpoint.save.capture import NodeState
from torchrelay.checkpoint.save.change_detection import Verify
from torchrelay.checkpoint.save.pipeline import SaveJob, carry_out
from torchrelay.checkpoint.save.replicas import WholeBytes
from torchrelay.checkpoint.save.staging import StagedCopies, guarded_addresses, stage
from torchrelay.checkpoint.save.staging_memory import (
    Arena,
    Block,
    Pieces,
    free_share,
    likely_bytes,
    pieces_of,
)
from torchrelay.checkpoint.state.restore import gate
from torchrelay.checkpoint.storage.work import Clock
from torchrelay.jobs import runtime
from torchrelay.jobs.runtime import Worker, WorkItem
from torchrelay.jobs.session import Peers, Session
from torchrelay.metadata.handlers import NodeStats
from torchrelay.records import dataclass

SAVES, STANDS_BY = "torchrelay save", "torchrelay (no save)"
"""Names of the thread, shown in stack traces."""
BESIDE_TRAINING = 1
"""Threads that write a file during training: more would slow the training down."""


@dataclass(frozen=True)
class Outcome:
    """Result of a save: its times, or the error, which is the same on all processes."""

    position: Position
    stats: NodeStats | None = None
    error: Exception | None = None


class Background:
    """Stages synchronously; copies, writes and commits in its thread; keeps outcomes until taken.

    At most `staging_limit` bytes of this process are staged (None: half of its share of the memory that is
    free at the first save); the remaining bytes are written before `begin` returns.
    """

    def __init__(self, staging_limit: int | None, verify: Verify) -> None:
        self.staging_limit = staging_limit
        self.verify = verify
        self.blocking: set[str] = set()
        """Blobs that were written without waiting at the gate."""
        self._arena = Arena()
        self._standby = Worker(SAVES, STANDS_BY)
        self._guards = gate.Guards()
        self._pieces: Pieces | None = None
        self._outcomes: deque[Outcome] = deque()
        self._flight: _Flight | None = None
        self._line: tuple[Peers, Peers] | None = None

    # Startup

    def prepare(self, session: Session) -> None:
        """Allocate memory that the first save will likely need, before training begins."""
        self._standby.ready()
        self._reserve(session, likely_bytes(session))

    def _reserve(self, session: Session, nbytes: int) -> Block | None:
        """Memory for so many bytes, or None without room for them now."""
        if self.staging_limit is None:
            self.staging_limit = free_share(session) // 2
        if nbytes > self.staging_limit:
            return None
        try:
            return self._arena.reserve(nbytes)
        except MemoryError:
            return None

    # Capture

    def begin(
        self,
        session: Session,
        job: SaveJob,
        plan: SavePlan,
        clock: Clock,
        whole: WholeBytes | None = None,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """Copy what must be copied now, then continue in the background; waits for an earlier save first.

        `whole` is a full comparison to make before the save is written. `before` runs as in `aside`, also if
        this returns only after the write. Errors of this process alone do not raise here: the background
        reports them to all processes.
        """
        self.wait()
        job = replace(job, peers=self._peers(session))
        # set first: an interrupt of this process then leaves no gate closed for ever
        flight = self._flight = _Flight(job, plan, clock, whole, self._standby, before)
        try:
            with clock.spent("stage"):
                pieces = self._pieces_of(plan, [state.rank for state in job.states])
                block = self._reserve(session, pieces.nbytes)
                if block is not None:
                    flight.stage, states = stage(job.states, pieces, block, self.verify, self.blocking)
                    flight.job = replace(job, states=states, writers=BESIDE_TRAINING)
                    if whole is not None:
                        whole.hash_but(
                            {one.rank: guarded_addresses(one, self.blocking) for one in job.states}
                        )
                    self._guards.put(_owners(job.states, flight.stage))
                    flight.stage.close_gate()
        except Exception as error:
            flight.failed = error
        for place in session.local_nodes:
            session.workspace(place.name).gate = gate.gate
        flight.start(self._ended)
        if flight.stage is None:
            with runtime.waiting():
                flight.on_disk.wait()

    def aside(self, work: Callable[[], None]) -> None:
        """Run some small work in the background before the save in flight writes; at once without one.

        An error in it fails the save.
        """
        if self._flight is None or not self._flight.takes(work):
            work()

    def _pieces_of(self, plan: SavePlan, nodes: Sequence[int]) -> Pieces:
        """The pieces that the hosted nodes stage; cached for saves of the same plan."""
        if self._pieces is None or not self._pieces.belong_to(plan, nodes):
            self._pieces = pieces_of(plan, nodes)
        return self._pieces

    def _peers(self, session: Session) -> Peers:
        """The processes on the background's own connection, opened at the first save of a session."""
        if self._line is None or self._line[0] is not session.peers:
            self._line = (session.peers, session.peers.apart())
        return self._line[1]

    def _ended(self, outcome: Outcome) -> None:
        """Keep the outcome of a save."""
        self._outcomes.append(outcome)

    # Waiting

    def wait(self, *, unguarded: bool = False) -> None:
        """Return when no save is in flight; outcomes are kept. Sends no messages.

        `unguarded`: also remove the gates from registered objects, as loads and users of the objects expect,
        and stop the thread.
        """
        flight = self._flight
        if flight is not None:
            flight.join()
            self._flight = None
            if flight.stage is not None:
                flight.stage.release()
                self.blocking.update(piece.blob for piece in flight.stage.changed)
        self._guards.remove_from_optimizers()
        if unguarded:
            self._guards.remove()
            self._standby.stop()

    def take_outcomes(self) -> list[Outcome]:
        """Outcomes of the saves that ended since the last call, in order."""
        taken = list(self._outcomes)
        self._outcomes.clear()
        return taken


class _Flight:
    """One save in flight."""

    def __init__(
        self,
        job: SaveJob,
        plan: SavePlan,
        clock: Clock,
        whole: WholeBytes | None,
        standby: Worker,
        before: Callable[[], None],
    ) -> None:
        self.job, self.plan, self.clock, self.whole = job, plan, clock, whole
        self.stage: StagedCopies | None = None
        self.failed: Exception | None = None
        self.on_disk = threading.Event()
        self._standby = standby
        self._go, self._given_up = threading.Event(), False
        self._over: WorkItem[None] | None = None
        self._aside: deque[Callable[[], None]] = deque([before])
        self._begins, self._begun = threading.Lock(), False

    def start(self, ended: Callable[[Outcome], None]) -> None:
        """Run in the background thread; `ended` gets the outcome."""

        def run() -> None:
            runtime.wait_for_turn()
            self._go.wait()
            if self._given_up:
                return
            with self._begins:
                self._begun = True
            ended(self._outcome())

        try:
            self._over = self._standby.submit(run)
        except BaseException:  # an interrupt, perhaps during the handover: no process would wait for it
            self._given_up = True
            self._go.set()
            raise
        self._go.set()
        if self._over is None:  # this process has no more threads, but the others have begun
            ended(self._outcome())

    def takes(self, work: Callable[[], None]) -> bool:
        """Add work for the thread to do first; False if it has begun."""
        with self._begins:
            takes = self._over is not None and not self._begun
            if takes:
                self._aside.append(work)
        return takes

    def join(self) -> None:
        """Wait for the end."""
        if self._over is not None:
            self._go.set()
            with runtime.waiting():
                self._standby.wait(self._over)

    def _outcome(self) -> Outcome:
        """Copy, write and commit; releases all leaves here, because that takes as long as listing them."""
        job = replace(self.job, written=self._written)
        del self.job
        try:
            left_undone = self._do_aside()
            self._copy()
            self.failed = self.failed or left_undone
            if self.whole is not None:
                self.whole.compare(job.peers, self.failed)
            return Outcome(job.position, carry_out(job, self.plan, self.clock))
        except Exception as error:
            return Outcome(job.position, error=error)
        finally:
            self.on_disk.set()
            if self.stage is not None:
                self.stage.forget()

    def _do_aside(self) -> Exception | None:
        """Run all added work; returns the first error. Copies follow in any case, because training waits."""
        failed = None
        while self._aside:
            try:
                self._aside.popleft()()
            except Exception as error:
                failed = failed or error
        return failed

    def _copy(self) -> None:
        """Make the late copies; an error is kept, to be reported to the others in their order."""
        if self.failed is not None:
            return
        also = self.whole.hash_rest if self.whole is not None else lambda: None
        try:
            with self.clock.spent("stage"):
                also() if self.stage is None else self.stage.copy(also)
        except Exception as error:
            self.failed = error

    def _written(self) -> None:
        """Called when the pieces are on disk: raises if a source changed while it was copied."""
        if self.failed is not None:
            raise self.failed
        if self.stage is not None:
            self.stage.check()
        self.on_disk.set()


def _owners(states: Sequence[NodeState], copies: StagedCopies) -> list[object]:
    """The registered objects that hold what is copied late."""
    blobs = {piece.blob for piece in copies.late}
    objects: Iterable[tuple[str, object]] = (one for state in states for one in state.objects.items())
    return [value for name, value in objects if name in blobs]
