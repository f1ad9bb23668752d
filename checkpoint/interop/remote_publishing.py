"""Files and directories made locally and sent to a store, or fetched; what names others goes last."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torchrelay.checkpoint.interop.publishing import publish
from torchrelay.checkpoint.storage.object_store import ObjectStorage
from torchrelay.checkpoint.storage.open import is_remote, object_at
from torchrelay.errors import StorageError, UsageError
from torchrelay.jobs.runtime import local_directory

Where = str | os.PathLike[str]
_PIECE_BYTES = 32 << 20


def publish_anywhere(
    where: Where, make: Callable[[Path], None], *, overwrite: bool = False, directory: bool = False
) -> Path | str:
    """`publish` for a path; at a URL what `make` writes lies in a temporary directory first, whole.

    Objects of a directory appear one by one: those that tell of the others come last. Returns the place.
    """
    if not is_remote(where):
        path = Path(local_directory(where, "the target"))
        publish(path, make, overwrite=overwrite, directory=directory)
        return path
    url = str(where).rstrip("/")
    check_free_at(url, overwrite=overwrite, directory=directory)
    storage, name = object_at(url, "the target")
    with tempfile.TemporaryDirectory(prefix="torchrelay-") as scratch:
        made = Path(scratch) / "made"
        if directory:
            made.mkdir()
        make(made)
        files = sorted((one for one in made.rglob("*") if one.is_file()), key=_told_last) or [made]
        for file in files:
            below = file.relative_to(made).parts
            _send(storage, "/".join([name, *below]), file)
    return f"{storage.url}/{name}"


def check_free_at(url: str, *, overwrite: bool, directory: bool) -> None:
    """Refuse, by UsageError, a name in a store that is taken. A directory is never replaced."""
    storage, name = object_at(url.rstrip("/"), "the target")
    if storage.list(name) or (storage.stat(name) is not None and (directory or not overwrite)):
        raise UsageError(f"{storage.url}/{name} exists already: choose another name, or overwrite a file")


@contextmanager
def fetched_anywhere(where: Where, what: str) -> Iterator[Path]:
    """A path itself; of a URL a local copy, of the object there or of all that lie below it."""
    if not is_remote(where):
        yield Path(local_directory(where, what))
        return
    storage, name = object_at(str(where).rstrip("/"), what)
    with tempfile.TemporaryDirectory(prefix="torchrelay-") as scratch:
        copy = Path(scratch) / Path(name).name
        for path in _files(storage, name):
            _fetch(storage, path, copy.joinpath(*path.split("/")[1:]))
        yield copy


def _files(storage: ObjectStorage, path: str) -> Iterator[str]:
    if storage.stat(path) is not None:
        yield path
        return
    for name in storage.list(path):
        yield from _files(storage, f"{path}/{name}")


def _told_last(file: Path) -> tuple[bool, bool, str]:
    """An index after what it names, and the log of an epoch after its files."""
    return file.parent.name == "log", file.suffix == ".json" or file.name == ".metadata", str(file)


def _send(storage: ObjectStorage, path: str, file: Path) -> None:
    with file.open("rb") as data:
        storage.put_file(path, data, file.stat().st_size)


def _fetch(storage: ObjectStorage, path: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    size = storage.stat(path) or 0
    with target.open("xb") as file:
        for at in range(0, size, _PIECE_BYTES):
            data = storage.read_range(path, at, _PIECE_BYTES)
            if len(data) != min(_PIECE_BYTES, size - at):
                raise StorageError(f"{storage.url}/{path} ended while it was read: try again")
            file.write(data)
