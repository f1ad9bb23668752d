"""Where a host keeps the files of a run in a store while it works, and what is checked of store and hosts.

A cache: the store has the truth. The same host finds its workspace again, another one begins with the store.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import shutil
import stat
import time
from contextlib import suppress
from pathlib import Path

from torchrelay.checkpoint.storage.base import check_exclusion
from torchrelay.errors import DirectoryInUseError, StorageError, UsageError
from torchrelay.jobs.cluster import NodePlace
from torchrelay.jobs.session import Peers, together
from torchrelay.runners.remote_runs.download import RunFiles
from torchrelay.runners.remote_runs.names import last_name

VARIABLE = "TORCHRELAY_WORKSPACE"
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
"""The same URL is another place where another server answers."""
_LOCK = ".torchrelay-lock"
LEAVING_SECS = 20.0
"""How long a process that had the workspace may take to be gone; a fenced one ends within 15 s."""


def workspace_of(url: str) -> Path:
    """The workspace of a run on this host, below TORCHRELAY_WORKSPACE or the user's cache; touches nothing.

    Its last name is the run's, so that a job without a name is called alike everywhere.
    """
    given = os.environ.get(VARIABLE)
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    base = Path(given or f"{cache}/torchrelay/workspaces").expanduser().absolute()
    said = "\n".join([url, *(os.environ.get(name, "") for name in _ENDPOINTS)])
    return base / hashlib.sha256(said.encode()).hexdigest()[:16] / last_name(url)


def make_workspace(path: Path) -> None:
    """Make the directory, for this user alone; raises UsageError for one that is a link or somebody else's.

    Raises StorageError where it cannot be made or written to.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        for one in (path.parent, path):
            _check_ours(one)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        if isinstance(error, UsageError):
            raise
        raise StorageError(
            f"the workspace {path} cannot be made: {error.strerror}; set {VARIABLE} to a writable directory "
            "of this host"
        ) from error


def _check_ours(path: Path) -> None:
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        what = "a link" if stat.S_ISLNK(found.st_mode) else "not a directory of this user"
        raise UsageError(
            f"the workspace {path} is {what}: remove it, or set {VARIABLE} to another directory of this host"
        )


class WorkspaceLock:
    """Keeps a second process of this host out of a workspace; the kernel lets go with the process."""

    def __init__(self, path: Path, patience_secs: float = LEAVING_SECS) -> None:
        self._path, self._patience_secs = path, patience_secs
        self._descriptor: int | None = None

    def take(self) -> None:
        """Lock, or raise DirectoryInUseError when another process stays."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._descriptor = os.open(self._path / _LOCK, flags, 0o600)
        except OSError as error:
            raise StorageError(f"cannot lock {self._path}: {error.strerror}; remove {_LOCK} there") from error
        until = time.monotonic() + self._patience_secs
        while not self._locked():
            if time.monotonic() > until:
                self.release()
                raise DirectoryInUseError(
                    f"another process of this host works on the same run, in {self._path}: wait for it, or "
                    "end it"
                )
            time.sleep(0.05)

    def release(self) -> None:
        """Let go; a second call does nothing."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _locked(self) -> bool:
        if self._descriptor is None:
            return False
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            raise StorageError(
                f"{self._path} cannot be locked: {error.strerror}; set {VARIABLE} to a local directory"
            ) from error
        return True


def set_aside(path: Path) -> Path:
    """Empty a workspace whose run is not the one in the store; what was there lies beside, once.

    The lock stays where it is. Raises StorageError.
    """
    beside = path.with_name(f"{path.name}.before")
    try:
        if beside.is_symlink():
            beside.unlink()
        elif beside.exists():
            shutil.rmtree(beside)
        beside.mkdir(mode=0o700)
        for one in path.iterdir():
            if one.name != _LOCK:
                one.rename(beside / one.name)
    except OSError as error:
        raise StorageError(f"{path} cannot be emptied: {error.strerror}; remove it") from error
    return beside


VISIBLE_WITHIN_SECS = 10.0


def check_store(files: RunFiles, peers: Peers, place: NodePlace) -> None:
    """Raise UsageError or StorageError on all processes; nothing is left behind. One process a host looks."""
    nonce = peers.exchange("store probe", secrets.token_hex(8))[0]
    probe, written = f".probe-{nonce}", False

    def write() -> None:
        nonlocal written
        if peers.rank == 0:
            check_exclusion(files)
            files.replace(probe, b"probe\n")
            written = True

    try:
        together(peers, "write to the store", write)
        looks = place.local_rank == 0
        seen = together(peers, "store seen", lambda: [place.host, not looks or _appears(files, probe)])
    finally:
        if written:
            with suppress(StorageError):
                files.delete(probe)
    blind = sorted({host for host, sees in seen if not sees})
    if blind:
        raise UsageError(
            f"the store at {files.url} of {seen[0][0]} is not the one that {', '.join(blind)} sees: give all "
            "hosts the same endpoint and credentials"
        )


def _appears(files: RunFiles, probe: str) -> bool:
    until = time.monotonic() + VISIBLE_WITHIN_SECS
    while True:
        if files.stat(probe) is not None:
            return True
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
