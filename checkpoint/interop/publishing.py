"""A file or directory that appears under its name whole and durable, or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from torchrelay.checkpoint.temporary_names import temporary_beside
from torchrelay.errors import StorageError, UsageError
from torchrelay.jobs.runtime import check_target


def check_free(path: Path, *, overwrite: bool, directory: bool) -> None:
    """Refuse, by UsageError, a name that is taken. A directory is never replaced."""
    check_target(path)
    if path.is_symlink() or path.exists():
        if directory and path.is_dir() and not any(path.iterdir()):
            return
        if directory or not path.is_file():
            raise UsageError(f"{path} exists already and is never replaced: choose another name")
        if not overwrite:
            raise UsageError(f"{path} exists already: choose another name, or overwrite=True (--overwrite)")


def publish(
    path: Path, make: Callable[[Path], None], *, overwrite: bool = False, directory: bool = False
) -> None:
    """Let `make` write at a hidden name beside `path`, sync everything, and give it its name.

    Raises UsageError where the name is taken, StorageError where the disk refuses; nothing is left then. What
    a writer of this path left that was killed goes first.
    """
    check_free(path, overwrite=overwrite, directory=directory)
    temporary = temporary_beside(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if directory:
            temporary.mkdir()
        make(temporary)
        _sync_tree(temporary)
        if directory or overwrite:
            temporary.rename(path)
        else:
            os.link(temporary, path)
        _sync(path.parent)
    except StorageError:
        raise
    except FileExistsError:
        raise UsageError(
            f"{path} exists already: choose another name, or overwrite=True (--overwrite)"
        ) from None
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        _remove(temporary)


def _sync_tree(path: Path) -> None:
    for folder, _, files in os.walk(path, topdown=False):
        for name in files:
            _sync(Path(folder, name))
        _sync(Path(folder))
    if path.is_file():
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
