"""A new object on its way: its bytes are staged in a nameless local file and put whole when synced.

A store cannot write the header of a shard last, at offset 0, into an object that exists. Staging costs
local space for the file (in the directory for temporary files) and a copy; nothing is visible before.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import IO

from torchrelay.errors import StorageError

Put = Callable[[IO[bytes], int], None]
"""Puts a staged file of so many bytes, all of it or nothing; raises StorageError."""


class StagedFile:
    """The write handle of an object. `sync_file` puts it; closed without that, it never existed."""

    alignment = 0

    def __init__(self, path: str, put: Put) -> None:
        self.path = path
        self._put = put
        try:
            self._file: IO[bytes] = tempfile.TemporaryFile(prefix="torchrelay-")  # noqa: SIM115 - see `close`
        except OSError as error:
            raise self._no_room(error) from error

    def write_at(self, offset: int, data: memoryview) -> None:
        """Write into the staged file."""
        try:
            view = data.cast("B")
            while len(view):
                written = os.pwrite(self._file.fileno(), view, offset)
                view, offset = view[written:], offset + written
        except OSError as error:
            raise self._no_room(error) from error

    def preallocate(self, nbytes: int) -> None:
        """Reserve local space where the file system can."""
        try:
            if nbytes:
                os.posix_fallocate(self._file.fileno(), 0, nbytes)
        except OSError as error:
            raise self._no_room(error) from error

    def sync_file(self) -> None:
        """Put the object; it is durable when the store has answered."""
        self._put(self._file, os.fstat(self._file.fileno()).st_size)

    def close(self) -> None:
        """Let go of the staged file; later calls do nothing."""
        self._file.close()

    def _no_room(self, error: OSError) -> StorageError:
        where = tempfile.gettempdir()
        return StorageError(
            f"{self.path} cannot be staged in {where}: {error.strerror or error}; a file lies there whole "
            "before it is sent: free some space, or set TMPDIR to a place with room for the largest shard"
        )
