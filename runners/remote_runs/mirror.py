"""Runs in stores, for those who look: their small files in a temporary directory of this process.

A look lists, and brings what has another version than at the last one; checkpoints are read where they lie.
All of it is gone when the process ends.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from torchrelay.checkpoint.log.record import JOB_PATH as JOB_FILE
from torchrelay.checkpoint.log.record import slot_path
from torchrelay.checkpoint.storage.transfers import Patience
from torchrelay.errors import StorageError
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
_LOOKING = Patience(deadline_secs=30.0)
_RUN_FILES = ("run.json", "status.json")
_mirrors: dict[str, Mirror] = {}
_lock = threading.Lock()

Wanted = Callable[[str], bool]


class Mirror:
    """What is known here of one URL, of a run or of a place with runs in it.

    `root` is the directory that stands for the URL. `left_out` says, by URL, what was not brought and why.
    """

    def __init__(self, url: str, folder: Path) -> None:
        self.url = canonical(url, "the run")
        self.files = RunFiles.at(self.url, "the run")
        self.files.patience = _LOOKING
        self.root = folder / (last_name(self.url) or "runs")
        self.left_out: dict[str, str] = {}
        self._versions: dict[str, dict[str, str]] = {}
        self._looked: dict[tuple[str, Wanted], float] = {}
        self._settling: dict[tuple[str, str], tuple[str, float]] = {}
        self._lock = threading.RLock()

    def is_run(self, below: str = "") -> bool:
        """Whether a run lies there, or at a name below."""
        found = {one.name for one in self.files.entries(below) if not one.folder}
        checkpoints = f"{below}/{CHECKPOINTS}".lstrip("/")
        return bool(found & set(_RUN_FILES)) or any(
            self.files.stat(f"{checkpoints}/{name}") is not None for name in (JOB_FILE, slot_path(0))
        )

    def run(self, below: str = "", wanted: Wanted = travels, not_older_secs: float = 0.0) -> RunDirectory:
        """The run at the URL, or below it, with the wanted files as they are now, or were so long ago."""
        path, url = self.root / below, f"{self.url}/{below}".rstrip("/")
        with self._lock:
            looked = self._looked.get((below, wanted))
            if looked is None or time.monotonic() - looked > not_older_secs:
                self._bring(below, path, wanted)
                self._looked[below, wanted] = time.monotonic()
        return RunDirectory(path, url)

    def names(self, depth: int = 1) -> list[str]:
        """The runs below the URL, by their names from there on, sorted; nothing hidden, nothing in runs."""
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
        found, left_out = found_in(files, lambda name: wanted(name) and not _is_log(name))
        known = self._versions.setdefault(below, {})
        new = {
            name: one
            for name, one in found.items()
            if self._may_be_another(below, name, one) or not one.version or known.get(name) != one.version
        }
        brought = bring(files, new, path)
        for name in [name for name in known if name not in found and wanted(name)]:
            del known[name]
            with suppress(OSError):
                (path / name).unlink()
        known.update(brought.versions)
        self.left_out.update(
            {f"{files.url}/{name}": why for name, why in (left_out | brought.left_out).items()}
        )
        if wanted(LOGS):
            _stand_for_logs(files, path)

    def _may_be_another(self, below: str, name: str, one: Listed) -> bool:
        """Whether a file has to be brought again although its version is known.

        A time in whole seconds is believed when it was seen, and the file brought again, some seconds apart:
        what changes the file later has another one. No clocks are compared.
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
    """The files of a run at a name below another place."""

    def __init__(self, files: RunFiles, below: str) -> None:
        root = files._name(below) if below else files.root
        url = f"{files.url}/{below}".rstrip("/")
        super().__init__(files.system, root, url, single_writer=files.single_writer, patience=files.patience)


def mirror_of(url: str) -> Mirror:
    """The mirror of a URL in this process; asks the store nothing. UsageError for one that is none."""
    url = canonical(url, "the run")
    with _lock:
        if url not in _mirrors:
            _mirrors[url] = Mirror(url, _folder() / str(len(_mirrors)))
        return _mirrors[url]


def shown_place(path: Path) -> str:
    """The URL that a directory of a mirror stands for; any other path as it is."""
    for mirror in list(_mirrors.values()):
        if path == mirror.root or mirror.root in path.parents:
            return f"{mirror.url}/{path.relative_to(mirror.root).as_posix()}".removesuffix("/.")
    return str(path)


def with_urls(text: str) -> str:
    """A message with URLs in the place of the directories that stand for them."""
    for mirror in list(_mirrors.values()):
        text = text.replace(str(mirror.root), mirror.url)
    return text


def mirrored_run(path: Path, wanted: Wanted) -> RunDirectory:
    """The run of a directory; of one that stands for a URL with these files too."""
    for mirror in list(_mirrors.values()):
        if path == mirror.root or mirror.root in path.parents:
            return mirror.run(path.relative_to(mirror.root).as_posix().removeprefix("."), wanted)
    return RunDirectory(path)


def _folder() -> Path:
    """Made when it is first needed, for this user alone."""
    if not _made:
        _made.append(Path(tempfile.mkdtemp(prefix="torchrelay-look-")))
        atexit.register(shutil.rmtree, _made[0], ignore_errors=True)
    return _made[0]


_made: list[Path] = []


def _is_log(name: str) -> bool:
    return name.startswith(f"{LOGS}/")


def _stand_for_logs(files: RunFiles, path: Path) -> None:
    """Empty files with the times of the ranks' logs: who looks asks only when a rank said something last."""
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
