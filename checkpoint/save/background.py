"""Run asynchronous saves of an engine: at most one at a time, in one reused thread."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from torch.optim import Optimizer

from torchrelay.checkpoint.format.position import Position
from torchrelay.checkpoint.save.assignments import SavePlan
from torchrelay.checkpoint.save.change_detection import Verify
from torchrelay.checkpoint.save.pipeline import SaveJob, carry_out
from torchrelay.checkpoint.save.replicas import WholeBytes
from torchrelay.checkpoint.save.staging import (
    Block,
    Pieces,
    StagedCopies,
    guarded_addresses,
    pieces_of,
    stage,
)
from torchrelay.checkpoint.state import steps
from torchrelay.checkpoint.state.flatten import leaves_of
from torchrelay.checkpoint.state.leaf import Role, spec_of
from torchrelay.checkpoint.state.names import local_part
from torchrelay.checkpoint.storage.work import Clock
from torchrelay.errors import RelayError
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
        self._block = Block(0)
        """That of earlier saves, as long as it is large enough."""
        self._standby = Worker(SAVES, STANDS_BY)
        self._guards = steps.Guards()
        self._pieces: Pieces | None = None
        self._outcomes: deque[Outcome] = deque()
        self._flight: _Flight | None = None
        self._line: tuple[Peers, Peers] | None = None

    def prepare(self, session: Session) -> None:
        """Allocate memory that the first save will likely need, before training begins."""
        self._standby.ready()
        # Estimate the bytes that this process will stage; replicas write a share each.
        total = 0
        for place in session.local_nodes:
            entries = session.workspace(place.name).entries()
            objects = {name: entry.value for name, entry in entries.items() if entry.blob is not None}
            with suppress(RelayError):  # the save itself raises for what cannot be stored
                total += _bytes_of(objects, len(session.nodes))
        self._reserve(session, total + total // 16 + SLACK_BYTES)

    def _reserve(self, session: Session, nbytes: int) -> Block | None:
        """Memory for so many bytes, or None without room for them now; earlier slots must not be in use.

        Touching the pages takes longer than copying into them, so it is done once and early.
        """
        if self.staging_limit is None:
            # The share of the memory that is free on the host, for each process there.
            own = session.local_nodes[0]
            processes = {place.process for place in session.nodes if place.host_index == own.host_index}
            free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
            with suppress(OSError, ValueError, IndexError):
                for line in Path("/proc/meminfo").read_text().splitlines():
                    if line.startswith("MemAvailable:"):
                        free = int(line.split()[1]) * 1024
            self.staging_limit = (free // max(1, len(processes))) // 2
        if nbytes > self.staging_limit:
            return None
        if nbytes > len(self._block.view):
            self._block = Block(0)  # released before the larger one is made
            try:
                self._block = Block(nbytes)
            except (MemoryError, RuntimeError):  # torch raises the latter when it gets no memory
                return None
        return self._block

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
                nodes = tuple(state.rank for state in job.states)
                pieces = self._pieces
                if pieces is None or pieces.plan is not plan or pieces.nodes != nodes:
                    pieces = self._pieces = pieces_of(plan, nodes)
                block = self._reserve(session, pieces.nbytes)
                if block is not None:
                    flight.stage, states = stage(job.states, pieces, block, self.verify, self.blocking)
                    flight.job = replace(job, states=states, writers=BESIDE_TRAINING)
                    if whole is not None:
                        whole.hash_but(
                            {one.rank: guarded_addresses(one, self.blocking) for one in job.states}
                        )
                    late = {
                        piece.blob for piece in flight.stage.late
                    }  # the objects that hold what is copied late
                    objects = [one for state in job.states for one in state.objects.items()]
                    self._guards.put([value for name, value in objects if name in late])
                    flight.stage.close_gate()
        except Exception as error:
            flight.failed = error
        for place in session.local_nodes:
            session.workspace(place.name).gate = steps.gate
        flight.start(self._outcomes.append)
        if flight.stage is None:
            with runtime.waiting():
                flight.on_disk.wait()

    def aside(self, work: Callable[[], None]) -> None:
        """Run small work before the save in flight writes, which its error fails; at once without one."""
        if self._flight is None or not self._flight.takes(work):
            work()

    def _peers(self, session: Session) -> Peers:
        """The processes on the background's own connection, opened at the first save of a session."""
        if self._line is None or self._line[0] is not session.peers:
            self._line = (session.peers, session.peers.apart())
        return self._line[1]

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
        if self._over is not None:
            self._go.set()
            with runtime.waiting():
                self._standby.wait(self._over)

    def _outcome(self) -> Outcome:
        """Copy, write and commit; releases all leaves here, because that takes as long as listing them."""
        job = replace(self.job, written=self._written)
        del self.job
        try:
            left_undone = None
            while self._aside:
                try:
                    self._aside.popleft()()
                except Exception as error:
                    left_undone = left_undone or error
            self._copy()  # in any case, because training waits
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

    def _copy(self) -> None:
        """Make the late copies; an error is kept, to be reported to the others in their order."""
        if self.failed is not None:
            return
        also = self.whole.hash_rest if self.whole is not None else lambda: None
        try:
            with self.clock.spent("stage"):
                also() if self.stage is None else self.stage.copy(also)
            if self.whole is not None and self.stage is not None and self.stage.changed:
                self.stage.check()  # names the cause of the difference of replicas that may follow
        except Exception as error:
            self.failed = error

    def _written(self) -> None:
        """Called when the pieces are on disk: raises if a source changed while it was copied."""
        if self.failed is not None:
            raise self.failed
        if self.stage is not None:
            self.stage.check()
        self.on_disk.set()


STATES_PER_PARAMETER = 2
"""Tensors of its size that an optimizer will keep per parameter, before its first step creates them."""
SLACK_BYTES = 1 << 20


def _bytes_of(objects: dict[str, object], replicas: int) -> int:
    """Bytes of objects that are split between so many replicas."""
    shared = alone = 0
    for leaf in leaves_of(objects):
        spec = spec_of(leaf)
        if spec.kind == "tensor" and leaf.alias_of is None:
            split = leaf.role in (Role.PARAMETER, Role.OPTIMIZER)
            shared, alone = (shared + spec.nbytes, alone) if split else (shared, alone + spec.nbytes)
    for one in objects.values():
        if isinstance(one, Optimizer) and not local_part(one).state:
            sizes = [p.nbytes for group in one.param_groups for p in group["params"]]
            shared += STATES_PER_PARAMETER * sum(sizes)
    return shared // replicas + alone
