"""Local copies of remote runs: temporary mirrors for readers, and workspaces on hosts that train.

A mirror lists the store and downloads files whose version changed; checkpoints are read from the store. It is
deleted when the process ends.

A workspace is a cache of the store, which is authoritative. The same host finds its workspace again; another
host begins with the store.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import os
import secrets
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

from torchrelay.checkpoint.log.record import JOB_PATH as JOB_FILE
from torchrelay.checkpoint.log.record import slot_path
from torchrelay.checkpoint.storage.base import RetryTimeouts, check_exclusion
from torchrelay.errors import DirectoryInUseError, RelayError, StorageError, UsageError
from torchrelay.jobs.cluster import NodePlace
from torchrelay.jobs.session import Peers, together
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.runners.remote_runs.download import Listed, RunFiles, bring, found_in, place_for
from torchrelay.runners.remote_runs.names import (
    CHECKPOINTS,
    LOGS,
    canonical,
    for_a_glance,
    is_name,
    last_name,
    travels,
)

MOST_RUNS = 1000
_COARSE_SECS, _SETTLED = 2.0, -1.0
_LOOKING = RetryTimeouts(deadline_secs=30.0)
_RUN_FILES = ("run.json", "status.json")
_mirrors: dict[str, Mirror] = {}
_lock = threading.Lock()

Wanted = Callable[[str], bool]


class Mirror:
    """The local mirror of one URL, of a run or of a directory with runs.

    `root` is the directory that stands for the URL. `left_out` has, by URL, reasons for files left out.
    """

    def __init__(self, url: str, folder: Path) -> None:
        self.url = canonical(url, "the run")
        self.files = RunFiles.open(self.url, "the run")
        self.files.patience = _LOOKING
        self.root = folder / (last_name(self.url) or "runs")
        self.left_out: dict[str, str] = {}
        self._versions: dict[str, dict[str, str]] = {}
        self._looked: dict[tuple[str, Wanted], float] = {}
        self._settling: dict[tuple[str, str], tuple[str, float]] = {}
        self._lock = threading.RLock()

    def is_run(self, below: str = "") -> bool:
        """Return True if there is a run at the URL, or at a name below it."""
        found = {one.name for one in self.files.entries(below) if not one.folder}
        checkpoints = f"{below}/{CHECKPOINTS}".lstrip("/")
        return bool(found & set(_RUN_FILES)) or any(
            self.files.stat(f"{checkpoints}/{name}") is not None for name in (JOB_FILE, slot_path(0))
        )

    def run(self, below: str = "", wanted: Wanted = travels, not_older_secs: float = 0.0) -> RunDirectory:
        """Return the run at the URL or below it, with the wanted files not older than `not_older_secs`."""
        path, url = self.root / below, f"{self.url}/{below}".rstrip("/")
        with self._lock:
            looked = self._looked.get((below, wanted))
            if looked is None or time.monotonic() - looked > not_older_secs:
                self._bring(below, path, wanted)
                self._looked[below, wanted] = time.monotonic()
        return RunDirectory(path, url)

    def names(self, depth: int = 1) -> list[str]:
        """Return the sorted names of runs below the URL; hidden names and runs in runs are skipped."""
        return sorted(self._below("", depth))[:MOST_RUNS]

    def _below(self, folder: str, depth: int) -> Iterator[str]:
        for one in self.files.entries(folder):
            if not one.folder or one.name.startswith(".") or not is_name(one.name):
                continue
            name = f"{folder}/{one.name}".lstrip("/")
            inside = self.files.entries(name)
            if any(two.name in _RUN_FILES and not two.folder for two in inside):
                yield name
            elif depth > 1:
                yield from self._below(name, depth - 1)

    def _bring(self, below: str, path: Path, wanted: Wanted) -> None:
        files = _Below(self.files, below)
        path.mkdir(parents=True, exist_ok=True)
        found, left_out = found_in(files, lambda name: wanted(name) and not name.startswith(f"{LOGS}/"))
        known = self._versions.setdefault(below, {})
        new = {
            name: one
            for name, one in found.items()
            if self._may_be_another(below, name, one) or not one.version or known.get(name) != one.version
        }
        versions, gone = bring(files, new, path)
        for name in [name for name in known if name not in found and wanted(name)]:
            del known[name]
            with suppress(OSError):
                (path / name).unlink()
        known.update(versions)
        self.left_out |= {f"{files.url}/{name}": why for name, why in (left_out | gone).items()}
        if wanted(LOGS):
            _stand_for_logs(files, path)

    def _may_be_another(self, below: str, name: str, one: Listed) -> bool:
        """Return True if a file must be downloaded again although its version is unchanged.

        A time in whole seconds counts only if the file was downloaded some seconds after it was first seen,
        because later changes then get another time. Clocks are not compared.
        """
        if not one.coarse:
            return False
        version, settles = self._settling.get((below, name), ("", 0.0))
        now = time.monotonic()
        if version != one.version:
            settles = now + _COARSE_SECS
        elif settles == _SETTLED:
            return False
        self._settling[below, name] = one.version, _SETTLED if now > settles else settles
        return True


class _Below(RunFiles):
    def __init__(self, files: RunFiles, below: str) -> None:
        root = files._name(below) if below else files.root
        url = f"{files.url}/{below}".rstrip("/")
        super().__init__(files.system, root, url, single_writer=files.single_writer, patience=files.patience)


def mirror_of(url: str) -> Mirror:
    """Return the mirror of a URL without contacting the store. UsageError for an invalid URL."""
    url = canonical(url, "the run")
    with _lock:
        if url not in _mirrors:
            _mirrors[url] = Mirror(url, _folder() / str(len(_mirrors)))
        return _mirrors[url]


def shown_place(path: Path) -> str:
    """Return the URL that a mirror's directory stands for; any other path unchanged."""
    for mirror in list(_mirrors.values()):
        if path == mirror.root or mirror.root in path.parents:
            return f"{mirror.url}/{path.relative_to(mirror.root).as_posix()}".removesuffix("/.")
    return str(path)


