"""Where source comes from, as git knows it. The archive is the truth, this is for people."""

from __future__ import annotations

import os
import re
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from torchrelay.metadata.code.git_command import Repository, repository
from torchrelay.records import dataclass

DIFF_BYTES = 1 << 20
_OWN = "--ignore-submodules=dirty"
"""Git would look into a submodule by commands of its own, with what that configures: programs, too."""
_STATUS = ("status", "--porcelain=v2", "--branch", "-z", "--untracked-files=normal", _OWN, "--", ".")
_DIFF = (
    *("diff", "--no-ext-diff", "--no-textconv", "--no-color", "--submodule=short", _OWN),
    *("HEAD", "--", "."),
)
_SUBMODULE = b"160000 "
_DEEPEST = 10


@dataclass(frozen=True)
class Provenance:
    """`commit` is None before the first one, `branch` None with a detached HEAD; `dirty` is about the root.

    `diff` is from the commit to the files of the root that git knows, cut off at DIFF_BYTES. None: not told.
    """

    commit: str | None
    branch: str | None
    remote: str | None
    dirty: bool | None
    diff: bytes | None

    def json(self) -> dict[str, Any]:
        """All but the diff itself."""
        return {
            "commit": self.commit,
            "branch": self.branch,
            "remote": self.remote,
            "dirty": self.dirty,
            "diff_cut_off": self.diff is not None and len(self.diff) >= DIFF_BYTES,
        }


def provenance_of(repo: Repository) -> Provenance:
    """Ask git; what it does not say is None."""
    status = repo.ask(*_STATUS)
    lines = [os.fsdecode(line) for line in status.split(b"\0")] if status is not None else []
    heads: dict[str, str] = dict(line[2:].split(" ", 1) for line in lines if line.startswith("# branch."))
    oid = heads.get("branch.oid")
    commit = None if oid == "(initial)" else oid
    branch = heads.get("branch.head")
    dirty = _is_dirty(repo, status, 0)
    diff = repo.ask_beginning(*_DIFF, limit=DIFF_BYTES) if commit is not None and dirty else None
    return Provenance(commit, None if branch == "(detached)" else branch, _remote(repo), dirty, diff)


def _is_dirty(repo: Repository, status: bytes | None, depth: int) -> bool | None:
    """Whether anything is otherwise than committed, in submodules, too; None where git does not tell."""
    if status is None:
        return None
    if any(line and not line.startswith(b"# ") for line in status.split(b"\0")):
        return True
    known = repo.ask("ls-files", "-z", "--stage") or b""
    for line in known.split(b"\0"):
        place = repo.directory / os.fsdecode(line.partition(b"\t")[2])
        if not line.startswith(_SUBMODULE) or depth >= _DEEPEST or not (place / ".git").exists():
            continue
        with repository(place) as inner:
            if inner is not None and _is_dirty(inner, inner.ask(*_STATUS), depth + 1):
                return True
    return False


def _remote(repo: Repository) -> str | None:
    """The URL of origin, else of the first remote."""
    told = repo.ask("config", "-z", "--get-regexp", r"^remote\..*\.url$")
    urls: dict[str, str] = {}
    for entry in os.fsdecode(told or b"").split("\0"):
        name, _, url = entry.partition("\n")
        if url:
            urls.setdefault(name, url)
    chosen = urls.get("remote.origin.url") or next(iter(urls.values()), None)
    return None if chosen is None else without_credentials(chosen)


def without_credentials(url: str) -> str:
    """A URL without what lets anybody in: user and password, query and fragment."""
    if "://" not in url:
        return url if re.fullmatch(r"[^\s@]+@[^\s@]+:.*", url) is None else url.partition("@")[2]
    try:
        parts = urlsplit(url)
    except ValueError:
        return "a URL that cannot be read"
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
