"""Names of the files that travel between a workspace and its store, and the URL of a run. Pure."""

from __future__ import annotations

import re

from torchrelay.checkpoint.storage.open import FILE, is_url, open_file_system, shown
from torchrelay.errors import UsageError

CHECKPOINTS, STOP, LOGS = "checkpoints", "STOP", "logs"
NEEDED = frozenset({"run.json", "status.json", "metadata.jsonl"})
"""What a start must not take for missing: it would call the run by another identity, or begin it anew."""
_PRIVATE = (".tmp-", ".probe-", ".torchrelay-")
_LONGEST_BYTES = 255
DEEPEST = 12
"""Folders in folders; torchrelay makes half as many."""
_NOT_NEEDED = frozenset({LOGS, "exports", "crash", "replay"})
"""Written by one start and never read by the next."""
_GLANCED = frozenset({LOGS})
_NOTED = _GLANCED | {"config", "results", "lineage"}
_FIRST, _LAST = ("run.json",), ("metadata.jsonl", "live.json", "status.json")
"""What is put up before all else, and behind it: a status that says that a run is over comes last."""


def is_name(part: str) -> bool:
    """Whether a part of a listing may become the name of a file here."""
    if part in ("", ".", "..") or "/" in part or "\0" in part:
        return False
    try:
        return len(part.encode()) <= _LONGEST_BYTES
    except UnicodeEncodeError:
        return False


def travels(name: str) -> bool:
    """Whether a file of this name, relative to the run, is put up and brought down at all."""
    parts = name.split("/")
    own = parts[0] not in (CHECKPOINTS, STOP) and not any(one.startswith(_PRIVATE) for one in parts)
    return own and all(map(is_name, parts)) and len(parts) <= DEEPEST


def for_a_start(name: str) -> bool:
    """What a start on another host needs: whatever it reads, or appends to."""
    top = name.partition("/")[0]
    if top == "trackers":
        return travels(name) and name.endswith((".csv", ".jsonl"))
    return travels(name) and top not in _NOT_NEEDED


def for_a_glance(name: str) -> bool:
    """What a list of runs shows: the notes at the top, and which ranks have logs."""
    return travels(name) and ("/" not in name or name.partition("/")[0] in _GLANCED)


def for_a_look(name: str) -> bool:
    """What most verbs read of one run."""
    return travels(name) and ("/" not in name or name.partition("/")[0] in _NOTED)


def grows(name: str) -> bool:
    """Whether a file is only ever appended to, so that of two versions the longer one has more."""
    return name.endswith((".jsonl", ".log", ".csv"))


def never_changes(name: str) -> bool:
    """Whether all files of this name are the same, because it says their digest."""
    return name.startswith("code/") and name.endswith(".zip")


def in_order(names: list[str]) -> list[str]:
    """Names in the order in which they are put up."""
    ranks = dict.fromkeys(_FIRST, -1) | {name: at + 1 for at, name in enumerate(_LAST)}
    return sorted(names, key=lambda name: (ranks.get(name, 0), name))


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
