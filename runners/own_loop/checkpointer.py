"""`Checkpointer`: only the checkpoints, for loops and trainers that do everything else themselves."""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from torchrelay.checkpoint.format.position import MAX_EPOCH, MAX_STEP, Facts, Position
from torchrelay.checkpoint.log.record import LOG
from torchrelay.checkpoint.manager.checkpoint_manager import MultiNodeCheckpointManager, check_options
from torchrelay.errors import (
    NotAllowedNowError,
    PartiallyLoadedError,
    StorageError,
    UsageError,
    install_excepthook,
)
from torchrelay.jobs.blobs import LoopBlobs
from torchrelay.jobs.job import Job
from torchrelay.jobs.random import current_seed
from torchrelay.jobs.session import decide, is_grouped, warn
from torchrelay.runners.distributed.launcher import read_launch_env
from torchrelay.runners.monitoring.progress import works_shown
from torchrelay.runners.monitoring.text import LEVELS, level_wanted, stamped
from torchrelay.runners.session.base import SessionBase, holding
from torchrelay.runners.session.local import LocalSession, current_or_new_session, current_session
from torchrelay.runners.session.mid_epoch import MidEpochPosition, places_json
from torchrelay.runners.training.journal import SaveWarning
from torchrelay.runners.training.plan import check_epoch
from torchrelay.runners.training.resume import FromProgram
from torchrelay.runners.training.startup import bind_blobs, check_blobs, this_process, warn_of_bare_ddp

if TYPE_CHECKING:
    from torchrelay.checkpoint.save.background import Background
    from torchrelay.jobs.session import Peers
    from torchrelay.jobs.workspace import Workspace

P = ParamSpec("P")
T = TypeVar("T")


def _exclusive(call: Callable[Concatenate[Checkpointer, P], T]) -> Callable[Concatenate[Checkpointer, P], T]:
    """One call at a time: other threads wait, but a signal handler would wait for what it interrupts."""

    @functools.wraps(call)
    def exclusive(self: Checkpointer, /, *args: P.args, **options: P.kwargs) -> T:
        with self._lock:
            if self._busy:
                raise NotAllowedNowError(
                    f"{call.__name__} was called within another call of this Checkpointer: a signal handler "
                    "sets a flag, and the loop calls it"
                )
            self._busy = True
            try:
                return call(self, *args, **options)
            finally:
                self._busy = False

    return exclusive


