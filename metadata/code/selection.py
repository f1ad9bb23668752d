"""Which names below a root are its source.

In a git repository: what git knows, and what it neither knows nor ignores if it looks like source. Else: what
looks like source, by suffix and size, and is not ignored by a `.gitignore`. Never runs, never what Python
makes of source.
"""

from __future__ import annotations

import posixpath
import stat
from collections.abc import Iterable
from dataclasses import field
from pathlib import Path

from torchrelay.metadata.code.git_command import Repository
from torchrelay.metadata.code.git_listing import listed
from torchrelay.metadata.code.source_names import LARGEST_UNKNOWN_BYTES, is_junk, is_made, is_source
from torchrelay.metadata.code.sources import Root, Sources
from torchrelay.metadata.code.walking import Walk, is_run, patterns
from torchrelay.records import dataclass

_OF_A_RUN = ("checkpoints", "code", "lineage", "logs")


@dataclass
class Selection:
    """Names relative to the root, and why others that look like source are not among them."""

    names: set[str] = field(default_factory=set)
    left_out: dict[str, str] = field(default_factory=dict)
    submodules: dict[str, str] = field(default_factory=dict)


def select(root: Root, sources: Sources, repo: Repository | None) -> Selection:
    """Look below a root; raises UsageError for patterns that are none and trees that are too large."""
    if root.only is not None:
        return Selection(set(root.only))
    found = Selection()
    listing = listed(repo) if repo is not None else None
    if listing is not None and (listing.tracked or listing.untracked):
        found.submodules = listing.submodules
        untracked = {name for name in listing.untracked if not is_junk(name)}
        names = listing.tracked | _like_source(root.path, untracked, sources, found)
    else:  # no git, or a folder that the repository around it ignores
        names = _like_source(root.path, Walk(root.path).run().names, sources, found)
    names -= _in_runs(root.path, names)
    if sources.exclude:
        unwanted = patterns(sources.exclude)
        names = {name for name in names if not unwanted.match_file(name)}
    found.names = {name for name in names if not is_made(name)}
    found.left_out = {name: why for name, why in found.left_out.items() if not is_made(name)}
    return found


def _like_source(root: Path, names: Iterable[str], sources: Sources, found: Selection) -> set[str]:
    wanted = patterns(sources.include) if sources.include else None
    chosen = set()
    for name in names:
        if wanted is not None and wanted.match_file(name):
            chosen.add(name)
        elif is_source(name):
            if (size := _size(root / name)) > LARGEST_UNKNOWN_BYTES:
                found.left_out[name] = f"{size} bytes, and git does not know it"
            else:
                chosen.add(name)
        elif "." not in posixpath.basename(name) and (root / name).is_symlink() and (root / name).is_dir():
            chosen.add(name)  # imports may go through it
    return chosen


def _size(path: Path) -> int:
    try:
        found = path.lstat()
    except OSError:
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) else 0


def _in_runs(root: Path, names: set[str]) -> set[str]:
    """The names that lie in a run's directory, or in one of checkpoints."""
    marked = {posixpath.dirname(n) for n in names if posixpath.basename(n) in ("run.json", "job.json")}
    runs = {folder for folder in marked if _holds_run(root / folder)}
    if not runs:
        return set()
    return {name for name in names if _is_in(name, runs)}


def _holds_run(folder: Path) -> bool:
    try:
        return is_run({one.name for one in folder.iterdir()})
    except OSError:
        return False


def _is_in(name: str, runs: set[str]) -> bool:
    folder = posixpath.dirname(name)
    while folder:
        if folder in runs:
            return True
        folder = posixpath.dirname(folder)
    # A run may lie in the root itself, beside the source; a folder `config` may well be the user's.
    return "" in runs and (name.split("/", maxsplit=1)[0] in _OF_A_RUN or name in ("run.json", "status.json"))
