"""What the preloaded library, or `store_faults`, wrote down: the calls of a program, in their order."""

from __future__ import annotations

from pathlib import Path

from torchrelay.records import dataclass

CHANGING = ("create", "write", "sync", "link", "rename", "unlink", "mkdir", "rmdir", "truncate", "close")
"""Sorts of calls that change something, or bring a change on its way."""


@dataclass(frozen=True)
class Call:
    """One call; `path` is relative to the tested root, `error` the errno or 0."""

    number: int
    pid: int
    kind: str
    result: int
    error: int
    path: str


def read_calls(log: Path, root: Path) -> tuple[Call, ...]:
    """The calls of a log, by number; a last line that a kill has torn is left out."""
    if not log.exists():
        return ()
    found = []
    for line in log.read_text(errors="replace").splitlines(keepends=True):
        parts = line.rstrip("\n").split(" ", 6)
        if len(parts) == 7 and line.endswith("\n"):
            number, pid, _, kind, result, error, path = parts
            found.append(Call(int(number), int(pid), kind, int(result), int(error), _relative(path, root)))
    return tuple(sorted(found, key=lambda one: one.number))


def _relative(path: str, root: Path) -> str:
    for base in (str(root.resolve()), str(root.absolute())):
        if path.startswith(base):
            return path[len(base) :].lstrip("/")
    return path
