"""What all rooms use: garbage collector, threads and their phases, signatures, directories, durations.

A thread that computes in Python keeps it for 5 ms before another gets it, and gets its share of all that
follows. What goes on behind the training (writing a save, deleting old epochs) has time, so it begins
when the next epoch's tasks do. Nothing is interrupted that goes on already.

Packages, ONNX files and the server describe a model by it. A size that is not fixed is a name, and the same
name means the same size: ("batch", 3, 32, 32).
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
from collections.abc import Callable, Iterator, Mapping
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
    """No automatic collection of reference cycles inside; afterwards as before.

    Saving or loading 50,000 tensors makes a million objects that all stay in use, which sets off full
    collections that find nothing and take half of the time. Calls may be nested, also in several threads:
    the last one to leave restores. It looks through the young objects alone: with those counted, the next
    new object would set off the full collection that the imports of the program owe, 50 ms and more.
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
            _inside = max(0, _inside - 1)  # a child that was forked inside begins anew
            if _inside == 0 and _was_on:
                if gc.get_count()[0] > gc.get_threshold()[0] > 0:  # enough to set off a collection
                    gc.collect(0)
                gc.enable()


def _begin_anew() -> None:
    """A forked child has none of the threads that would restore."""
    global _lock, _inside  # noqa: PLW0603  # one switch per process is what there is
    _lock = threading.Lock()
    if _inside and _was_on:
        gc.enable()
    _inside = 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)


MOST_SECS = 0.1
"""How long a thread behind the training is kept from beginning, whatever happens."""

_may_begin = threading.Event()
_may_begin.set()


class _Turn:
    """Whose turn it is: the training's thread alone, unless somebody waits for another."""

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._undivided = False
        self._waiting = 0

    def set(self, undivided: bool) -> None:
        with self._changing:
            self._undivided = undivided
            self._tell()

    def count(self, waiting: int) -> None:
        with self._changing:
            self._waiting += waiting
            self._tell()

    def _tell(self) -> None:
        if self._undivided and not self._waiting:
            _may_begin.clear()
        else:
            _may_begin.set()


_turn = _Turn()


@contextmanager
def undivided(*, beyond: bool = False) -> Iterator[None]:
    """Inside, threads behind the training begin nothing new, for so long at most.

    With `beyond` what follows is undivided, too, until `begin_now` is called; not after an error.
    """
    _turn.set(undivided=True)
    try:
        yield
    except BaseException:
        _turn.set(undivided=False)
        raise
    if not beyond:
        _turn.set(undivided=False)


def begin_now() -> None:
    """Threads behind the training may begin. Called where a task of the program begins."""
    _turn.set(undivided=False)


@contextmanager
def waiting() -> Iterator[None]:
    """Inside, threads behind the training may begin: for whoever waits for one."""
    _turn.count(+1)
    try:
        yield
    finally:
        _turn.count(-1)


def behind() -> None:
    """Called by a thread behind the training: returns when it may begin."""
    _may_begin.wait(MOST_SECS)


Found = TypeVar("Found")
PATIENCE_SECS = 10.0
LOOK_SECS = 5.0
"""How often whoever waits looks whether the thread is there at all."""


class WorkItem(Generic[Found]):
    """One work of a `Worker`; what it returned or raised is here once it is `over`."""

    def __init__(self, work: Callable[[], Found]) -> None:
        self.over = threading.Event()
        self.since = time.monotonic()
        self.error: BaseException | None = None
        self._work: Callable[[], Found] | None = work
        self._found: list[Found] = []

    def run(self) -> None:
        """Do it; holds nothing of it afterwards."""
        work, self._work = self._work, None
        try:
            self._found += [work()] if work else []
        except BaseException as error:
            self.error = error

    def result(self) -> Found:
        """What it returned; raises what it raised."""
        if self.error is not None:
            raise self.error
        return self._found[0]


