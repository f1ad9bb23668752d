"""Writing goes on in the very directory in which it began, or nowhere.

Where a file system was unmounted, or a directory renamed, the old path may lead to another place: the
mount point below, or a directory that somebody put there since.
"""

from __future__ import annotations

from pathlib import Path

from torchrelay.errors import LostDirectoryError, StorageError


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
