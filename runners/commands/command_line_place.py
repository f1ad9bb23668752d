"""From a path or URL on the command line to a run directory and its checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torchrelay.checkpoint.local_storage import LocalStorage
from torchrelay.checkpoint.log.branches import LogView
from torchrelay.checkpoint.log.job_file import PATH as JOB_FILE
from torchrelay.checkpoint.log.log_reader import open_log
from torchrelay.checkpoint.reading.opening import Best, best_of_run, place_of
from torchrelay.checkpoint.remote.urls import is_url
from torchrelay.checkpoint.storage import Storage
from torchrelay.checkpoint.storage_places import FILE
from torchrelay.errors import UsageError
from torchrelay.metadata.run_directory import RunDirectory

_RUN_FILE = "run.json"
_NAMED_RUNS = 5


@dataclass(frozen=True)
class Place:
    """What lies at `where`, a path or URL: `run` is None for a bare directory of checkpoints and at a URL.

    `best` is the metric by which the run calls an epoch its best, where it said one.
    """

    where: str
    run: RunDirectory | None
    storage: Storage
    best: Best | None = None

    def log(self) -> LogView:
        """The log as it is now; empty where nothing was committed yet."""
        return open_log(self.storage)


def locate(text: str) -> Place:
    """Find what a path or URL names; raises UsageError for anything that torchrelay did not make.

    At a URL lie checkpoints alone: what a run notes beside them is looked at where it was written.
    """
    if is_url(text) and not text.startswith(FILE):
        found = place_of(text)
        return Place(text, None, found.storage.storage, found.best)
    path = existing_directory(text.removeprefix(FILE))
    run = RunDirectory(path)
    if (path / _RUN_FILE).is_file() or (run.checkpoints / JOB_FILE).is_file():
        return Place(text, run, LocalStorage(run.checkpoints), best_of_run(path))
    if (path / JOB_FILE).is_file():
        return Place(text, None, LocalStorage(path))
    raise UsageError(f"{text} is no run and holds no checkpoints{_below(text)}")


def locate_run(text: str) -> RunDirectory:
    """Find a run directory; raises UsageError for anything else, checkpoints without a run included."""
    run = locate(text).run
    if run is None:
        raise UsageError(f"{text} holds checkpoints but no run ({_RUN_FILE}): torchrelay ls lists its epochs")
    return run


def existing_directory(text: str) -> Path:
    """The directory that a text names; raises UsageError with what was probably meant where there is none."""
    path = Path(text)
    if not path.exists():
        run, at, _ = text.rpartition("@")
        if at and Path(run).exists():
            raise UsageError(f"there is no {text}; this verb takes a run and no epoch of it: give {run}")
        raise UsageError(
            f"there is no {text}{_like(path)}: give the path of a run directory or of its checkpoints"
        )
    if not path.is_dir():
        raise UsageError(f"{text} is a file: give the path of a run directory or of its checkpoints")
    return path


def runs_below(text: str) -> list[Path]:
    """The runs that lie directly in a directory, by name; none for a run itself, and what is no directory."""
    path = Path(text.removeprefix(FILE))
    if is_url(str(path)) or (path / _RUN_FILE).exists() or (path / JOB_FILE).exists():
        return []
    return sorted(one.parent for one in path.glob(f"*/{_RUN_FILE}"))


def each_run(texts: Sequence[str]) -> list[str]:
    """The same texts, but for a directory of runs its runs."""
    return [one for text in texts for one in (list(map(str, runs_below(text))) or [text])]


def _like(path: Path) -> str:
    """A neighbour that is written nearly so."""
    from difflib import get_close_matches

    with suppress(OSError):
        names = [one.name for one in path.parent.iterdir() if one.is_dir()]
        close = get_close_matches(path.name, names, n=1, cutoff=0.6)
        return f" (did you mean {path.parent / close[0]}?)" if close else ""
    return ""


def _below(text: str) -> str:
    names = [one.name for one in runs_below(text)]
    if not names:
        return ": give the path of a run directory or of its checkpoints"
    more = ", ..." if len(names) > _NAMED_RUNS else ""
    return f"; below it are the runs {', '.join(names[:_NAMED_RUNS])}{more}: give the path of one"
