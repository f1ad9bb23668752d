"""The runs below a directory: which there are, and whether files of one have changed."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from torchrelay.checkpoint.log.job_file import has_job
from torchrelay.errors import RelayError, UsageError
from torchrelay.metadata.run_directory import RunDirectory

MOST_RUNS = 1000
_LOOK_SECS = 10
_FILES = ("run.json", "status.json", "metadata.jsonl", "config/resolved.yaml", "lineage")
_OF_CHECKPOINTS = ("log", "log/HINT", "data")


class RunStore:
    """Directories of runs directly below a root, or the root itself where it is a run.

    Links are not followed: what they lead to lies elsewhere. Raises UsageError for what is no directory.
    """

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            what = "a file" if root.exists() else "not there"
            raise UsageError(f"{root} is {what}: give the directory in which runs lie")
        self.root = root.absolute()
        self.shown = str(self.root)
        self._single = is_run(self.root)

    def names(self) -> list[str]:
        """The runs that are there now, sorted; at most a thousand."""
        if self._single:
            return [self.root.name]
        try:
            with os.scandir(self.root) as found:
                names = (one.name for one in found if one.is_dir(follow_symlinks=False))
                return sorted(name for name in names if is_run(self.root / name))[:MOST_RUNS]
        except OSError:
            return []  # the directory is away now; the page says that there is no run

    def runs(self) -> list[RunDirectory]:
        """The same, as run directories."""
        return [RunDirectory(self.root if self._single else self.root / name) for name in self.names()]

    def run(self, name: str) -> RunDirectory | None:
        """The run of a name that the listing has; None for any other text, whatever it spells."""
        return next((run for run in self.runs() if run.name == name), None)


def is_run(path: Path) -> bool:
    """Whether a directory is one of a run. One whose notes are links is none: they may lead to any file."""
    begun = (path / "run.json").is_file() or has_job(path / "checkpoints")
    return begun and not any(one.is_symlink() for one in _notes(RunDirectory(path)))


def signature(run: RunDirectory) -> str:
    """Another text when a file that a page is made of was changed; the same costs some calls of stat."""
    seen = hashlib.sha256(_now_and_then(run).encode())
    for path in _watched(run):
        try:
            status = path.stat(follow_symlinks=False)
            seen.update(f"{path.name} {status.st_mtime_ns} {status.st_size} {status.st_ino}\n".encode())
        except OSError as error:
            seen.update(f"{path.name} {error.errno}\n".encode(errors="replace"))
    return seen.hexdigest()[:32]


def _now_and_then(run: RunDirectory) -> str:
    """Of a run that calls itself running also the time: its process may be gone, and no file would say so."""
    try:
        going = run.status().get("state") == "RUNNING"
    except (RelayError, OSError):
        going = False
    return str(time.time() // _LOOK_SECS) if going else ""


def _watched(run: RunDirectory) -> Iterator[Path]:
    yield from _notes(run)
    for name in _OF_CHECKPOINTS:
        yield run.path / "checkpoints" / name


def _notes(run: RunDirectory) -> Iterator[Path]:
    for name in _FILES:
        yield run.path / name
    for kind in ("metrics", "steps", "events"):
        for _, path in run.generations(kind):
            yield path
