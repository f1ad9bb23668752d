"""The files below a directory as git knows them: tracked, and untracked but not ignored, submodules too."""

from __future__ import annotations

import os
from dataclasses import field

from torchrelay.metadata.code.git_command import Repository, repository
from torchrelay.records import dataclass

_SUBMODULE = "160000"
_DEEPEST = 10


@dataclass
class Listing:
    """Names relative to the directory.

    `submodules` has the commit that the repository around asks for, or "" where it knows none.
    """

    tracked: set[str] = field(default_factory=set)
    untracked: set[str] = field(default_factory=set)
    submodules: dict[str, str] = field(default_factory=dict)


def listed(repo: Repository, depth: int = 0) -> Listing | None:
    """Ask git; None where it gives no answer."""
    known = repo.ask("ls-files", "-z", "--stage")
    others = repo.ask("ls-files", "-z", "--others", "--exclude-standard")
    if known is None or others is None:
        return None
    found = Listing()
    nested: list[str] = []
    for line in _lines(known):
        facts, _, name = line.partition("\t")
        mode, commit, _ = facts.split(" ")
        if mode == _SUBMODULE:
            found.submodules[name] = commit
            nested.append(name)
        else:
            found.tracked.add(name)
    for name in _lines(others):
        if name.endswith("/"):  # a repository of its own, which git lists as one name
            nested.append(name.rstrip("/"))
            found.submodules[name.rstrip("/")] = ""
        else:
            found.untracked.add(name)
    for name in nested:
        _add_nested(found, repo, name, depth)
    return found


def _add_nested(found: Listing, repo: Repository, name: str, depth: int) -> None:
    directory = repo.directory / name
    if depth >= _DEEPEST or directory.is_symlink() or not (directory / ".git").exists():
        return  # not checked out
    with repository(directory) as inner:
        below = listed(inner, depth + 1) if inner is not None else None
    if below is None:
        return
    found.tracked |= {f"{name}/{one}" for one in below.tracked}
    found.untracked |= {f"{name}/{one}" for one in below.untracked}
    found.submodules |= {f"{name}/{one}": commit for one, commit in below.submodules.items()}


def _lines(told: bytes) -> list[str]:
    return [os.fsdecode(line) for line in told.split(b"\0") if line]
