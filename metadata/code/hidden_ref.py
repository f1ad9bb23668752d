"""The source as a commit that no branch knows, so that git itself can show and compare it.

Made by plumbing with an index of its own: HEAD, branches, index, stash and status stay as they are. The
objects lie in the repository, reached by `refs/torchrelay/<code id>` alone; `git update-ref -d` of that name
takes them away again.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from torchrelay.errors import StorageError
from torchrelay.metadata.code.git_command import Repository
from torchrelay.metadata.code.manifest import SHORT

_WHO = {
    "GIT_AUTHOR_NAME": "torchrelay",
    "GIT_AUTHOR_EMAIL": "torchrelay@localhost",
    "GIT_COMMITTER_NAME": "torchrelay",
    "GIT_COMMITTER_EMAIL": "torchrelay@localhost",
}


def commit_hidden(repo: Repository, code_id: str, names: Iterable[str], label: str = "") -> str:
    """Commit the files of these names on top of HEAD; returns the ref. Raises StorageError if git fails."""
    ref = f"refs/torchrelay/{code_id[:SHORT]}{f'-{label}' if label else ''}"
    if repo.ask("rev-parse", "--verify", "--quiet", ref) is not None:
        return ref
    listed = b"".join(os.fsencode(name) + b"\0" for name in names)
    head = _told(repo.ask("rev-parse", "--verify", "--quiet", "HEAD"))
    if repo.ask("read-tree", "--empty") is None:
        raise _failed(repo)
    if repo.ask("update-index", "--add", "-z", "--stdin", data=listed) is None:
        raise _failed(repo)
    tree = _told(repo.ask("write-tree"))
    parent = ["-p", head] if head else []
    message = f"torchrelay: source {code_id}"
    commit = _told(repo.ask("commit-tree", *parent, "-m", message, tree, env=_WHO)) if tree else ""
    if not commit or repo.ask("update-ref", ref, commit) is None:
        raise _failed(repo)
    return ref


def _told(answer: bytes | None) -> str:
    return (answer or b"").decode().strip()


def _failed(repo: Repository) -> StorageError:
    return StorageError(
        f"git did not commit the source of {repo.directory} as a hidden ref: make {repo.git_dir} writable, "
        "or leave git_ref out"
    )
