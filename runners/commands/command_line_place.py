"""From a path on the command line to a run directory and its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torchrelay.checkpoint.local_storage import LocalStorage
from torchrelay.checkpoint.log.branches import LogView
from torchrelay.checkpoint.log.job_file import PATH as JOB_FILE
from torchrelay.checkpoint.log.log_reader import open_log
from torchrelay.errors import UsageError
from torchrelay.metadata.run_directory import RunDirectory

_RUN_FILE = "run.json"
_NAMED_RUNS = 5


@dataclass(frozen=True)
class Place:
    """What lies at a path: `run` is None for a bare directory of checkpoints."""

    path: Path
    run: RunDirectory | None
    storage: LocalStorage

    def log(self) -> LogView:
        """The log as it is now; empty where nothing was committed yet."""
        return open_log(self.storage)


def locate(text: str) -> Place:
    """Find what a path names; raises UsageError for anything that torchrelay did not make."""
    path = _existing_directory(text)
    run = RunDirectory(path)
    if (path / _RUN_FILE).is_file() or (run.checkpoints / JOB_FILE).is_file():
        return Place(path, run, LocalStorage(run.checkpoints))
    if (path / JOB_FILE).is_file():
        return Place(path, None, LocalStorage(path))
    raise UsageError(f"{text} is no run and holds no checkpoints{_runs_below(path)}")


def locate_run(text: str) -> RunDirectory:
    """Find a run directory; raises UsageError for anything else, checkpoints without a run included."""
    run = locate(text).run
    if run is None:
        raise UsageError(f"{text} holds checkpoints but no run ({_RUN_FILE}): torchrelay ls lists its epochs")
    return run


def _existing_directory(text: str) -> Path:
    if "://" in text:
        raise UsageError(f"{text} is a URL; runs lie in local or mounted directories so far: give a path")
    path = Path(text)
    if not path.exists():
        raise UsageError(f"there is no {text}: give the path of a run directory or of its checkpoints")
    if not path.is_dir():
        raise UsageError(f"{text} is a file: give the path of a run directory or of its checkpoints")
    return path


def _runs_below(path: Path) -> str:
    below = sorted(one.parent.name for one in path.glob(f"*/{_RUN_FILE}"))
    if not below:
        return ": give the path of a run directory or of its checkpoints"
    more = ", ..." if len(below) > _NAMED_RUNS else ""
    return f"; below it are the runs {', '.join(below[:_NAMED_RUNS])}{more}: give the path of one"
