"""Writing one blob file: whole and synced under its name, or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torchrelay.checkpoint.blob_file import local_path
from torchrelay.checkpoint.blob_file_content import FileContent
from torchrelay.checkpoint.format.shard.layout import HeaderFrame, Part
from torchrelay.checkpoint.format.shard.writer import write_part
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.checkpoint.storage.object_store import ObjectStorage
from torchrelay.checkpoint.storage.open import is_remote, object_at
from torchrelay.checkpoint.storage.uploads import StagedFile
from torchrelay.checkpoint.temporary_names import temporary_beside
from torchrelay.errors import RelayError, StorageError, UsageError
from torchrelay.jobs.runtime import check_target


def write_blob_file(where: str | os.PathLike[str], content: FileContent, *, overwrite: bool) -> None:
    """Write a file with this content.

    Raises UsageError where the name is taken, BlobError for what cannot be stored, StorageError.
    """
    if is_remote(where):
        _write_at(str(where), content.part(), overwrite=overwrite)
        return
    path = local_path(where)
    check_target(path)
    if path.exists() and not (overwrite and path.is_file()):
        raise UsageError(_taken(path))
    part = content.part()
    storage = LocalStorage(path.parent)
    storage.mkdir("")
    with _temporary(storage, path) as temporary:
        write_part(storage, temporary.name, part)
        _publish(temporary, path, overwrite)
    storage.sync_dir("")


def _write_at(url: str, part: Part, *, overwrite: bool) -> None:
    storage, name = object_at(url, "the blob file")
    if not overwrite and storage.stat(name) is not None:
        raise UsageError(f"{storage.url}/{name} exists already: choose another name, or overwrite=True")
    write_part(_Replacing(storage.system, storage.root, storage.url), name, part)


class _Replacing(ObjectStorage):
    """An object store in which a new object takes the place of one of its name, when it is whole."""

    def open_exclusive(self, path: str) -> StagedFile:
        """Stage an object; that its name is free, or may be taken, was looked up before."""
        return self.open_replacing(path)

    def delete(self, path: str) -> None:
        """Nothing: where writing fails, what lay there before stays."""


def file_bytes(content: FileContent) -> int:
    """How long the file is; the bytes of tensors are not looked at."""
    frame = HeaderFrame(content.part())
    return frame.nbytes + frame.data_bytes


@contextmanager
def _temporary(storage: LocalStorage, path: Path) -> Iterator[Path]:
    """A name beside `path` that listings hide; nothing is left of it afterwards."""
    temporary = temporary_beside(path)
    try:
        yield temporary
    finally:
        with suppress(RelayError):
            storage.delete(temporary.name)


def _publish(temporary: Path, path: Path, overwrite: bool) -> None:
    """Give the file its name: a link never replaces, a rename does."""
    try:
        if overwrite:
            temporary.replace(path)
        else:
            os.link(temporary, path)
    except FileExistsError:
        raise UsageError(_taken(path)) from None
    except OSError as error:
        raise StorageError(f"cannot give {path} its name: {error.strerror or error}") from error


def _taken(path: Path) -> str:
    if path.exists() and not path.is_file():
        return f"{path} is no file and is never replaced: choose another name"
    return f"{path} exists already: choose another name, or overwrite=True"
