"""Git metadata of source: tracked files, commit, and hidden commits of the current source.

- Commands use a copy of the index, because even reading commands may rewrite it. If git is missing, fails or
  takes too long, they return nothing and raise nothing.
- No program of the repository's configuration is run: hooks, monitors, protocols and filters (such as git
  LFS) are disabled. Submodules have their own configuration, so each is queried separately.
- Hidden commits use plumbing commands and a separate index: HEAD, branches, index, stash and status do not
  change. Only `refs/torchrelay/<code id>` refers to them; `git update-ref -d` deletes it.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from torchrelay.errors import StorageError
from torchrelay.metadata.code.archive import SHORT
from torchrelay.records import dataclass

PATIENCE_SECS = 10.0
LIMIT_BYTES = 64 << 20
_OFF = ("core.fsmonitor=false", "core.untrackedCache=false", "core.hooksPath=/dev/null", "gc.auto=0")
# fmt: off
_ELSEWHERE = frozenset((
    "GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY",
    "GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_PREFIX", "GIT_COMMON_DIR", "GIT_NAMESPACE",
    "GIT_EXTERNAL_DIFF", "GIT_DIFF_OPTS", "GIT_ATTR_SOURCE",
))
# fmt: on
"""Variables that would select another repository, as in a git hook."""
_QUIET = {
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_ALLOW_PROTOCOL": "none",
    "LC_ALL": "C",
}
"""Disables all fetching, including from partial clones, because a protocol may run any program."""
_FILTERS = r"^filter\..*\.(clean|smudge|process|required)$"


@dataclass(frozen=True)
class Repository:
    """The git repository of a directory; `index` is a copy that commands may write."""

    directory: Path
    git_dir: Path
    index: Path
    settings: Mapping[str, str] = field(default_factory=dict, repr=False)

    def ask(self, *words: str, data: bytes = b"", env: Mapping[str, str] | None = None) -> bytes | None:
        """Run git and return its output; None if it fails or prints more than LIMIT_BYTES."""
        own = {**self.settings, **(env or {})}
        output = _git(self.directory, *words, data=data, index=self.index, env=own)
        return output if output is not None and len(output) < LIMIT_BYTES else None


@contextmanager
def repository(directory: Path) -> Iterator[Repository | None]:
    """Find the repository of a directory; None if there is none, or no git."""
    output = _git(directory, "rev-parse", "--is-inside-work-tree", "--absolute-git-dir")
    inside, _, rest = (output or b"").partition(b"\n")
    settings = _without_filters(directory) if inside == b"true" else None
    if settings is None:
        yield None
        return
    git_dir = Path(os.fsdecode(rest.partition(b"\n")[0]))
    with tempfile.TemporaryDirectory(prefix="torchrelay-git-") as scratch:
        index = Path(scratch) / "index"
        try:
            shutil.copyfile(git_dir / "index", index)
            shutil.copystat(git_dir / "index", index)  # git compares the times of files with this one
        except FileNotFoundError:  # no file was ever added
            pass
        except OSError:
            yield None
            return
        yield Repository(directory, git_dir, index, settings)


def _without_filters(directory: Path) -> dict[str, str] | None:
    """Return an environment without filter programs (`-c` splits names at `=`); None if git fails."""
    output = _git(directory, "config", "--null", "--list", "--name-only")
    if output is None or len(output) >= LIMIT_BYTES:
        return None
    names = [one for one in os.fsdecode(output).split("\0") if re.match(_FILTERS, one, re.DOTALL)]
    kept = os.environ.get("GIT_CONFIG_COUNT", "0")
    first = int(kept) if kept.isascii() and kept.isdigit() else 0
    found = {"GIT_CONFIG_COUNT": str(first + len(names))}
    for number, name in enumerate(names, first):
        found[f"GIT_CONFIG_KEY_{number}"] = name
        found[f"GIT_CONFIG_VALUE_{number}"] = "false" if name.endswith(".required") else ""
    return found


def _git(
    directory: Path,
    *words: str,
    data: bytes = b"",
    limit: int = LIMIT_BYTES,
    index: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> bytes | None:
    """Run git with limits on size and time; also ends its children, which would keep the pipe open."""
    own = {name: value for name, value in os.environ.items() if name not in _ELSEWHERE}
    own |= {**_QUIET, **(env or {})}
    if index is not None:
        own["GIT_INDEX_FILE"] = str(index)
    settings = [word for setting in _OFF for word in ("-c", setting)]
    try:
        with tempfile.TemporaryFile() as given:
            given.write(data)
            given.seek(0)
            process = subprocess.Popen(  # noqa: S603 - no shell, and no word of a stranger's
                ["git", "--no-pager", *settings, *words],  # noqa: S607 - the git that the user types
                cwd=directory, env=own, stdin=given, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
    except OSError:
        return None

    def end() -> None:  # only before it is waited for, so that the pid is still valid
        if process.returncode is None:
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)

    late = threading.Timer(PATIENCE_SECS, end)
    late.daemon = True
    late.start()
    try:
        with process:
            output = process.stdout.read(limit) if process.stdout else b""
            cut = len(output) == limit
            if cut:
                end()
            code = process.wait()
    finally:
        late.cancel()
    return output if code == 0 or cut else None


_SUBMODULE = "160000"
_DEEPEST = 10


@dataclass
class Listing:
    """File names relative to the directory; `submodules` has the commits in the outer repository, or ""."""

    tracked: set[str] = field(default_factory=set)
    untracked: set[str] = field(default_factory=set)
    submodules: dict[str, str] = field(default_factory=dict)


def listed(repo: Repository, depth: int = 0) -> Listing | None:
    """List files with git; None if it fails."""
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
        if name.endswith("/"):  # a nested repository, which git lists as one name
            nested.append(name.rstrip("/"))
            found.submodules[name.rstrip("/")] = ""
        else:
            found.untracked.add(name)
    for name in nested:
        directory = repo.directory / name
        if depth >= _DEEPEST or directory.is_symlink() or not (directory / ".git").exists():
            continue  # not checked out
        with repository(directory) as inner:
            below = listed(inner, depth + 1) if inner is not None else None
        if below is not None:
            found.tracked |= {f"{name}/{one}" for one in below.tracked}
            found.untracked |= {f"{name}/{one}" for one in below.untracked}
            found.submodules |= {f"{name}/{one}": commit for one, commit in below.submodules.items()}
    return found


def _lines(output: bytes) -> list[str]:
    return [os.fsdecode(line) for line in output.split(b"\0") if line]


_WHO = {
    "GIT_AUTHOR_NAME": "torchrelay",
    "GIT_AUTHOR_EMAIL": "torchrelay@localhost",
    "GIT_COMMITTER_NAME": "torchrelay",
    "GIT_COMMITTER_EMAIL": "torchrelay@localhost",
}


def commit_hidden(repo: Repository, code_id: str, names: Iterable[str], label: str = "") -> str:
    """Commit these files on top of HEAD and return the ref; raises StorageError if git fails."""
    ref = f"refs/torchrelay/{code_id[:SHORT]}{f'-{label}' if label else ''}"
    if repo.ask("rev-parse", "--verify", "--quiet", ref) is not None:
        return ref
    listed = b"".join(os.fsencode(name) + b"\0" for name in names)
    head = _text(repo.ask("rev-parse", "--verify", "--quiet", "HEAD"))
    tree = commit = ""
    add = ("update-index", "--add", "-z", "--stdin")
    if repo.ask("read-tree", "--empty") is not None and repo.ask(*add, data=listed) is not None:
        tree = _text(repo.ask("write-tree"))
    if tree:
        words = [*(["-p", head] if head else []), "-m", f"torchrelay: source {code_id}"]
        commit = _text(repo.ask("commit-tree", *words, tree, env=_WHO))
    if not commit or repo.ask("update-ref", ref, commit) is None:
        why = f"git could not commit the source of {repo.directory} as a hidden ref"
        raise StorageError(f"{why}: make {repo.git_dir} writable")
    return ref


def _text(answer: bytes | None) -> str:
    return (answer or b"").decode().strip()


DIFF_BYTES = 1 << 20
_OWN = "--ignore-submodules=dirty"
"""Keeps git from running commands in submodules, whose configuration may name programs."""
_STATUS = ("status", "--porcelain=v2", "--branch", "-z", "--untracked-files=normal", _OWN, "--", ".")
_DIFF = (
    *("diff", "--no-ext-diff", "--no-textconv", "--no-color", "--submodule=short", _OWN),
    *("HEAD", "--", "."),
)
_SUBMODULE_LINE = b"160000 "


@dataclass(frozen=True)
class Provenance:
    """Git metadata; None means unknown, for `commit` none yet, for `branch` a detached HEAD.

    `dirty` is that of the root; `diff` is from the commit to its tracked files, truncated at DIFF_BYTES.
    """

    commit: str | None
    branch: str | None
    remote: str | None
    dirty: bool | None
    diff: bytes | None

    def json(self) -> dict[str, Any]:
        """Return the JSON form without the diff."""
        known = {name: getattr(self, name) for name in ("commit", "branch", "remote", "dirty")}
        return {**known, "diff_cut_off": self.diff is not None and len(self.diff) >= DIFF_BYTES}


def provenance_of(repo: Repository) -> Provenance:
    """Query git; unknown values are None. The URL is that of origin, else of the first remote."""
    status = repo.ask(*_STATUS)
    lines = [os.fsdecode(line) for line in status.split(b"\0")] if status is not None else []
    heads: dict[str, str] = dict(line[2:].split(" ", 1) for line in lines if line.startswith("# branch."))
    oid = heads.get("branch.oid")
    commit = None if oid == "(initial)" else oid
    branch = heads.get("branch.head")
    dirty = _is_dirty(repo, status, 0)
    diff = None
    if commit is not None and dirty:
        diff = _git(repo.directory, *_DIFF, limit=DIFF_BYTES, index=repo.index, env=repo.settings)
    urls: dict[str, str] = {}
    for entry in _lines(repo.ask("config", "-z", "--get-regexp", r"^remote\..*\.url$") or b""):
        name, _, url = entry.partition("\n")
        if url:
            urls.setdefault(name, without_credentials(url))
    remote = urls.get("remote.origin.url") or next(iter(urls.values()), None)
    return Provenance(commit, None if branch == "(detached)" else branch, remote, dirty, diff)


def _is_dirty(repo: Repository, status: bytes | None, depth: int) -> bool | None:
    """Return True for uncommitted changes, also in submodules; None if git fails."""
    if status is None:
        return None
    if any(line and not line.startswith(b"# ") for line in status.split(b"\0")):
        return True
    known = repo.ask("ls-files", "-z", "--stage") or b""
    for line in known.split(b"\0"):
        place = repo.directory / os.fsdecode(line.partition(b"\t")[2])
        if not line.startswith(_SUBMODULE_LINE) or depth >= _DEEPEST or not (place / ".git").exists():
            continue
        with repository(place) as inner:
            if inner is not None and _is_dirty(inner, inner.ask(*_STATUS), depth + 1):
                return True
    return False


def without_credentials(url: str) -> str:
    """Remove credentials from a URL: user, password, query and fragment."""
    if "://" not in url:
        return url if re.fullmatch(r"[^\s@]+@[^\s@]+:.*", url) is None else url.partition("@")[2]
    try:
        parts = urlsplit(url)
    except ValueError:
        return "an unreadable URL"
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
