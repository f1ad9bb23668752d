"""`Run`: the program's own loop over epochs, which is saved, resumed and ended as a job is."""

from __future__ import annotations

import atexit
import inspect
import os
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torchrelay.checkpoint.manager.checkpoint_manager import check_options
from torchrelay.errors import LeftByInterrupt, NotAllowedNowError, TaskFailedError, UsageError
from torchrelay.jobs.blobs import LoopBlobs, Step
from torchrelay.jobs.job import Job
from torchrelay.jobs.session import warn
from torchrelay.jobs.stop import StopAnswer, max_epochs
from torchrelay.jobs.task import Task
from torchrelay.runners.session.metrics import Accumulator, joined
from torchrelay.runners.session.stop_requests import Interrupted
from torchrelay.runners.training.job_runner import JobRunner

if TYPE_CHECKING:
    from torchrelay.checkpoint.manager.base import Manager
    from torchrelay.runners.session.base import SessionBase
    from torchrelay.runners.session.context import Context, Reduction
    from torchrelay.runners.training.plan import RunResult
    from torchrelay.runners.training.run_loop import Life


class Run:
    """A run whose epochs are the turns of a loop in your own program.

    The loop resumes where the last start ended, in the middle of an epoch too; each of its epochs is saved
    when its body ends. SIGTERM and time limits end it at a step, and the next start resumes there.
    The body of the loop is the only task of a `Job`, so all that `JobRunner` does for a job it does here.

    `break` at the end of a body ends this start; the epoch is saved, and the next start resumes after it.
    An epoch that is left within `steps` is not saved, and the next start repeats it. An exception fails the
    run on all ranks, and nothing of that epoch is saved.

    Args:
        where: The run directory, its URL, or a checkpoint manager.
        blobs: What is saved, by name: modules, optimizers, schedulers, loaders, tensors, values.
        stop_when: Stop conditions, asked on all ranks after each epoch.
        session: As for `JobRunner.train`; torchrun's, or a local one, where none is given.
        options: Those of `JobRunner`: `best`, `resume`, `resume_from_epoch`, `asynchronous`, `keep_last`, ...

    Raises:
        UsageError: An option is wrong, or the session plays several nodes in this process.

    Example:
        with torchrelay.Run("runs/mnist", dict(model=model, optimizer=optimizer, loader=loader)) as run:
            for epoch in run.epochs(10):
                for x, y in run.steps(loader):
                    loss = F.cross_entropy(model(x), y)
                    optimizer.zero_grad(); loss.backward(); optimizer.step()
                    run.log("train/loss", loss)
        print(run.result.status, int(run.result))
    """

    def __init__(
        self,
        where: str | Path | Manager,
        blobs: Mapping[str, Any] | None = None,
        *,
        stop_when: Iterable[Any] = (),
        session: SessionBase | None = None,
        **options: Any,
    ) -> None:
        self._blobs = LoopBlobs(blobs, factories=True)
        self.job = Job(blobs=blobs)
        self._stop = _StopAsked()
        self.job.stop_when(self._stop, *stop_when)
        self._task = Task(loop_body, name="epoch", group=self.job.epoch_group)
        check_options("Run", options, inspect.signature(JobRunner).parameters)
        self._runner = JobRunner(self.job, where, **options)
        self._session = session
        self._stack = ExitStack()
        self._epochs: Generator[int] | None = None
        self._life: Life | None = None
        self._ctx: Context | None = None
        self._has_ended = False
        self._loops: list[Iterator[Any]] = []
        """The loops over steps of this epoch that are running, the outermost first."""
        self._inside = False
        """Whether the last loop over steps was left before its end, or one around it is running."""
        self._process = os.getpid()

    def __enter__(self) -> Run:
        """Take the signals and the session; what the run resumes from is loaded by `epochs`."""
        if self._life is not None:
            raise NotAllowedNowError("this Run was entered before: make a new one for another start")
        self._life = self._stack.enter_context(self._runner.life(self._session))
        self._stack.callback(atexit.unregister, self._program_ends)
        atexit.register(self._program_ends)
        return self

    def _program_ends(self) -> None:
        """The block was never left: while this can still be noted."""
        if self._process != os.getpid():
            return
        if self._epochs is not None:
            self._epochs.close()
        error = NotAllowedNowError("the program ended within the `with` block of its Run")
        with suppress(NotAllowedNowError):
            self._stack.__exit__(type(error), error, None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """End the run as what happened in the block says; a run that leaves early ends without an error."""
        loop = self._epochs
        if self._process != os.getpid():  # forked off within the block: the run is that of the other process
            return False
        try:
            if error is not None:
                if loop is None:
                    raise error
                loop.throw(error)
            elif loop is not None and inspect.getgeneratorstate(loop) == inspect.GEN_SUSPENDED:
                life = self._running
                life.requests.stop("the loop over epochs was left by break")
                if self._inside:  # or by an exception that the program has caught, within its steps
                    cursor = life.state.cursor_of(self.ctx.node)
                    if cursor is not None:
                        cursor.refuse("its loop was left within run.steps")
                    loop.throw(Interrupted())
                else:
                    next(loop, None)
        except BaseException as failure:
            try:
                left = self._stack.__exit__(type(failure), failure, failure.__traceback__)
            except LeftByInterrupt as stopped:  # without the lines of torchrelay, here and below
                raise stopped.with_traceback(None) from None
            except TaskFailedError as failed:
                raise failed.with_traceback(None) from failed.__cause__
            self._has_ended |= bool(left)
            if failure is error or left:
                return bool(left)
            raise
        self._stack.close()
        if loop is None:
            warn(
                "the block of the Run had no loop over run.epochs(): nothing was loaded or saved",
                stacklevel=2,
            )
        return False

    # The loop

    def epochs(self, count: int | None = None) -> Iterator[int]:
        """The numbers of the epochs that are left, from 1 for a new run; `count` is the total of the run.

        Before the first one the run is set up: objects are loaded from the newest position, or `init` runs.
        A run that has ended gives none, and its objects are as its last epoch left them.
        """
        if self._life is None:
            raise UsageError("the run has not begun: put the loop into `with torchrelay.Run(...) as run:`")
        if self._epochs is not None:
            raise NotAllowedNowError("run.epochs() was called before: a Run has one loop")
        if count is not None:
            self.job.stop_when(max_epochs(count))
        self._epochs = self._loop()
        return self._epochs

    def _loop(self) -> Generator[int]:
        life = self._running
        try:
            for epoch in life.epochs():
                with life.session.block(self.job.epoch_group, self._task) as self._ctx:
                    self._loops, self._inside = [], False
                    yield epoch
                    self._blobs.check_registered()
        finally:
            self._ctx = None
        self._stack.close()  # what the program does behind its loop is no part of the run
        self._has_ended = True

    def steps(self, loader: Iterable[Any], *, count: bool = True, accumulate: int = 1) -> Iterator[Any]:
        """Iterate over a loader's batches; all ranks begin and end the loop together.

        Args:
            loader: The batches; an `EpochLoader` among the blobs resumes within an epoch.
            count: Whether batches count as steps; False for evaluation.
            accumulate: Batches per optimizer step; `window_end` is True in the last one of each window.

        Returns:
            An iterator over the batches, valid in this epoch.

        Raises:
            UsageError: Steps cannot be counted here, or ranks make different loops.

        Example:
            for x, y in run.steps(loader):
                loss = F.cross_entropy(model(x), y)
        """
        return self._followed(self.ctx.steps(loader, count=count, accumulate=accumulate), self._ctx)

    def _followed(self, batches: Iterator[Any], epoch: Context | None) -> Iterator[Any]:
        running = self._loops
        try:
            while True:
                if self._ctx is not epoch:
                    raise NotAllowedNowError(
                        "this iterator of run.steps is from an epoch that is over: call it again"
                    )
                if batches not in running:  # at first, or resumed by zip_longest() behind the other's end
                    running.append(batches)
                    self._inside = True
                try:
                    batch = next(batches)
                except StopIteration:
                    break
                yield batch
            del running[running.index(batches) :]  # with those in its body that are suspended, as in zip()
            self._inside = bool(running)
        finally:  # left by break, too
            running[:] = [one for one in running if one is not batches]

    def stop(self, reason: str) -> None:
        """Finish the run after this epoch; it is enough if one rank calls it."""
        _ = self._running
        self._stop.reason = reason

    @property
    def window_end(self) -> bool:
        """Whether the step being run is the last of its window; see `Context.window_end`."""
        return self.ctx.window_end

    # Metrics

    def log(
        self, name: str, value: Any, reduce: Reduction = "mean", weight: Any = 1, *, every: int | None = None
    ) -> None:
        """Log a metric; it is reduced over the steps and ranks of the epoch when the epoch ends.

        Args:
            name: Its name, such as "train/loss".
            value: A number or a tensor of one element; tensors do not synchronize the device.
            reduce: "mean", "sum", "min", "max" or "last".
            weight: The weight of this value in a mean, such as the number of samples.
            every: Also record a point within the epoch every so many steps of `steps`.

        Example:
            run.log("train/loss", loss, weight=len(x), every=50)
        """
        self.ctx.log(name, value, reduce, weight, every=every)

    def metric(self, name: str) -> float:
        """Return what has been logged in this epoch so far, reduced over ranks; all ranks call this together.

        If no rank has logged it in this epoch, it is the value of the last epoch that has.

        Raises:
            MissingMetricError: No epoch has logged this name.
        """
        ctx, life = self.ctx, self._running
        running = life.state.log_of(ctx.node).snapshot().get(name)
        own = {} if running is None else {name: running.encode()}
        life.session.loops.ask(f"run.metric({name!r})")
        logged = life.peers.exchange(f"metric {name}", own)
        now = joined({key: Accumulator.decode(one) for key, one in node.items()} for node in logged)
        return now[name] if name in now else ctx.metric(name)

    # Around the loop

    def init(self, step: Any = None, **options: Any) -> Any:
        """Declare what a new run does once, before epoch 1, and a resumed one does not; as `@job.init`."""
        return self.job.init(step, **options)

    def exit(self, step: Any = None, **options: Any) -> Any:
        """Declare what is done when the run has ended; as `@job.exit`."""
        return self.job.exit(step, **options)

    @property
    def ctx(self) -> Context:
        """Where the program runs and what it may ask for: rank, device, workspace and so on."""
        if self._ctx is not None:
            return self._ctx
        return self._running.session.context()

    @property
    def result(self) -> RunResult:
        """How the run ended: the last epoch, as a number, with its status and metrics."""
        if self._life is None or not self._has_ended:
            raise NotAllowedNowError(
                "the run has not ended, or has failed: ask for its result after a loop over run.epochs()"
            )
        return self._life.result

    @property
    def _running(self) -> Life:
        if self._life is None or not hasattr(self._life, "session"):
            raise NotAllowedNowError("the run is not running: call this within its `with` block")
        return self._life


class _StopAsked:
    """The stop condition behind `Run.stop`."""

    name = "stop"
    rule = "any"
    limit = False
    reason: str | None = None

    def ask(self, ctx: Context) -> StopAnswer:
        """See `StopCondition.ask`."""
        return StopAnswer(self.reason is not None, self.reason or "")


def loop_body(ctx: Context) -> Step:
    """Stand for the body of the loop, by a name that users see in messages."""
    raise UsageError("the epochs of this job are those of a loop: train it by `for epoch in run.epochs()`")
