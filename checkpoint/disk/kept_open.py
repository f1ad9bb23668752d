"""The file that was read last stays open: who reads batch by batch mostly goes on in the same one.

Opening a file looks at every part of its path, which takes as long as reading some hundred KiB.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from types import TracebackType

from torchrelay.checkpoint.storage.base import ReadHandle, Storage, open_for_reading


class KeptOpen:
    """Mutable; of one thread at a time."""

    def __init__(self) -> None:
        self._what: tuple[Storage, str] | None = None
        self._handle: ReadHandle
        self._opened = ExitStack()

    def reading(self, storage: Storage, path: str) -> KeptOpen:
        """For `with`, which gives the file for reads within the block; raises as `open_for_reading` does.

        Where the block fails it is closed: a second look is one at the file that has the name by then.
        """
        if self._what != (storage, path):
            self.close()
            self._handle = self._opened.enter_context(open_for_reading(storage, path))
            self._what = storage, path
        return self

    def __enter__(self) -> ReadHandle:
        return self._handle

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.close()

    def close(self) -> None:
        """Close what is open; nothing, where nothing is. An error is none of what was read before."""
        self._what = None
        with suppress(OSError):
            self._opened.close()