class Checkpointer:
    """Saves and resumes objects by name; all ranks call each of its methods together.

    A save is committed atomically: a process that is killed leaves the newest committed one. Random states of
    Python, NumPy and torch are saved and restored with the objects. One process group may write to a
    directory at a time; `close` lets it go, and so does the end of the process.

    Args:
        where: The directory of the checkpoints, or its URL.
        blobs: What is saved, by name: modules, optimizers, schedulers, loaders, tensors, dicts and lists of
            values. Each is filled in place, so a number of its own is refused: put it into a dict.
        session: torchrun's, or a local one, where none is given.
        options: Those of `MultiNodeCheckpointManager`: `keep_last`, `keep_best`, `exclude`, `tier`, ...

    Raises:
        UsageError: There are no blobs, one cannot change in place, or an option is wrong.

    Example:
        ckpt = torchrelay.Checkpointer("runs/x/checkpoints", dict(model=model, optimizer=optimizer))
        start = ckpt.resume()
        for epoch in range(start.epoch + 1 if start else 1, 11):
            train_one_epoch()
            ckpt.save(epoch, metrics={"val/acc": accuracy}, asynchronous=True)
        ckpt.close()
    """

    def __init__(
        self,
        where: str | Path,
        blobs: Mapping[str, Any],
        *,
        session: SessionBase | None = None,
        **options: Any,
    ) -> None:
        install_excepthook()  # integrations use no public name
        if not isinstance(blobs, Mapping) or not blobs:
            raise UsageError(
                f"blobs is {blobs!r:.80}; give what is to be saved by name, "
                "for example dict(model=model, optimizer=optimizer)"
            )
        self._blobs = LoopBlobs(blobs, factories=False)
        check_options("Checkpointer", options, ("takeover_secs", "metadata_handler"))
        if (Path(where) / "checkpoints" / LOG).is_dir():
            raise UsageError(
                f"{where} is a run directory, which Run and JobRunner resume: "
                "give a Checkpointer one of its own"
            )
        self._job = Job(blobs=blobs)
        self._manager = MultiNodeCheckpointManager(where, **{"asynchronous": True, **options})
        self._engine = self._manager.engine
        self._background: Background | None = self._engine.background
        self._engine.background = None
        self._given = session
        self._session: SessionBase | None = None
        self._workspaces: dict[str, Workspace] = {}
        """Its own, for others may use its session, and the same names, for other objects."""
        self._stack = ExitStack()
        self._open = self._busy = False
        self._lock = threading.RLock()
        weakref.finalize(self, _let_go, self._manager)  # a program may end without `close`

    # Resuming

    @_exclusive
    def resume(self, epoch: int | None = None) -> Position | None:
        """Load the newest position that can be verified, or exactly this epoch.

        An epoch that is asked for rewinds: later epochs are left to an abandoned branch. Without one, a
        damaged epoch is replaced by the one before, with a warning.

        Args:
            epoch: The number of a committed epoch; None for the newest position.

        Returns:
            What was loaded, with its `epoch` and `step`; None where nothing was ever saved.

        Raises:
            UnknownEpochError: That epoch is not committed; the message lists those that are.
            DamagedError: That epoch is damaged.
            BlobError: What is stored does not fit into an object.
        """
        epoch = check_epoch(epoch, "epoch")
        session = self._bound()
        ledger, peers = self._engine.ledger, session.peers
        with holding(session, self._workspaces), self._shown(session):
            _check_alike(peers, "resume", {"epoch": epoch})
            self._wait()
            look = ledger.look(peers)
            if epoch is not None:
                ledger.check(peers, epoch)
            self._take_log(session)
            nodes = tuple(place.name for place in session.nodes)
            if epoch is None and not look.commits:
                session.run(self._manager.init(nodes))
                return None
            target = ledger.newest(peers, warn) if epoch is None else ledger.verify_epoch(peers, epoch)
            while True:
                try:
                    session.run(self._manager.go_on_at(nodes, target))
                    break
                except (StorageError, PartiallyLoadedError) as error:
                    if epoch is not None:
                        raise
                    target = ledger.instead_of(peers, target, error, warn)
            for node, streams in self._engine.take_streams().items():
                session.set_streams(node, streams)
            for gradients in self._engine.take_gradients().values():
                gradients.install()
            if epoch is not None and look.epoch != epoch:
                by_user = {"epoch": epoch, "process": this_process(), "by": "user"}
                ledger.rewind(peers, target.position, by_user)
            return target.position

    # Saving

    @_exclusive
    def save(
        self,
        epoch: int,
        step: int = 0,
        *,
        metrics: Mapping[str, float] | None = None,
        asynchronous: bool = False,
    ) -> None:
        """Save all objects as they are now.

        Args:
            epoch: How many epochs are done.
            step: How many steps of the next one are done.
            metrics: Values of this epoch, alike on all ranks; `open_checkpoint(..., epoch="best")` finds it
                by them.
            asynchronous: Return when a registered optimizer may step again, and write in the background.
                Call `wait` before you write to its parameters yourself (clipping, `.data`). An earlier save
                is waited for first. A failure is raised by the next `save`, `wait` or `close`.

        Raises:
            SaveFailedError: It could not be saved, on any rank. Nothing is committed then.
            FencedError: Another job has taken the directory over.

        Example:
            ckpt.save(epoch, metrics={"val/acc": accuracy}, asynchronous=True)
        """
        if asynchronous and self._background is None:
            raise UsageError("this Checkpointer was made with asynchronous=False: leave that out")
        position = Position(_whole(epoch, "epoch", MAX_EPOCH), _whole(step, "step", MAX_STEP))
        measured = {name: _number(name, value) for name, value in dict(metrics or {}).items()}
        self._blobs.check_registered()
        session = self._bound()
        wish = {"epoch": position.epoch, "step": position.step, "asynchronous": asynchronous}
        _check_alike(session.peers, "save", wish)
        if not self._open:
            if self._engine.ledger.look(session.peers).commits:
                raise NotAllowedNowError(
                    f"{self._manager.db_prefix} has checkpoints: call resume() before the first save"
                )
            self._take_log(session)
        self._wait()
        self._engine.background = self._background if asynchronous else None
        inside = MidEpochPosition(steps=position.step)
        places = places_json({place.name: inside for place in session.nodes}) if position.step else {}
        self._manager.note(Facts(metrics=measured, seed=current_seed(), places=places))
        with holding(session, self._workspaces), self._shown(session):
            session.run(self._manager.save(position))

    @_exclusive
    def wait(self) -> None:
        """Return when the save in flight is committed; raises what kept it from that."""
        self._wait()

    def _wait(self) -> None:
        with self._shown(self._session):
            outcomes = list(self._manager.settle())
        for outcome in outcomes:
            if outcome.error is not None:
                raise outcome.error

    @property
    def epochs(self) -> tuple[int, ...]:
        """The epochs that are committed, ascending."""
        ledger, peers = self._engine.ledger, self._bound().peers
        return tuple(decide(peers, "epochs", lambda: ledger.view().epochs(), by=ledger.reader_of(peers)))

    @_exclusive
    def close(self) -> None:
        """Wait for the save in flight, and let the directory go; the objects stay as they are."""
        try:
            self._wait()
            if self._session is not None and self._open:
                with holding(self._session, self._workspaces):
                    self._manager.finish(self._session)
        finally:
            self._engine.background = self._background
            _let_go(self._manager)
            self._open, self._session = False, None
            self._stack.close()

    def __enter__(self) -> Checkpointer:
        """Close it behind a `with` block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:  # the other ranks may not come
            _let_go(self._manager)

    # Where

    def _bound(self) -> SessionBase:
        """The session whose nodes hold the objects."""
        if self._session is not None:
            return self._session
        session, current = self._given, current_session()
        alone = current is None or current.peers.size == 1
        if session is None and alone and not (read_launch_env().launched or is_grouped()):
            session = self._stack.enter_context(closing(LocalSession()))
        session = self._stack.enter_context(current_or_new_session(session))
        session.place(self._job.nodes())
        check_blobs(self._job)
        self._manager.bind(self._job)
        with holding(session, self._workspaces):
            for before in (True, False):
                bind_blobs(self._job, session, before_setup=before)
            session.after_setup()
            FromProgram(()).note(session, warn)
            self._engine.prepare(session)
        warn_of_bare_ddp(session, warn)
        self._session = session
        return session

    def _shown(self, session: SessionBase | None) -> AbstractContextManager[None]:
        """Show on rank 0 how far a save or a load is that takes long."""
        if session is None or session.peers.rank != 0 or level_wanted() > LEVELS["info"]:
            return nullcontext()
        return works_shown(lambda text: print(stamped(text, level="I", who="r0"), file=sys.stderr))

    def _take_log(self, session: SessionBase) -> None:
        if not self._open:
            ledger = self._engine.ledger
            ledger.in_run = True
            ledger.open(session.peers)
            self._open = True


def _whole(value: Any, name: str, most: int) -> int:
    checked = check_epoch(value, name, most)
    if checked is None:
        raise UsageError(f"{name} is None: give the number of {name}s that are done")
    return checked


def _number(name: Any, value: Any) -> float:
    """A metric; tensors and arrays of one element are numbers."""
    try:
        if isinstance(name, str):
            return float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError):
        pass
    raise UsageError(f"metrics has {name!r}: {value!r:.80}; give numbers by name")


def _check_alike(peers: Peers, call: str, wish: dict[str, Any]) -> None:
    """Raise UsageError on all ranks where one asks for something else."""
    wishes = peers.exchange(f"Checkpointer.{call}", wish)
    for rank, other in enumerate(wishes):
        if other != wishes[0]:
            first, second = (", ".join(f"{name}={one[name]}" for name in one) for one in (wishes[0], other))
            raise UsageError(
                f"{call}({first}) on rank 0, {call}({second}) on rank {rank}: all ranks ask for the same"
            )


def _let_go(manager: MultiNodeCheckpointManager) -> None:
    """End what is in flight, without the others, so that the next writer need not wait."""
    engine = manager.engine
    engine.wait(unguarded=True)
    for outcome in engine.settle():
        if outcome.error is not None:
            warn(f"epoch {outcome.position} was NOT saved: {outcome.error}", SaveWarning)
    engine.ledger.close()
