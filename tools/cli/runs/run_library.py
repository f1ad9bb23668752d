"""The run library: all runs below one directory, found by id or path, with their listed fields."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrelay.checkpoint.load.open import best_of_run
from torchrelay.errors import RelayError, UsageError
from torchrelay.metadata.code.capture import captures, code_id_of
from torchrelay.metadata.experiments import ProgramRecord, newest_test, read_note
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.records import dataclass
from torchrelay.runners.monitoring.console import human_number
from torchrelay.runners.monitoring.status import standing
from torchrelay.runners.remote_runs.names import for_a_look, is_remote, last_name, parent, travels
from torchrelay.runners.remote_runs.resolve import existing_directory, locate_run
from torchrelay.tools.cli.arguments import arg
from torchrelay.tools.cli.runs.ls import best_of

_DEPTH = 4
"""`runs/<name>/<runner>/<id>` is the deepest layout that torchrelay creates."""
_NAMED = 5


LIBRARY = arg("--runs", "directory to find run ids in (default: TORCHRELAY_RUNS, else runs)", "DIR")


def library(asked: str | None) -> Path:
    """Return the directory of the library: as given, else `TORCHRELAY_RUNS`, else `runs`.

    For a URL it is a local mirror with the current metadata of the runs.
    """
    text = asked or os.environ.get("TORCHRELAY_RUNS") or "runs"
    return _stored_library(text) if is_remote(text) else Path(text)


def _stored_library(url: str) -> Path:
    from torchrelay.runners.remote_runs.local_copies import mirror_of

    mirror = mirror_of(url)
    names = [""] if mirror.is_run() else mirror.names(_DEPTH)
    mirror.root.mkdir(parents=True, exist_ok=True)
    for name in names:
        mirror.run(name, for_a_look)
    return mirror.root


def runs_in(root: Path) -> list[Path]:
    """List the run directories below `root`, or itself; skips hidden directories and runs within runs."""
    return sorted(_runs(existing_directory(str(root)), _DEPTH))


def find_run(text: str, asked: str | None = None) -> RunDirectory:
    """Find a run by path, id or unique part of its id; raises UsageError."""
    if is_remote(text):
        return _stored_run(text)
    if Path(text).exists():
        return locate_run(text)
    root = library(asked)
    there = runs_in(root) if root.is_dir() else []
    found = [one for one in there if one.name == text] or [one for one in there if text and text in one.name]
    if len(found) == 1:
        return _whole(found[0])
    if not found and "/" not in text and there:
        raise UsageError(f"no run {text}, and no run in {shown(root)} has that in its id; {_newest(there)}")
    if not found:
        return locate_run(text)  # reports the problem with the path
    named = ", ".join(shown(one) for one in found[:_NAMED])
    raise UsageError(
        f"{len(found)} runs in {shown(root)} have {text!r} in their ids, such as {named}; give more of the id"
    )


def _stored_run(url: str) -> RunDirectory:
    """Mirror a remote run beside the others of its directory, so that it can be compared with them."""
    from torchrelay.runners.remote_runs.local_copies import mirror_of

    locate_run(url, whole=False)  # reports the problem with it
    name, above = last_name(url.rstrip("/")), parent(url.rstrip("/"))
    return mirror_of(url).run() if above is None else mirror_of(above).run(name)


def _whole(path: Path) -> RunDirectory:
    """Open a run; downloads all its metadata if it is remote."""
    from torchrelay.runners.remote_runs.local_copies import mirrored_run

    return mirrored_run(path, travels)


def shown(path: Path) -> str:
    """Return the path as shown to users: the URL if the directory mirrors one."""
    from torchrelay.runners.remote_runs.local_copies import shown_place

    return shown_place(path)


def _newest(there: Sequence[Path]) -> str:
    return f"the newest are {', '.join(one.name for one in there[-_NAMED:])}"


def _runs(folder: Path, depth: int) -> Iterator[Path]:
    if (folder / "run.json").is_file():
        yield folder
        return
    try:
        inside = [one for one in folder.iterdir() if not one.name.startswith(".") and one.is_dir()]
    except PermissionError:
        return
    for one in inside if depth else ():
        yield from _runs(one, depth - 1)


@dataclass(frozen=True)
class LibraryLine:
    """One run, an object of `runs ls --json`; `problem` is why its metadata cannot be read."""

    id: str
    path: Path
    experiment: str
    state: str = "unreadable"
    why: str = ""
    epoch: int | None = None
    metric: str | None = None
    best: float | None = None
    best_epoch: int | None = None
    test: Mapping[str, Any] | None = None
    message: str = ""
    code_id: str | None = None
    config_id: str | None = None
    amended: tuple[str | None, ...] = ()
    created: float | None = None
    problem: str | None = None

    @property
    def key_metric(self) -> str:
        """The best value of the run's metric, else the newest test results."""
        if self.best is not None:
            return f"{self.metric}={human_number(self.best)} (epoch {self.best_epoch})"
        found = self.test or {}
        values = [
            f"{name}={human_number(value) if isinstance(value, float) else value}"
            for name, value in sorted(found.items())
            if name != "epoch"
        ]
        return f"test {', '.join(values[:2])} (epoch {found.get('epoch')})" if values else "-"

    def json(self) -> dict[str, Any]:
        """Return the object of `runs ls --json`; a mirrored path is its URL."""
        return {**vars(self), "path": shown(self.path)}


def library_line(path: Path, root: Path) -> LibraryLine:
    """Read the metadata of a run; damage is reported in `problem`, not raised."""
    experiment = path.parent.relative_to(root).as_posix().removeprefix(".") if root in path.parents else ""
    try:
        run, note, stands = RunDirectory(path), read_note(path), standing(path)
        rule, (code_id, config_id), problems = best_of_run(path), _ids(path, note), list[str]()
        created = run.known_identity(problems.append).get("created")
        best, best_epoch = (None if rule is None else best_of(run.metrics(), rule)) or (None, None)
        return LibraryLine(
            path.name,
            path,
            experiment,
            stands.word,
            stands.why,
            stands.epoch,
            None if rule is None else rule[0],
            best,
            best_epoch,
            newest_test(path),
            "" if note is None else note.message,
            code_id,
            config_id,
            () if note is None else tuple(one.get("code_id") for one in note.amended),
            created if type(created) in (int, float) else None,
            problems[0] if problems else None,
        )
    except RelayError as error:
        return LibraryLine(path.name, path, experiment, problem=str(error))


def _ids(path: Path, note: ProgramRecord | None) -> tuple[str | None, str | None]:
    """Return the ids of code and configuration, from the newest launch if the run has none noted."""
    if note is not None:
        return note.code_id, note.config_id
    starts = captures(path)
    if not starts:
        return None, None
    config_id = starts[-1].get("config_id")
    return code_id_of(starts[-1]), config_id if isinstance(config_id, str) else None
