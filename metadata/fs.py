"""Atomic writes and validated reads of small files; detection of replaced directories.

After a file system was unmounted, or a directory renamed, the path may lead to another directory: the mount
point, or a new directory with that name.
"""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Literal, NoReturn

from torchrelay.errors import DamagedError, LostDirectoryError, StorageError, UsageError

DEPTH_LIMIT = 100
"""Deepest nesting; torchrelay's own files need about six levels."""
_DIGITS = 300


def read_note(data: bytes | str) -> Any:
    """Parse JSON with finite numbers and integers in the range of a float; raises ValueError.

    Strings may contain lone surrogates, as paths do.
    """
    try:
        value = _DECODER.decode(data if isinstance(data, str) else data.decode())
    except RecursionError:
        raise ValueError(f"nested deeper than {DEPTH_LIMIT} levels") from None
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(DEPTH_LIMIT):
        containers = (one.values() if isinstance(one, dict) else one for one in level)
        level = [inner for one in containers for inner in one if isinstance(inner, (dict, list))]
        if not level:
            return value
    raise ValueError(f"nested deeper than {DEPTH_LIMIT} levels")


def _float(text: str) -> float:
    value = float(text)
    if math.isfinite(value):
        return value
    raise ValueError(f"{text:.40} is out of range")


def _int(text: str) -> int:
    if len(text) > _DIGITS:
        raise ValueError(f"{text:.40}... is out of range")
    return int(text)


def _constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not valid JSON")


_DECODER = json.JSONDecoder(parse_float=_float, parse_int=_int, parse_constant=_constant)


def finite(number: float) -> float | str:
    """Convert a number for JSON; NaN and infinities become strings (`nan`, `inf`)."""
    return number if math.isfinite(number) else str(number)


MAX_JSON_BYTES = 16 << 20
"""Largest size of a small file, also checked when writing."""


def write_json(path: Path, value: Any, *, durable: bool = True) -> None:
    """Replace `path` atomically by indented JSON; if not `durable`, a power cut may restore the older one."""
    data = (json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()
    if len(data) > MAX_JSON_BYTES:
        raise UsageError(f"{path} would have {len(data)} bytes, more than the limit of {MAX_JSON_BYTES}")
    replace_file(path, data, sync="all" if durable else "content")


def replace_file(path: Path, data: bytes, *, sync: Literal["all", "content", "nothing"] = "all") -> None:
    """Replace `path` atomically by these bytes: written to a temporary file, synced, renamed.

    With `sync="nothing"` a power cut may leave an empty file, except on ext4.
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
        raise StorageError(f"cannot write {path}: {error.strerror}; fix the storage") from error


def write_new(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Create a file with mode 0644 and optionally sync it; raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        os.fchmod(descriptor, 0o644)
        write_all(descriptor, data)
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of `data`; raises OSError if nothing is written twice in a row, instead of looping."""
    view, stalls = memoryview(data), 0
    while view:
        written = os.write(descriptor, view)
        stalls = stalls + 1 if written == 0 else 0
        if stalls > 1:
            raise OSError(errno.EIO, "the system wrote nothing twice in a row")
        view = view[written:]


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a JSON object; None without a file. Raises DamagedError for invalid contents."""
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
        raise DamagedError(f"{path} is damaged: {error}") from error
    return found


def append_lines(path: Path, *values: Any) -> None:
    """Append JSON lines with a single write, so that lines of several writers do not interleave."""
    append_text(path, "".join(json.dumps(one, sort_keys=True, allow_nan=False) + "\n" for one in values))


def append_text(path: Path, text: str) -> None:
    """Append with a single write; raises StorageError."""
    try:
        append_bytes(path, text.encode())
    except OSError as error:
        raise StorageError(f"cannot append to {path}: {error.strerror}") from error


def append_bytes(path: Path, data: bytes) -> int:
    """Append to a regular file with a single write if possible, and return its size; raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o644)
    try:
        _check_regular(descriptor)
        write_all(descriptor, data)
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of a JSON-lines file, without a last line truncated by a crash."""
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
    """Open a regular file for reading; raises OSError for pipes and devices, to avoid blocking."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _check_regular(descriptor)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _check_regular(descriptor: int) -> None:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file; remove it")


def sync_directory(directory: Path) -> None:
    """Sync a directory, so that its entries are durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class SamePlace:
    """Detects that a directory was replaced, by device and inode of the first check at which it exists.

    A write between check and replacement can still reach the other directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: tuple[int, int] | None = None

    def check(self) -> None:
        """Raise LostDirectoryError if the directory is gone or replaced; StorageError if this is unknown."""
        known = self._known  # read first: another thread may create the directory at any time
        try:
            found = self.path.stat()
        except (FileNotFoundError, NotADirectoryError):
            if known is not None:
                raise LostDirectoryError(f"{self.path} is gone{_REMEDY}") from None
            return
        except OSError as error:
            raise StorageError(f"cannot access {self.path}: {error.strerror}") from error
        now = (found.st_dev, found.st_ino)
        if known is None:
            self._known = now
        elif now != known:
            where = "on another device" if now[0] != known[0] else "another one"
            raise LostDirectoryError(f"{self.path} is no longer the same directory, but {where}{_REMEDY}")


_REMEDY = (
    ": it was unmounted, renamed or replaced while the job wrote there, and nothing was written into what "
    "lies there now; bring it back and start the same command"
)
