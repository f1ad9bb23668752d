"""From a user's path or URL to a new file there, whole and durable or not at all; and back to one to read."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchrelay.checkpoint.archive.zip_writing import Fill, ZipWriter
from torchrelay.checkpoint.files.publish import publish
from torchrelay.checkpoint.storage.base import WriteHandle
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.checkpoint.storage.open import FILE, is_remote, object_at
from torchrelay.errors import StorageError, UsageError
from torchrelay.jobs.runtime import check_file

Where = str | os.PathLike[str]
_READ = 32 << 20


def write_archive(where: Where, fill: Fill, *, overwrite: bool) -> str:
    """Write an archive; returns where it lies.

    The path is taken as it is written: no suffix is added and no `~` expanded. Raises UsageError where the
    name is taken, StorageError.
    """
    if is_remote(where):
        return _write_remote(str(where), fill, overwrite=overwrite)
    path = _local(where)

    def make(temporary: Path) -> None:
        handle = LocalStorage(temporary.parent).open_exclusive(temporary.name)
        handle.hurry()
        _filled(handle, fill)

    publish(path, make, overwrite=overwrite)
    return str(path)


def _filled(handle: WriteHandle, fill: Fill) -> None:
    try:
        writer = ZipWriter(handle)
        fill(writer)
        writer.finish()
    finally:
        handle.close()


def _write_remote(url: str, fill: Fill, *, overwrite: bool) -> str:
    storage, name = object_at(url, "the archive")
    if not overwrite and storage.stat(name) is not None:
        raise UsageError(f"{storage.url}/{name} exists already: choose another name, or overwrite=True")
    handle = storage.open_replacing(name) if overwrite else storage.open_creating(name)
    try:
        writer = ZipWriter(handle)
        fill(writer)
        writer.finish()
        handle.sync_file()
    except FileExistsError:
        raise UsageError(f"{storage.url}/{name} exists already: somebody else was faster") from None
    finally:
        handle.close()
    return f"{storage.url}/{name}"


@contextmanager
def fetched(where: Where) -> Iterator[tuple[str, str]]:
    """A local path to read the archive from, and what to call it. Raises UsageError, StorageError."""
    if not is_remote(where):
        path = _local(where)
        check_file(path, "an archive")
        yield str(path), str(path)
        return
    storage, name = object_at(str(where), "the archive")
    shown = f"{storage.url}/{name}"
    size = storage.stat(name)
    if size is None:
        raise UsageError(f"{shown} is not there: give an archive")
    with tempfile.TemporaryFile() as file:
        for at in range(0, size, _READ):
            data = storage.read_range(name, at, _READ)
            if len(data) != min(_READ, size - at):
                raise StorageError(f"{shown} ended while it was read: try again")
            file.write(data)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}", shown


def _local(where: Where) -> Path:
    if not isinstance(where, (str, os.PathLike)) or not isinstance(os.fspath(where), str):
        raise UsageError(f"{' '.join(repr(where).split()):.80} is no path: give a str or a Path")
    text = os.fspath(where)
    text = text.removeprefix(FILE)
    if not text.strip() or "\0" in text or text.endswith("/"):
        raise UsageError(f"{where!r} names no file: give a path such as 'model.zip'")
    return Path(text).absolute()
