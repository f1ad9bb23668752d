"""From what users call a place for checkpoints, a path or a URL, to a storage."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from torchrelay.checkpoint.exclusion import SingleWriter
from torchrelay.checkpoint.local_storage import LocalStorage
from torchrelay.checkpoint.remote.urls import is_url, shown
from torchrelay.errors import UsageError
from torchrelay.jobs.runtime import local_directory

if TYPE_CHECKING:
    from torchrelay.checkpoint.object_storage import ObjectStorage

FILE = "file://"


def storage_of(
    where: str | os.PathLike[str], what: str, single_writer: SingleWriter = None
) -> LocalStorage | ObjectStorage:
    """The storage of a path or URL; touches nothing. Raises UsageError, naming it as `what`."""
    if is_remote(where):
        from torchrelay.checkpoint.object_storage import ObjectStorage

        return ObjectStorage.open(str(where), what, single_writer)
    path = where.removeprefix(FILE) if isinstance(where, str) else where
    return LocalStorage(local_directory(path, what), single_writer=single_writer)


def is_remote(where: object) -> bool:
    """Whether a place lies in a store."""
    return isinstance(where, str) and is_url(where) and not where.startswith(FILE)


def object_at(url: str, what: str) -> tuple[ObjectStorage, str]:
    """The storage of a URL's parent, and the name in it. Raises UsageError, naming the URL as `what`."""
    parent, _, name = url.rpartition("/")
    if not name or parent.endswith((":/", ":")):
        raise UsageError(f"{shown(url)!r} names no file: give one below a bucket or directory")
    from torchrelay.checkpoint.object_storage import ObjectStorage

    return ObjectStorage.open(parent, what), name


def joined(place: str, name: str) -> str:
    """A name below a place, of which the form is kept."""
    if is_url(place):
        return f"{place.rstrip('/')}/{name}"
    return os.path.join(place, name)  # noqa: PTH118 - as the user wrote it
