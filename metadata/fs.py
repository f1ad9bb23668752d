"""Small files that a crash leaves old or new, read with care; and whether a directory is still the same.

Where a file system was unmounted, or a directory renamed, the old path may lead to another place: the
mount point below, or a directory that somebody put there since.
"""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Literal, NoReturn

from torchrelay.errors import DamagedError, LostDirectoryError, StorageError, UsageError

DEPTH_LIMIT = 100
"""Containers within containers; our own notes have about six."""
_DIGITS = 300


def read_note(data: bytes | str) -> Any:
    """The value of a JSON text. Its numbers are finite, and whole ones have a float beside them.

    Raises ValueError for anything else, for what JSON does not have (NaN), and for what is nested deeper
    than 100 levels. Text may hold anything, halves of surrogate pairs included: paths have them.
    """
    try:
        value = _DECODER.decode(data if isinstance(data, str) else data.decode())
    except RecursionError:
        raise ValueError(f"nested deeper than {DEPTH_LIMIT} levels") from None
    _check_depth(value)
    return value


def _float(text: str) -> float:
    value = float(text)
    if math.isfinite(value):
        return value
    raise ValueError(f"{text:.40} is larger than any number here")


def _int(text: str) -> int:
    if len(text) > _DIGITS:
        raise ValueError(f"{text:.40}... is larger than any number here")
    return int(text)


def _constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")


_DECODER = json.JSONDecoder(parse_float=_float, parse_int=_int, parse_constant=_constant)


def finite(number: float) -> float | str:
    """A number as JSON takes it: what it has no number for is text (`nan`, `inf`)."""
    return number if math.isfinite(number) else str(number)


def _check_depth(value: Any) -> None:
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(DEPTH_LIMIT):
        containers = (one.values() if isinstance(one, dict) else one for one in level)
        level = [inner for one in containers for inner in one if isinstance(inner, (dict, list))]
        if not level:
            return
    raise ValueError(f"nested deeper than {DEPTH_LIMIT} levels")


MAX_JSON_BYTES = 16 << 20
"""What a small file may have; whoever writes one checks it, too."""


def write_json(path: Path, value: Any, *, durable: bool = True) -> None:
    """Replace `path` by pretty JSON: written beside, synced, renamed, directory synced.

    Unless `durable` the directory is not synced: then a power cut may bring the older content back.
    """
    data = (json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()
    if len(data) > MAX_JSON_BYTES:
        raise UsageError(f"{path} would have {len(data)} bytes, more than the {MAX_JSON_BYTES} that are read")
    replace_file(path, data, sync="all" if durable else "content")


def replace_file(path: Path, data: bytes, *, sync: Literal["all", "content", "nothing"] = "all") -> None:
    """Replace `path` by these bytes, as `write_json` does; raises StorageError.

    With `sync="nothing"` a power cut may leave a file without content: only ext4 waits for it before renames.
    """
    temporary = path.with_name(f".tmp-{secrets.token_hex(6)}")
    try:
        write_new(temporary, data, durable=sync != "nothing")
        temporary.replace(path)
        if sync == "all":
            sync_directory(path.parent)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise StorageError(
            f"cannot write {path}: {error.strerror}; free space or make it writable"
        ) from error


def write_new(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Create a file, mode 0644, and sync its bytes where that is wanted; raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        os.fchmod(descriptor, 0o644)
        write_all(descriptor, data)
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of `data`; nothing written twice in a row is an OSError, where buffered files would loop."""
    view, stalls = memoryview(data), 0
    while view:
        written = os.write(descriptor, view)
        stalls = stalls + 1 if written == 0 else 0
        if stalls > 1:
            raise OSError(errno.EIO, "the system wrote nothing, twice")
        view = view[written:]


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a JSON object; None where there is no file, DamagedError where it is not of our kind."""
    try:
        with open_regular(path) as file:
            data = file.read(MAX_JSON_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from error
    try:
        if len(data) > MAX_JSON_BYTES:
            raise ValueError("too large")
        found = read_note(data)
        if not isinstance(found, dict):
            raise ValueError(f"it is a {type(found).__name__}")
    except ValueError as error:
        raise DamagedError(f"{path} is not the JSON that was written: {error}") from error
    return found


def append_line(path: Path, value: Any) -> None:
    """Append one JSON line by a single write, so that lines of several writers never interleave."""
    append_lines(path, [value])


def append_lines(path: Path, values: Iterable[Any]) -> None:
    """The same with several lines; raises StorageError."""
    data = "".join(json.dumps(one, sort_keys=True, allow_nan=False) + "\n" for one in values).encode()
    try:
        append_bytes(path, data)
    except OSError as error:
        raise StorageError(f"cannot append to {path}: {error.strerror}") from error


def append_bytes(path: Path, data: bytes) -> int:
    """Append by a single write where the system takes all, and return the file's size; raises OSError.

    A pipe or device in the way is refused instead of waited for.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o644)
    try:
        _check_regular(descriptor)
        write_all(descriptor, data)
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the whole lines of a JSON-lines file; a torn last line (a crash) is left out."""
    try:
        with open_regular(path) as file:
            for line in file:
                if not line.endswith(b"\n"):
                    return
                with suppress(ValueError):
                    value = read_note(line)
                    if isinstance(value, dict):
                        yield value
    except FileNotFoundError:
        return
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from error


def open_regular(path: Path) -> BinaryIO:
    """Open for reading; a pipe or device in the way is refused (OSError) instead of waited for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _check_regular(descriptor)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _check_regular(descriptor: int) -> None:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise OSError(errno.EINVAL, "it is no regular file, remove it")


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class SamePlace:
    """Remembers a directory by device and inode from the first look at which it is there.

    Asked right before each write: one that has asked when the directory goes may still land in the other.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: tuple[int, int] | None = None

    def check(self) -> None:
        """Raise LostDirectoryError if another directory, or none, is there now; StorageError if unclear."""
        known = self._known  # before the look: another thread may create the directory right after it
        try:
            found = self.path.stat()
        except (FileNotFoundError, NotADirectoryError):
            if known is not None:
                raise LostDirectoryError(f"{self.path} is gone{_REMEDY}") from None
            return
        except OSError as error:
            raise StorageError(f"cannot look at {self.path}: {error.strerror}") from error
        now = (found.st_dev, found.st_ino)
        if known is None:
            self._known = now
        elif now != known:
            where = "on another device" if now[0] != known[0] else "another one"
            raise LostDirectoryError(f"{self.path} is not the directory it was, but {where}{_REMEDY}")


_REMEDY = (
    ": it was unmounted, renamed or replaced while the job wrote there, and nothing was written into what "
    "lies there now; mount it again or move it back, then start the same command"
)
