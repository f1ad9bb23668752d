"""Utilities of all packages: garbage collection, background threads, signatures, paths, durations.

A background thread would hold the GIL for 5 ms at a time while the training thread is between two epochs. So
background work (writing a save, deleting old epochs) starts only with the tasks of the next epoch, or after
`MOST_SECS`; work in progress is not interrupted.

`Signature` describes the inputs and outputs of a model for packages, ONNX files and the server. A dynamic
size is a name, and equal names mean equal sizes: ("batch", 3, 32, 32).
"""

from __future__ import annotations

import errno
import gc
import mmap
import os
import re
import sys
import threading
import time
import unicodedata
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from stat import S_ISDIR
from typing import Any, Generic, TypeVar

from torchrelay.errors import StorageError, UsageError
from torchrelay.records import dataclass

_lock = threading.Lock()
_inside = 0
_was_on = False


@contextmanager
def undisturbed() -> Iterator[None]:
    """Context manager that disables automatic garbage collection, also nested and in several threads.

    Saving or loading 50,000 tensors creates a million objects that stay in use, so full collections would
    find nothing and take half of the time. At the end only the youngest generation is collected, because a
    pending full collection takes 50 ms or more.
    """
    global _inside, _was_on  # noqa: PLW0603  # one switch per process is what there is
    with _lock:
        if _inside == 0:
            _was_on = gc.isenabled()
            gc.disable()
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside = max(0, _inside - 1)  # it was reset in a child forked inside
            if _inside == 0 and _was_on:
                if gc.get_count()[0] > gc.get_threshold()[0] > 0:  # a collection is due
                    gc.collect(0)
                gc.enable()


def _reset_after_fork() -> None:
    """Restore the collector in a forked child, which has none of the threads that would do it."""
    global _lock, _inside  # noqa: PLW0603  # one switch per process is what there is
    _lock = threading.Lock()
    if _inside and _was_on:
        gc.enable()
    _inside = 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)


MOST_SECS = 0.1
"""Longest delay of background work."""

_may_begin = threading.Event()
_may_begin.set()


class _Turn:
    """Decides whether background work may start: not between epochs, unless a thread waits for it."""

    def __init__(self) -> None:
        self._changing, self._undivided, self._waiting = threading.Lock(), False, 0

    def change(self, undivided: bool | None = None, waiting: int = 0) -> None:
        with self._changing:
            self._undivided = self._undivided if undivided is None else undivided
            self._waiting += waiting
            if self._undivided and not self._waiting:
                _may_begin.clear()
            else:
                _may_begin.set()


_turn = _Turn()


@contextmanager
def undivided(*, beyond: bool = False) -> Iterator[None]:
    """Keep background threads from starting anything new, for at most `MOST_SECS` each.

    With `beyond` this lasts until `begin_now` is called, unless the block raises.
    """
    _turn.change(undivided=True)
    try:
        yield
    except BaseException:
        _turn.change(undivided=False)
        raise
    if not beyond:
        _turn.change(undivided=False)


def begin_now() -> None:
    """Allow background work to start; called when a task of the program starts."""
    _turn.change(undivided=False)


@contextmanager
def waiting() -> Iterator[None]:
    """Context manager that allows background work to start, for a caller that waits for it."""
    _turn.change(waiting=1)
    try:
        yield
    finally:
        _turn.change(waiting=-1)


def wait_for_turn() -> None:
    """Block a background thread until it may start."""
    _may_begin.wait(MOST_SECS)


Found = TypeVar("Found")
PATIENCE_SECS = 10.0
LOOK_SECS = 5.0
"""How often a waiting caller checks that the thread still exists."""


class WorkItem(Generic[Found]):
    """One call submitted to a `Worker`; its result or error is available once `over` is set."""

    def __init__(self, work: Callable[[], Found]) -> None:
        self.over = threading.Event()
        self.since = time.monotonic()
        self.error: BaseException | None = None
        self._work: Callable[[], Found] | None = work
        self._found: list[Found] = []

    def run(self) -> None:
        """Run the call and release the function."""
        work, self._work = self._work, None
        try:
            self._found += [work()] if work else []
        except BaseException as error:
            self.error = error

    def result(self) -> Found:
        """Return the result of the call, or raise its error."""
        if self.error is not None:
            raise self.error
        return self._found[0]


