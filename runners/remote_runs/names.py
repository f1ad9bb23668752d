"""Names of the files exchanged between a workspace and its store, and URLs of runs. Pure functions."""

from __future__ import annotations

import re

from torchrelay.checkpoint.storage.open import FILE, is_url, open_file_system, shown
from torchrelay.errors import UsageError

CHECKPOINTS, STOP, LOGS = "checkpoints", "STOP", "logs"
NEEDED = frozenset({"run.json", "status.json", "metadata.jsonl"})
"""Files that a launch must not miss: it would change the run's identity, or start it again."""
_PRIVATE = (".tmp-", ".probe-", ".torchrelay-")
_LONGEST_BYTES = 255
DEEPEST = 12
"""Deepest nesting of folders; torchrelay uses half of it."""
_NOT_NEEDED = frozenset({LOGS, "exports", "crash", "replay"})
"""Written by one launch and never read by the next."""
_GLANCED = frozenset({LOGS})
_NOTED = _GLANCED | {"config", "results", "lineage"}
_FIRST, _LAST = ("run.json",), ("metadata.jsonl", "live.json", "status.json")
"""Files that are uploaded first and last: a status that marks a run as finished comes last."""


def is_name(part: str) -> bool:
    """Return True if a part of a listing can be a local file name."""
    if part in ("", ".", "..") or "/" in part or "\0" in part:
        return False
    try:
        return len(part.encode()) <= _LONGEST_BYTES
    except UnicodeEncodeError:
        return False


def travels(name: str) -> bool:
    """Return True if a file of this name, relative to the run, is uploaded and downloaded at all."""
    parts = name.split("/")
    own = parts[0] not in (CHECKPOINTS, STOP) and not any(one.startswith(_PRIVATE) for one in parts)
    return own and all(map(is_name, parts)) and len(parts) <= DEEPEST


def for_a_start(name: str) -> bool:
    """Return True if a launch on another host needs the file, because it reads it or appends to it."""
    top = name.partition("/")[0]
    if top == "trackers":
        return travels(name) and name.endswith((".csv", ".jsonl"))
    return travels(name) and top not in _NOT_NEEDED


def for_a_glance(name: str) -> bool:
    """Return True if lists of runs need the file: top-level metadata, and which ranks have logs."""
    return travels(name) and ("/" not in name or name.partition("/")[0] in _GLANCED)


def for_a_look(name: str) -> bool:
    """Return True if most subcommands need the file of a run."""
    return travels(name) and ("/" not in name or name.partition("/")[0] in _NOTED)


def grows(name: str) -> bool:
    """Return True if a file is only appended to, so that the longer of two versions has more."""
    return name.endswith((".jsonl", ".log", ".csv"))


def never_changes(name: str) -> bool:
    """Return True if the name contains the digest of the content."""
    return name.startswith("code/") and name.endswith(".zip")


def in_order(names: list[str]) -> list[str]:
    """Sort names in the order of uploads."""
    ranks = dict.fromkeys(_FIRST, -1) | {name: at + 1 for at, name in enumerate(_LAST)}
    return sorted(names, key=lambda name: (ranks.get(name, 0), name))


_USER = re.compile(r"(://[^/]*:)[^/]*@")


def is_remote(text: str) -> bool:
    """Return True for a URL in a store; `file://` is a local directory."""
    return is_url(text) and not text.startswith(FILE)


def canonical(url: str, what: str) -> str:
    """Return the URL without trailing slashes, without contacting the store.

    Raises UsageError, naming it as `what`, for an invalid URL, one with a password, and the path names `..`,
    `.` and empty.
    """
    protocol, mark, path = url.partition("://")
    address = f"{protocol}{mark}{path.rstrip('/')}"
    if _USER.search(url):
        raise UsageError(
            f"{what} {shown(url)!r} contains a password, which files and messages would show: pass it in "
            "the environment or in fsspec's configuration"
        )
    open_file_system(address, what)
    if any(part in ("", ".", "..") for part in path.rstrip("/").split("/")[1:]):
        raise UsageError(f"{what} {address!r} has names that are none in its path: write it without . and ..")
    return address


def last_name(url: str) -> str:
    """Return the last name in the URL, which is the run's."""
    return url.rpartition("/")[2]


def parent(url: str) -> str | None:
    """Return the URL one level up; None if there is none."""
    above = url.rpartition("/")[0]
    return above if above.partition("://")[2].strip("/") else None


def refuse_remote(text: str, what: str) -> None:
    """Raise UsageError for a URL if `what` keeps several runs in a directory."""
    if is_remote(text):
        raise UsageError(
            f"{what} keeps its runs in a local directory, but {text} is a URL: pass a path. For a single "
            "remote run use JobRunner(job, URL) or torchrelay run CONFIG --run-dir URL"
        )
