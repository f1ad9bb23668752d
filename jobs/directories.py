"""Directories that users name: checked before anything is looked up or created there."""

from __future__ import annotations

import os
import unicodedata
from pathlib import Path

from torchrelay.errors import UsageError


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
