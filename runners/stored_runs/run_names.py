"""Which names belong to the files of a run that travel between a workspace and its store. Pure."""

from __future__ import annotations

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