class Worker:
    """Background thread that runs submitted calls in order and ends with this object at the latest.

    Process exit does not wait for it. Starting a thread takes milliseconds on busy cores; submitting to a
    thread that is `ready` takes microseconds. The thread is named `idle` while it has no work.
    """

    def __init__(self, name: str, idle: str | None = None) -> None:
        self._name, self._idle = name, idle or name
        self._thread: threading.Thread | None = None
        self._items: SimpleQueue[WorkItem[Any] | None] = SimpleQueue()
        self._end: Callable[[], object] = lambda: None

    def ready(self) -> bool:
        """Start the thread if needed; returns False if the process cannot create threads."""
        if self.alive:
            return True
        items: SimpleQueue[WorkItem[Any] | None] = SimpleQueue()
        thread = threading.Thread(target=_work_off, args=(items, self._idle), name=self._idle, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return False
        except BaseException:  # an interrupt after the thread has started: end it
            items.put(None)
            raise
        self._thread, self._items = thread, items
        self._end = weakref.finalize(self, items.put, None)
        return True

    def submit(self, work: Callable[[], Found]) -> WorkItem[Found] | None:
        """Queue a call; returns None if no thread can be created."""
        if not self.ready() or self._thread is None:
            return None
        item = WorkItem(work)
        self._thread.name = self._name
        self._items.put(item)
        return item

    def wait(self, item: WorkItem[Any]) -> None:
        """Wait until a call is finished, or the thread is gone."""
        while self.alive and not item.over.wait(LOOK_SECS):
            pass

    @property
    def alive(self) -> bool:
        """True if the thread runs in this process; False in a forked child."""
        return self._thread is not None and self._thread.is_alive()

    def stop(self, patience_secs: float = PATIENCE_SECS) -> None:
        """End the thread after all submitted calls; a later call starts a new one."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._end()
            thread.join(patience_secs)


def _work_off(items: SimpleQueue[WorkItem[Any] | None], idle: str) -> None:
    """Run queued calls until None; keeps no reference to finished ones."""
    while (item := items.get()) is not None:
        try:
            item.run()
        finally:
            threading.current_thread().name = idle
            item.over.set()
        del item


Size = int | str


@dataclass(frozen=True)
class TensorSpec:
    """Description of a tensor: `shape` has numbers and names of dynamic sizes, `dtype` is like "float32"."""

    name: str
    shape: tuple[Size, ...]
    dtype: str

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"name": self.name, "shape": list(self.shape), "dtype": self.dtype}

    @classmethod
    def from_json(cls, found: Any) -> TensorSpec:
        """Parse the JSON form; raises UsageError for anything else."""
        match found:
            case {"name": str(name), "shape": [*shape], "dtype": str(dtype)} if all(map(_is_size, shape)):
                return cls(name, tuple(shape), dtype)
        raise UsageError(f"invalid description of a tensor: {str(found)[:200]}")


@dataclass(frozen=True)
class Signature:
    """Inputs and outputs in the order of `forward`."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        inputs, outputs = ([one.to_json() for one in side] for side in (self.inputs, self.outputs))
        return {"inputs": inputs, "outputs": outputs}

    @classmethod
    def from_json(cls, found: Any) -> Signature:
        """Parse the JSON form; raises UsageError for anything else."""
        match found:
            case {"inputs": [*inputs], "outputs": [*outputs]}:
                return cls(*(tuple(map(TensorSpec.from_json, side)) for side in (inputs, outputs)))
        raise UsageError(f"invalid description of inputs and outputs: {str(found)[:200]}")


def _is_size(size: object) -> bool:
    return isinstance(size, str) or (isinstance(size, int) and not isinstance(size, bool) and size >= 0)


IMPOSSIBLE = (errno.ELOOP, errno.ENAMETOOLONG)
"""Error numbers of paths that can never work."""
_TAG = "@tag="


def local_directory(given: str | os.PathLike[str], what: str) -> Path:
    """Return the absolute path of `given` with `~` expanded, without file access; errors call it `what`."""
    if not isinstance(given, (str, bytes, os.PathLike)):
        raise UsageError(f"{what} {' '.join(repr(given).split()):.80}: expected a str or a Path")
    text = os.fspath(given)
    if not isinstance(text, str):
        raise UsageError(f"{what} {given!r} is given in bytes: give a str or a Path")
    if not text.strip():
        raise UsageError(f"{what} is an empty path: give a directory, such as 'runs/mnist'")
    if "://" in text:
        raise UsageError(
            f"{what} {text!r} is a URL; this goes to local or mounted directories so far: give a path"
        )
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in text):
        raise UsageError(f"{what} {text!r} has control characters: choose another path")
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as error:
        raise UsageError(f"{what} {text!r} cannot be resolved: {error}; write the path out") from error


