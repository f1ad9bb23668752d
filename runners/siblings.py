"""What runs beside each other on a node: the first failure wins, the others end, all threads are joined."""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from torchrelay.errors import RelayError, TaskFailedError
from torchrelay.jobs.blobs import Step, step_name
from torchrelay.jobs.task import Task

logger = logging.getLogger("torchrelay")
_PATIENCE_SECS = 30.0


class CancelledError(BaseException):
    """Ends a step whose sibling failed; passes by `except Exception` of users and never leaves a run."""


class Siblings:
    """Threads of one node's run, and the first failure among them and the thread that started them.

    Siblings of `above` (the instances of one of its tasks) also end when somebody there fails.
    """

    def __init__(self, above: Siblings | None = None) -> None:
        self._above = above
        self.error: BaseException | None = None
        self._failed = threading.Event()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    @property
    def cancelled(self) -> bool:
        """Whether somebody failed, so that everybody should end soon."""
        return self._failed.is_set() or (self._above is not None and self._above.cancelled)

    def check(self) -> None:
        """Raise CancelledError when somebody else failed."""
        if self.cancelled:
            raise CancelledError

    def fail(self, error: BaseException) -> None:
        """Note a failure; only the first one counts, and an end that it caused is none."""
        with self._lock:
            if self.error is None and not isinstance(error, CancelledError):
                self.error = error
        self._failed.set()

    def guarded(self, work: Callable[[], object]) -> None:
        """Run `work`; a failure is noted instead of raised."""
        try:
            work()
        except BaseException as error:
            self.fail(error)

    def start(self, name: str, work: Callable[[], object]) -> threading.Thread:
        """Run `work` in a thread of its own."""
        thread = threading.Thread(target=self.guarded, args=(work,), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def join(self) -> None:
        """Wait for all threads; after a failure it is said who keeps everybody waiting."""
        for thread in self._threads:
            self._await(thread)
        self._threads.clear()

    def _await(self, thread: threading.Thread) -> None:
        while True:
            thread.join(_PATIENCE_SECS)
            if not thread.is_alive():
                return
            if self.cancelled:
                logger.warning(
                    "waiting for %s to end, because %s; let long loops ask ctx.cancelled",
                    thread.name,
                    self.error,
                )

    def settle(self) -> None:
        """Join all threads and raise the first failure, or CancelledError where that came from above."""
        self.join()
        error, self.error = self.error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback refers to these frames
        self.check()


def task_failed(where: object, task: Task | None, step: Step, error: Exception) -> RelayError:
    """The error that a failed step becomes."""
    name = step_name(step) or "an unnamed step"
    of_task = f" of task {task.full_name!r}" if task is not None else ""
    return _program_failed(f"step {name!r}{of_task}", where, error)


@contextmanager
def naming(what: str, where: object) -> Iterator[None]:
    """Make an exception of the user's code an error that says what of the program failed, and where."""
    try:
        yield
    except RelayError:
        raise
    except Exception as error:
        raise _program_failed(what, where, error) from error


def _program_failed(what: str, where: object, error: Exception) -> RelayError:
    """The error that a failure of the user's code becomes; errors of torchrelay itself stay what they are."""
    if isinstance(error, RelayError):
        return error
    reason = "".join(traceback.format_exception_only(type(error), error)).strip()
    failed = TaskFailedError(f"{what} failed on {where}: {reason}")
    failed.__cause__ = error
    failed.details = "".join(traceback.format_exception(type(error), error, _users_part(error)))
    return failed


def _users_part(error: Exception) -> TracebackType | None:
    """The traceback from the user's step on, without the frames that called it."""
    frames = error.__traceback__
    while frames is not None and "torchrelay" in frames.tb_frame.f_globals.get("__name__", ""):
        if frames.tb_next is None:
            return error.__traceback__
        frames = frames.tb_next
    return frames or error.__traceback__
