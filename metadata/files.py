"""Small files that a crash leaves old or new, never torn."""

from __future__ import annotations

import errno
import json
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Literal

from torchrelay.errors import DamagedError, StorageError, UsageError
from torchrelay.metadata.note_text import read_note

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
