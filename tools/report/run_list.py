"""The list of runs of a store: which there are, how each stands, whether files of one have changed."""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from torchrelay.checkpoint.log.record import has_job
from torchrelay.errors import RelayError, StorageError, UsageError
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.runners.monitoring.status import standing
from torchrelay.runners.remote_runs.local_copies import Wanted, mirror_of
from torchrelay.runners.remote_runs.names import for_a_glance, for_a_look
from torchrelay.tools.report.charts import Chart, spark
from torchrelay.tools.report.gather import best_of, points_of
from torchrelay.tools.report.page import whole_page
from torchrelay.tools.report.parts import count
from torchrelay.tools.report.run_data import RunFacts, Troubles, course_of, moment_of

MOST_RUNS = 1000
_LOOK_SECS = 10
_FILES = ("run.json", "status.json", "metadata.jsonl", "config/resolved.yaml", "lineage")
_OF_CHECKPOINTS = ("log", "log/HINT", "data")


class RunIndex:
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
    for path in (*_notes(run), *(run.path / "checkpoints" / name for name in _OF_CHECKPOINTS)):
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


def _notes(run: RunDirectory) -> Iterator[Path]:
    for name in _FILES:
        yield run.path / name
    for kind in ("metrics", "steps", "events"):
        for _, path in run.generations(kind):
            yield path


NOT_OLDER_SECS = 5.0
"""Pages ask again every few seconds, in many browsers; the store is asked once meanwhile."""


class FarRuns(RunIndex):
    """What RunStore is of a directory. A store that does not answer shows what was seen last.

    Raises UsageError for a URL that is none, StorageError for a store that does not answer at the start.
    """

    def __init__(self, url: str) -> None:
        self._mirror = mirror_of(url)
        self.root = self._mirror.root
        self.shown = self._mirror.url
        self._single = self._mirror.is_run()
        self._names: list[str] = []
        self._looked = float("-inf")
        if not self._single and not self.names():
            raise UsageError(f"no run lies at {url}, or below it: give the URL of a run, or of several")

    def names(self) -> list[str]:
        """The runs that are there now, sorted; at most a thousand."""
        if not self._single and time.monotonic() - self._looked > NOT_OLDER_SECS:
            try:
                self._names = self._mirror.names()[:MOST_RUNS]
            except StorageError:
                if not self._names:
                    raise
            self._looked = time.monotonic()
        return [self._mirror.root.name] if self._single else self._names

    def runs(self) -> list[RunDirectory]:
        """The same, with what a list shows of them."""
        if self._single:
            return [self._run("", for_a_look)]
        return [self._run(name, for_a_glance) for name in self.names()]

    def run(self, name: str) -> RunDirectory | None:
        """The run of a name that the listing has, with what its page shows; None for any other text."""
        if name not in self.names():
            return None
        return self._run("" if self._single else name, for_a_look)

    def _run(self, name: str, wanted: Wanted) -> RunDirectory:
        try:
            return self._mirror.run(name, wanted, NOT_OLDER_SECS)
        except StorageError:
            return RunDirectory(Path(self._mirror.root, name), f"{self.shown}/{name}".rstrip("/"))


def glance(run: RunDirectory) -> RunFacts:
    """As much of a run as a line of the list shows: identity, status and metrics, not its checkpoints."""
    troubles = Troubles()
    identity = troubles.tried(run.identity, None) or {}
    status: dict[str, Any] = troubles.tried(run.status, {})
    epoch, state, job = status.get("epoch"), status.get("state"), identity.get("job")
    return RunFacts(
        name=run.name,
        path=str(run.where),
        job=job if isinstance(job, str) else None,
        state=state if isinstance(state, str) else None,
        epoch=epoch if type(epoch) is int else None,
        stands=standing(run.path),
        updated=moment_of({"time": status.get("updated")}),
        best=best_of(identity.get("best")),
        identity=identity,
        course=course_of(points_of(run, troubles), {}),
        trouble=tuple(troubles.said),
    )


def index_page(root: str, runs: Sequence[RunFacts], tag: str) -> str:
    """The list as a page, what wrote last on top."""
    ordered = sorted(runs, key=lambda run: (-(run.updated or 0.0), run.name))
    going = sum(run.stands.word == "running" for run in runs)
    title = f"{count(len(runs), 'run')}, {going} running" if going else count(len(runs), "run")
    rows = [(run, quote(run.name, safe=""), _course(run)) for run in ordered]
    return whole_page("runs.html", title, live=tag, root=root, rows=rows)


def _course(run: RunFacts) -> Chart | None:
    """The course of the run's own metric, without numbers: the cell beside it has the one that counts."""
    if run.best is None:
        return None
    name = run.best[0]
    values = [(one.epoch, one.metrics[name]) for one in run.course.points if name in one.metrics]
    finite = [(epoch, value) for epoch, value in values if math.isfinite(value)]
    return spark(f"{name} over {count(len(finite), 'epoch')}", finite) if len(finite) > 1 else None
