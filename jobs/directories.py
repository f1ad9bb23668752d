"""Paths that users name: checked before anything is looked up or created there."""

from __future__ import annotations

import errno
import os
import unicodedata
from collections.abc import Callable
from pathlib import Path
from stat import S_ISDIR

from torchrelay.errors import StorageError, UsageError

IMPOSSIBLE = (errno.ELOOP, errno.ENAMETOOLONG)
"""Where the path itself is wrong, whatever lies there."""
_TAG = "@tag="


def local_directory(given: str | os.PathLike[str], what: str) -> Path:
    """Return the absolute path of `given` with `~` expanded; touches nothing.

    Raises UsageError, naming it as `what`, for an empty path, a URL, and control characters, which
    would tear every message and log line that names the path.
    """
    if not isinstance(given, (str, bytes, os.PathLike)):
        raise UsageError(f"{what} {' '.join(repr(given).split()):.80} is no path: give a str or a Path")
    text = os.fspath(given)
    if not isinstance(text, str):
        raise UsageError(f"{what} {given!r} is given in bytes: give a str or a Path")
    if not text.strip():
        raise UsageError(f"{what} is an empty path: give a directory, such as 'runs/mnist'")
    if "://" in text:
        raise UsageError(
            f"{what} {text!r} is a URL; this goes to local or mounted directories so far: give a path"
        )
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in text):
        raise UsageError(f"{what} {text!r} has control characters: choose another path")
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as error:
        raise UsageError(f"{what} {text!r} cannot be resolved: {error}; write the path out") from error


def is_directory(path: Path) -> bool | None:
    """Whether a directory is there (False: something else), None where nothing is.

    Raises UsageError for a path that no file can have, StorageError where nobody can look.
    """
    try:
        return S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:  # a zero byte
        raise UsageError(f"{str(path)!r} is no path: give another one") from None
    except OSError as error:
        kind = UsageError if error.errno in IMPOSSIBLE else StorageError
        raise kind(f"{path} cannot be looked at: {error.strerror}; give another path") from error


def check_file(path: Path, wanted: str) -> None:
    """Raise UsageError where no regular file is; `wanted` is what to give, as "a file of torch.save"."""
    there = is_directory(path)
    if there is None or not path.is_file():
        raise UsageError(f"{path} is {'not there' if there is None else 'no file'}: give {wanted}")


def check_target(path: Path) -> None:
    """Raise UsageError where nothing can be written at a path, because of what the path is."""
    is_directory(path)
    if is_directory(path.parent) is False:
        raise UsageError(f"{path.parent} is a file, so {path} cannot lie in it: choose another place")


def split_run(text: str, exists: Callable[[str], bool] = os.path.exists) -> tuple[str, str | None]:
    """A run and what is written of its epoch behind `@`; a path that exists as it stands has none."""
    path, at, epoch = text.rpartition(_TAG) if _TAG in text else text.rpartition("@")
    if not path or ("/" in epoch and at != _TAG) or exists(text):
        return text, None
    return path, f"{at[1:]}{epoch}"