def with_urls(text: str) -> str:
    """Replace mirror directories in a message by URLs."""
    for mirror in list(_mirrors.values()):
        text = text.replace(str(mirror.root), mirror.url)
    return text


def mirrored_run(path: Path, wanted: Wanted) -> RunDirectory:
    """Return the run of a directory; for a mirror, with these files."""
    for mirror in list(_mirrors.values()):
        if path == mirror.root or mirror.root in path.parents:
            return mirror.run(path.relative_to(mirror.root).as_posix().removeprefix("."), wanted)
    return RunDirectory(path)


@cache
def _folder() -> Path:
    """The directory of all mirrors, created on first use for this user only."""
    made = Path(tempfile.mkdtemp(prefix="torchrelay-look-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


def _stand_for_logs(files: RunFiles, path: Path) -> None:
    """Create empty files with the times of ranks' logs: readers only need these times."""
    attempts = [one.name for one in files.entries(LOGS) if one.folder and one.name.startswith("attempt_")]
    numbers = [int(one[8:]) for one in attempts if one[8:].isdecimal() and one[8:].isascii()]
    if not numbers:
        return
    folder = f"{LOGS}/attempt_{max(numbers)}"
    for one in files.entries(folder):
        if one.folder or one.modified is None or not for_a_glance(f"{folder}/{one.name}"):
            continue
        target = place_for(path, f"{folder}/{one.name}")
        try:
            target.touch()
            os.utime(target, (one.modified, one.modified))
        except (OSError, OverflowError) as error:
            raise StorageError(f"cannot write {target}: {error}") from error


VARIABLE = "TORCHRELAY_WORKSPACE"
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
"""With another server the same URL is another location."""
_LOCK = ".torchrelay-lock"
LEAVING_SECS = 20.0
"""Longest wait for the previous process of a workspace to exit; a fenced one exits within 15 s."""


def workspace_of(url: str) -> Path:
    """Return a run's workspace on this host, below TORCHRELAY_WORKSPACE or the user's cache; creates nothing.

    Its last name is the run's, so that a job without a name has the same name everywhere.
    """
    given = os.environ.get(VARIABLE)
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    base = Path(given or f"{cache}/torchrelay/workspaces").expanduser().absolute()
    said = "\n".join([url, *(os.environ.get(name, "") for name in _ENDPOINTS)])
    return base / hashlib.sha256(said.encode()).hexdigest()[:16] / last_name(url)


def make_workspace(path: Path) -> None:
    """Create the directory for this user only. Raises UsageError for what is another's, StorageError."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        for one in (path.parent, path):
            found = one.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                what = "a link" if stat.S_ISLNK(found.st_mode) else "not a directory of this user"
                raise UsageError(
                    f"the workspace {one} is {what}: set {VARIABLE} to another directory of this host"
                )
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        if isinstance(error, UsageError):
            raise
        raise StorageError(
            f"the workspace {path} cannot be created: {error.strerror}; set {VARIABLE} to a writable "
            "directory of this host"
        ) from error


def lock_workspace(path: Path) -> int:
    """Lock a workspace against other processes of this host, until the returned descriptor is closed.

    The kernel releases it at exit. Raises DirectoryInUseError if another process keeps it, StorageError.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        descriptor = os.open(path / _LOCK, flags, 0o600)
    except OSError as error:
        raise StorageError(f"cannot lock {path}: {error.strerror}; remove {_LOCK} there") from error
    until = time.monotonic() + LEAVING_SECS
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until:
                    raise DirectoryInUseError(
                        f"another process of this host works on the same run in {path}: wait for it"
                    ) from None
                time.sleep(0.05)
            else:
                return descriptor
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, OSError) and not isinstance(error, RelayError):
            raise StorageError(
                f"{path} cannot be locked: {error.strerror}; set {VARIABLE} to a local directory"
            ) from error
        raise


def set_aside(path: Path) -> Path:
    """Empty a workspace of another run except the lock, keeping one copy. Raises StorageError."""
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
    """Check on all hosts that they see the same writable store; one process per host reads."""
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
            f"the store at {files.url} on {seen[0][0]} differs from the one on {', '.join(blind)}: use the "
            "same endpoint and credentials on all hosts"
        )


def _appears(files: RunFiles, probe: str) -> bool:
    until = time.monotonic() + VISIBLE_WITHIN_SECS
    while True:
        if files.stat(probe) is not None:
            return True
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
