"""The URL of a run, written in one way, so that the same run is known again."""

from __future__ import annotations

import re

from torchrelay.checkpoint.storage.open import FILE
from torchrelay.checkpoint.storage.urls import is_url, open_file_system, shown
from torchrelay.errors import UsageError

_USER = re.compile(r"(://[^/]*:)[^/]*@")


def is_remote(text: str) -> bool:
    """Whether a text is the URL of a place in a store; `file://` names a directory."""
    return is_url(text) and not text.startswith(FILE)


def canonical(url: str, what: str) -> str:
    """The URL without slashes at its end; asks the store nothing.

    Raises UsageError, naming it as `what`, for a URL that cannot be, that has a password in it, or names that
    are none (`..`, `.`, nothing).
    """
    protocol, mark, path = url.partition("://")
    told = f"{protocol}{mark}{path.rstrip('/')}"
    if _USER.search(url):
        raise UsageError(
            f"{what} {shown(url)!r} has a password in it, which files and messages would show: give it by "
            "the environment, or in fsspec's configuration"
        )
    open_file_system(told, what)
    if any(part in ("", ".", "..") for part in path.rstrip("/").split("/")[1:]):
        raise UsageError(f"{what} {told!r} has names that are none in its path: write it without . and ..")
    return told


def last_name(url: str) -> str:
    """What stands last in the URL: the run's name, as that of a directory is."""
    return url.rpartition("/")[2]


def parent(url: str) -> str | None:
    """The URL one name up; None where that is no place of its own."""
    above = url.rpartition("/")[0]
    return above if above.partition("://")[2].strip("/") else None


def refuse_remote(text: str, what: str) -> None:
    """Raise UsageError for a URL where `what` keeps several runs in a directory."""
    if is_remote(text):
        raise UsageError(
            f"{what} keeps its runs in a directory, and {text} is a URL: give a path. A single run lies in a "
            "store with JobRunner(job, URL), or with torchrelay run CONFIG --run-dir URL"
        )
