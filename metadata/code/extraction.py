"""Archived source back to files, below one directory and nowhere else."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from torchrelay.errors import StorageError, UsageError
from torchrelay.metadata.code.archive import Archive
from torchrelay.metadata.files import replace_file


def unpack_source(archive: Archive, directory: Path, *, force: bool = False) -> None:
    """Write the files and links of an archive; files that begin with `#!` can be executed.

    Raises UsageError for a directory that is not empty, unless `force` is to write over its files; what
    lies there besides stays. A folder that is a link is never written through. Raises DamagedError before
    anything is written, StorageError where writing fails.
    """
    contents = archive.read_all()
    if not force and (directory.is_symlink() or directory.exists()) and not _is_empty(directory):
        raise UsageError(f"{directory} is not empty: give a new directory, or --force to write over files")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, data in contents.items():
            path = _place(directory, name)
            replace_file(path, data, sync="nothing")
            if data.startswith(b"#!"):
                path.chmod(0o755)
        for name, target in archive.manifest.links.items():
            path = _place(directory, name)
            with suppress(FileNotFoundError):
                path.unlink()
            path.symlink_to(target)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(f"cannot write {error.filename or directory}: {error.strerror}") from error


def _is_empty(directory: Path) -> bool:
    try:
        return not os.listdir(directory)
    except OSError as error:
        raise UsageError(f"{directory} is no directory that can be used: {error.strerror}") from None


def _place(directory: Path, name: str) -> Path:
    """Where a file goes; its folders are made, each a real one."""
    folder = directory
    for part in name.split("/")[:-1]:
        folder = folder / part
        with suppress(FileExistsError):
            folder.mkdir()
        if not stat.S_ISDIR(folder.lstat().st_mode):
            raise StorageError(f"{folder} is in the way of {name}: remove it, or give a new directory")
    return folder / name.rpartition("/")[2]