class Worker:
    """Does one work after the other in one thread, which ends with this object at the latest.

    No exit of the process waits for it. Who starts a thread waits until it runs; on cores that compute that
    takes milliseconds. To hand work to a thread that is `ready` takes microseconds. Without work the thread
    has the name `idle`.
    """

    def __init__(self, name: str, idle: str | None = None) -> None:
        self._name, self._idle = name, idle or name
        self._thread: threading.Thread | None = None
        self._items: SimpleQueue[WorkItem[Any] | None] = SimpleQueue()
        self._end: Callable[[], object] = lambda: None

    def ready(self) -> bool:
        """Have the thread; False where this process gets no more threads."""
        if self.alive:
            return True
        items: SimpleQueue[WorkItem[Any] | None] = SimpleQueue()
        thread = threading.Thread(target=_work_off, args=(items, self._idle), name=self._idle, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return False
        except BaseException:  # an interrupt, when the thread is there already: nobody would end it
            items.put(None)
            raise
        self._thread, self._items = thread, items
        self._end = weakref.finalize(self, items.put, None)
        return True

    def submit(self, work: Callable[[], Found]) -> WorkItem[Found] | None:
        """Have the thread do this after all else; None where there is no thread."""
        if not self.ready() or self._thread is None:
            return None
        item = WorkItem(work)
        self._thread.name = self._name
        self._items.put(item)
        return item

    def wait(self, item: WorkItem[Any]) -> None:
        """Return when a work is done; at once where the thread is not there any more."""
        while self.alive and not item.over.wait(LOOK_SECS):
            pass

    @property
    def alive(self) -> bool:
        """Whether the thread is there; it is not in a process that was forked off."""
        return self._thread is not None and self._thread.is_alive()

    def stop(self, patience_secs: float = PATIENCE_SECS) -> None:
        """End the thread when it has done what was submitted; another one is made for more."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._end()
            thread.join(patience_secs)


def _work_off(items: SimpleQueue[WorkItem[Any] | None], idle: str) -> None:
    """Holds nothing of a work that is done."""
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
    """One tensor: `shape` has a number, or the name of a size that may differ; `dtype` as "float32"."""

    name: str
    shape: tuple[Size, ...]
    dtype: str

    def to_json(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"name": self.name, "shape": list(self.shape), "dtype": self.dtype}

    @classmethod
    def from_json(cls, found: Any) -> TensorSpec:
        """Back; UsageError for anything else."""
        match found:
            case {"name": str(name), "shape": [*shape], "dtype": str(dtype)} if all(map(_is_size, shape)):
                return cls(name, tuple(shape), dtype)
        raise UsageError(f"no description of a tensor: {str(found)[:200]}")


@dataclass(frozen=True)
class Signature:
    """Inputs and outputs in the order in which `forward` takes and gives them."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def to_json(self) -> dict[str, Any]:
        """As JSON has it."""
        inputs, outputs = ([one.to_json() for one in side] for side in (self.inputs, self.outputs))
        return {"inputs": inputs, "outputs": outputs}

    @classmethod
    def from_json(cls, found: Any) -> Signature:
        """Back; UsageError for anything else."""
        if not isinstance(found, Mapping) or not all(
            isinstance(found.get(side), list) for side in ("inputs", "outputs")
        ):
            raise UsageError(f"no description of inputs and outputs: {str(found)[:200]}")
        inputs, outputs = (tuple(map(TensorSpec.from_json, found[side])) for side in ("inputs", "outputs"))
        return cls(inputs, outputs)


def _is_size(size: object) -> bool:
    return isinstance(size, str) or (isinstance(size, int) and not isinstance(size, bool) and size >= 0)


IMPOSSIBLE = (errno.ELOOP, errno.ENAMETOOLONG)
"""Where the path itself is wrong, whatever lies there."""
_TAG = "@tag="


def local_directory(given: str | os.PathLike[str], what: str) -> Path:
    """Return the absolute path of `given` with `~` expanded; touches nothing.

    Raises UsageError, naming it as `what`, for an empty path, a URL, and control characters, which
    would tear every message and log line that names the path.
    """
    if not isinstance(given, (str, bytes, os.PathLike)):
        raise UsageError(f"{what} {' '.join(repr(given).split()):.80} is no path: give a str or a Path")
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
    """Whether a directory is there (False: something else), None where nothing is.

    Raises UsageError for a path that no file can have, StorageError where nobody can look.
    """
    try:
        return S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:  # a zero byte
        raise UsageError(f"{str(path)!r} is no path: give another one") from None
    except OSError as error:
        kind = UsageError if error.errno in IMPOSSIBLE else StorageError
        raise kind(f"{path} cannot be looked at: {error.strerror}; give another path") from error


def check_file(path: Path, wanted: str) -> None:
    """Raise UsageError where no regular file is; `wanted` is what to give, as "a file of torch.save"."""
    there = is_directory(path)
    if there is None or not path.is_file():
        raise UsageError(f"{path} is {'not there' if there is None else 'no file'}: give {wanted}")


def check_target(path: Path) -> None:
    """Raise UsageError where nothing can be written at a path, because of what the path is."""
    is_directory(path)
    if is_directory(path.parent) is False:
        raise UsageError(f"{path.parent} is a file, so {path} cannot lie in it: choose another place")


def split_run(text: str, exists: Callable[[str], bool] = os.path.exists) -> tuple[str, str | None]:
    """A run and what is written of its epoch behind `@`; a path that exists as it stands has none."""
    path, at, epoch = text.rpartition(_TAG) if _TAG in text else text.rpartition("@")
    if not path or ("/" in epoch and at != _TAG) or exists(text):
        return text, None
    return path, f"{at[1:]}{epoch}"


def whole_number(what: str, value: int, least: int = 1) -> int:
    """Return an integer from `least`; raises UsageError, naming it as `what`, for anything else."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{what} is an integer from {least}, not {value!r}")
    return value


_UNITS = re.compile(r"(?:(\d{1,4})d)?(?:(\d{1,6})h)?(?:(\d{1,8})m)?(?:(\d{1,9})s)?")
_CLOCK = re.compile(r"(?:(\d{1,4})-)?(\d{1,5}):([0-5]\d):([0-5]\d)")


def seconds_in(limit: object) -> float | None:
    """Seconds of `90`, `"90"`, `"1h30m"`, `"01:30:00"`, `"2-00:00:00"`, a timedelta; None for anything else.

    The number may be zero, negative or not finite: who asks says what is allowed.
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
    """The phases of all threads of this process; `place` is where others read them, or empty."""

    def __init__(self) -> None:
        self.place = ""
        self._memory: mmap.mmap | None = None
        self._now: dict[int, str] = {}

    def text(self) -> str:
        """What the threads said that they are doing."""
        return "; ".join(list(self._now.values())) or "nothing that it told of"

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Say that the calling thread does `what` until the block ends."""
        thread = threading.get_ident()
        before = self._now.get(thread)
        self._say(thread, what if before is None else f"{before}, {what}")
        try:
            yield
        finally:
            self._say(thread, before)

    def show(self) -> str:
        """Make the phases readable for others from now on; return the place."""
        if self._memory is None:
            with suppress(AttributeError, OSError):  # no Linux, or no memory for it: nobody can read it then
                number = os.memfd_create("torchrelay-phase")
                os.ftruncate(number, _BYTES)
                self._memory = mmap.mmap(number, _BYTES)
                self.place = f"/proc/{os.getpid()}/fd/{number}"
        self._write()
        return self.place

    def _say(self, thread: int, what: str | None) -> None:
        if what is None:
            self._now.pop(thread, None)
        else:
            self._now[thread] = what
        self._write()

    def _write(self) -> None:
        if self._memory is not None:
            self._memory[:_BYTES] = self.text().encode()[: _BYTES - 1].ljust(_BYTES, b"\0")


phase = ProcessPhases()
"""The phases of this process."""


def stack_of_main_thread(most: int = 8) -> str:
    """Return where the main thread is now, innermost call first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    calls: list[str] = []
    while frame is not None and len(calls) < most:
        calls.append(f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(calls) or "unknown"
