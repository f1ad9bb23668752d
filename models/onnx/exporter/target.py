"""Where an ONNX file goes: a local path or a URL; there whole, with its weights beside it if they are many.

Weights beside the file have a name that no other export has, and come first: the file that names them
appears last, at once, so that whoever reads finds an old model or a new one, never parts of both.
"""

from __future__ import annotations

import mmap
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchrelay.checkpoint.files.publish import check_free
from torchrelay.checkpoint.storage.object_store import ObjectStorage
from torchrelay.checkpoint.storage.open import FILE
from torchrelay.checkpoint.storage.urls import is_url
from torchrelay.errors import StorageError, UsageError
from torchrelay.jobs.runtime import local_directory
from torchrelay.records import dataclass

_WHAT = "the ONNX file"
_PIECE_BYTES = 8 << 20


@dataclass(frozen=True)
class Target:
    """A place for one file; `where` as people write it. Exactly one of `path` and `store` is there."""

    where: str
    name: str
    overwrite: bool
    path: Path | None = None
    store: ObjectStorage | None = None

    @property
    def weights(self) -> str:
        """A new name for weights beside the file."""
        return f"{self.name}.{secrets.token_hex(6)}.data"

    def check(self) -> None:
        """Raise UsageError where the name is taken."""
        if self.path is not None:
            check_free(self.path, overwrite=self.overwrite, directory=False)
        elif self.store is not None and not self.overwrite and self.store.stat(self.name) is not None:
            raise UsageError(_taken(self.where))

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A directory for the files to be; on the same file system, for a local target."""
        if self.path is None:
            with tempfile.TemporaryDirectory(prefix="torchrelay-onnx-") as text:
                yield Path(text)
            return
        folder = self.path.with_name(f".tmp-{secrets.token_hex(8)}")
        try:
            folder.mkdir(parents=True)
            yield folder
        except OSError as error:
            if isinstance(error, (StorageError, UsageError)):
                raise
            raise StorageError(f"cannot write {self.path}: {error.strerror or error}") from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def publish(self, folder: Path, weights: str | None) -> None:
        """Put the file in the folder, and its `weights`, in place; raises UsageError, StorageError."""
        if self.path is not None:
            self._move(self.path, folder, weights)
        elif self.store is not None:
            self._send(self.store, folder, weights)

    def _move(self, path: Path, folder: Path, weights: str | None) -> None:
        made, old = folder / path.name, _weights_beside(path)
        for name in (path.name, weights):
            if name is not None:
                _sync(folder / name)
        if weights is not None:
            (folder / weights).rename(path.with_name(weights))
        try:
            made.replace(path) if self.overwrite else os.link(made, path)
        except FileExistsError:
            path.with_name(weights).unlink() if weights is not None else None
            raise UsageError(_taken(self.where)) from None
        _sync(path.parent)
        for one in old:
            one.unlink(missing_ok=True)

    def _send(self, store: ObjectStorage, folder: Path, weights: str | None) -> None:
        if weights is not None:
            handle = store.open_exclusive(weights)
            with (folder / weights).open("rb") as file:
                at = 0
                while piece := file.read(_PIECE_BYTES):
                    handle.write_at(at, memoryview(piece))
                    at += len(piece)
            handle.sync_file()
            handle.close()
        data = (folder / self.name).read_bytes()
        if self.overwrite:
            store.replace(self.name, data)
            return
        try:
            store.link_exclusive(self.name, data)
        except FileExistsError:
            raise UsageError(_taken(self.where)) from None


def target_of(where: str | os.PathLike[str], *, overwrite: bool) -> Target:
    """What a user called a place; touches nothing. Raises UsageError."""
    text = os.fspath(where) if isinstance(where, (str, os.PathLike)) else where
    if isinstance(text, str) and is_url(text) and not text.startswith(FILE):
        parent, _, name = text.rpartition("/")
        if not name or parent.endswith("/"):
            raise UsageError(f"{_WHAT} {text!r} names no file: give a URL such as s3://bucket/model.onnx")
        return Target(text, name, overwrite, store=ObjectStorage.open(parent, _WHAT, "external"))
    path = local_directory(text.removeprefix(FILE) if isinstance(text, str) else text, _WHAT)
    return Target(str(path), path.name, overwrite, path=path)


def _weights_beside(path: Path) -> list[Path]:
    """Weights that an export put beside a file of this name, and that the file there names.

    Others may be of an export that goes on at the same time, whose file comes next.
    """
    ours = re.compile(rf"{re.escape(path.name)}\.[0-9a-f]{{12}}\.data")
    found = [one for one in path.parent.iterdir() if ours.fullmatch(one.name)]
    if not found or not path.is_file() or not path.stat().st_size:
        return []
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return [one for one in found if content.find(os.fsencode(one.name)) >= 0]


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _taken(where: str) -> str:
    return f"{where} exists already: choose another name, or overwrite=True (--overwrite)"
