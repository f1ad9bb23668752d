"""Asking git, without touching anything: no lock, no hook, no prompt, and only a copy of the index.

Even commands that read may write the index anew with what they saw of files' times; here they may write
the copy. Where git is missing, refuses, or takes too long, there is no answer and nobody fails for it.

No program that a repository's configuration names is run: hooks, monitors and protocols are off, and each
filter (`clean`, as of git LFS) is configured away, which leaves files as they lie there. What a submodule
configures is seen only when it is asked itself, so no command here may look into one on its own.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import field
from pathlib import Path

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
"""They would lead to another repository than that of the directory, as in a hook of git."""
_QUIET = {
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_ALLOW_PROTOCOL": "none",
    "LC_ALL": "C",
}
"""Nothing is fetched, not even objects that a partial clone left out: a protocol may be any program."""
_FILTERS = r"^filter\..*\.(clean|smudge|process|required)$"


@dataclass(frozen=True)
class Repository:
    """The git repository around a directory; `index` is a copy that commands may write."""

    directory: Path
    git_dir: Path
    index: Path
    settings: Mapping[str, str] = field(default_factory=dict, repr=False)

    def ask(self, *words: str, data: bytes = b"", env: Mapping[str, str] | None = None) -> bytes | None:
        """What git prints; None where it fails, or prints more than LIMIT_BYTES."""
        own = {**self.settings, **(env or {})}
        told = _git(self.directory, *words, data=data, index=self.index, env=own)
        return told if told is not None and len(told) < LIMIT_BYTES else None

    def ask_beginning(self, *words: str, limit: int) -> bytes | None:
        """What git prints, cut off after `limit` bytes; None where it fails."""
        return _git(self.directory, *words, limit=limit, index=self.index, env=self.settings)


@contextmanager
def repository(directory: Path) -> Iterator[Repository | None]:
    """The repository that a directory lies in; None where there is none, or no git."""
    told = _git(directory, "rev-parse", "--is-inside-work-tree", "--absolute-git-dir")
    lines = told.split(b"\n") if told else []
    if len(lines) < 2 or lines[0] != b"true":
        yield None
        return
    git_dir, settings = Path(os.fsdecode(lines[1])), _without_filters(directory)
    if settings is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="torchrelay-git-") as scratch:
        index = Path(scratch) / "index"
        try:
            shutil.copyfile(git_dir / "index", index)
            shutil.copystat(git_dir / "index", index)  # git compares files' times with that of the index
        except FileNotFoundError:  # nothing was ever added
            pass
        except OSError:
            yield None
            return
        yield Repository(directory, git_dir, index, settings)


def _without_filters(directory: Path) -> dict[str, str] | None:
    """The environment in which no filter of the repository is a program; None where git does not tell.

    Not by `-c`, which cuts a name at its first `=`.
    """
    told = _git(directory, "config", "--null", "--list", "--name-only")
    if told is None or len(told) >= LIMIT_BYTES:
        return None
    names = [one for one in os.fsdecode(told).split("\0") if re.match(_FILTERS, one, re.DOTALL)]
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
    own = {name: value for name, value in os.environ.items() if name not in _ELSEWHERE}
    own |= {**_QUIET, **(env or {})}
    if index is not None:
        own["GIT_INDEX_FILE"] = str(index)
    settings = [word for setting in _OFF for word in ("-c", setting)]
    try:
        process = subprocess.Popen(  # noqa: S603 - no shell, and no word of a stranger's
            ["git", "--no-pager", *settings, *words],  # noqa: S607 - the git that the user types
            cwd=directory, env=own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
    except OSError:
        return None
    return _answer(process, data, limit)


def _answer(process: subprocess.Popen[bytes], data: bytes, limit: int) -> bytes | None:
    """The output, of a process that is ended when it has said enough or takes too long.

    With all that it started, which has its pipes: they would stay open behind it.
    """
    late = threading.Timer(PATIENCE_SECS, _end, (process,))
    late.daemon = True
    late.start()
    try:
        with process:
            if process.stdin is None or process.stdout is None:
                return None
            feeding = threading.Thread(target=_feed, args=(process, data))
            feeding.start()
            told = process.stdout.read(limit)
            cut = len(told) == limit
            if cut:
                _end(process)
            feeding.join()
            code = process.wait()
    finally:
        late.cancel()
    return told if code == 0 or cut else None


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and its group; only while nobody has waited for it, so that the number is its own."""
    if process.returncode is None:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)


def _feed(process: subprocess.Popen[bytes], data: bytes) -> None:
    """Beside the reading: either pipe may be full."""
    if process.stdin is not None:
        try:
            process.stdin.write(data)
            process.stdin.close()
        except OSError:  # git ended without reading all
            return