def is_directory(path: Path) -> bool | None:
    """Return True for a directory, False for anything else, and None if nothing exists."""
    try:
        return S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:  # a null byte
        raise UsageError(f"{str(path)!r}: invalid path") from None
    except OSError as error:
        kind = UsageError if error.errno in IMPOSSIBLE else StorageError
        raise kind(f"{path} cannot be looked at: {error.strerror}; give another path") from error


def check_file(path: Path, wanted: str) -> None:
    """Raise UsageError unless there is a regular file; `wanted` says what is expected."""
    there = is_directory(path)
    if there is None or not path.is_file():
        raise UsageError(f"{path} is {'not there' if there is None else 'no file'}: give {wanted}")


def check_target(path: Path) -> None:
    """Raise UsageError if nothing can be written at the path."""
    is_directory(path)
    if is_directory(path.parent) is False:
        raise UsageError(f"{path.parent} is a file, not a directory: choose another place than {path}")


def split_run(text: str, exists: Callable[[str], bool] = os.path.exists) -> tuple[str, str | None]:
    """Split `RUN@EPOCH` into the run and the epoch; an existing path has no epoch."""
    path, at, epoch = text.rpartition(_TAG) if _TAG in text else text.rpartition("@")
    if not path or ("/" in epoch and at != _TAG) or exists(text):
        return text, None
    return path, f"{at[1:]}{epoch}"


def whole_number(what: str, value: int, least: int = 1) -> int:
    """Return an integer of at least `least`; raises UsageError, which calls it `what`, for anything else."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{what} must be an integer >= {least}, not {value!r}")
    return value


_UNITS = re.compile(r"(?:(\d{1,4})d)?(?:(\d{1,6})h)?(?:(\d{1,8})m)?(?:(\d{1,9})s)?")
_CLOCK = re.compile(r"(?:(\d{1,4})-)?(\d{1,5}):([0-5]\d):([0-5]\d)")


def seconds_in(limit: object) -> float | None:
    """Parse seconds from `90`, `"90"`, `"1h30m"`, `"01:30:00"`, `"2-00:00:00"` or a timedelta, else None.

    The result may be zero, negative or not finite; the caller checks the range.
    """
    if isinstance(limit, timedelta):
        return limit.total_seconds()
    if isinstance(limit, (int, float)) and not isinstance(limit, bool):
        return float(limit)
    if not isinstance(limit, str):
        return None
    text = limit.strip()
    if text.isascii() and text.isdigit():
        return float(text) if len(text) <= 9 else None
    found = _UNITS.fullmatch(text) or _CLOCK.fullmatch(text)
    if found is None or not text:
        return None
    days, hours, minutes, secs = (int(part or 0) for part in found.groups())
    return 86400.0 * days + 3600 * hours + 60 * minutes + secs


_BYTES = 512


class ProcessPhases:
    """The current phases of all threads of this process; other processes read them at `place`, if set."""

    def __init__(self) -> None:
        self.place = ""
        self._memory: mmap.mmap | None = None
        self._now: dict[int, str] = {}

    def text(self) -> str:
        """Return what the threads are currently doing."""
        return "; ".join(list(self._now.values())) or "nothing that it reported"

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Record that the calling thread does `what` during the block."""
        thread = threading.get_ident()
        before = self._now.get(thread)
        self._now[thread] = what if before is None else f"{before}, {what}"
        self._write()
        try:
            yield
        finally:
            if before is None:
                del self._now[thread]
            else:
                self._now[thread] = before
            self._write()

    def show(self) -> str:
        """Make the phases readable for other processes; returns the place."""
        if self._memory is None:
            with suppress(AttributeError, OSError):  # not Linux, or out of memory: then they are not readable
                number = os.memfd_create("torchrelay-phase")
                os.ftruncate(number, _BYTES)
                self._memory = mmap.mmap(number, _BYTES)
                self.place = f"/proc/{os.getpid()}/fd/{number}"
        self._write()
        return self.place

    def _write(self) -> None:
        if self._memory is not None:
            self._memory[:_BYTES] = self.text().encode()[: _BYTES - 1].ljust(_BYTES, b"\0")


phase = ProcessPhases()
"""The phases of this process."""


def stack_of_main_thread() -> str:
    """Return the current stack of the main thread, innermost call first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    calls: list[str] = []
    while frame is not None and len(calls) < 8:
        calls.append(f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(calls) or "unknown"
