"""The library: all runs below one directory, found by id or path, and what is listed of each."""

from __future__ import annotations

import argparse
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
from torchrelay.tools.cli.runs.ls import best_of

_DEPTH = 4
"""`runs/<name>/<runner>/<id>` is the deepest that torchrelay makes."""
_NAMED = 5


def add_library(parser: argparse.ArgumentParser) -> None:
    """`--runs DIR`: where runs are looked for by their ids."""
    text = "where runs are looked for by their ids (default: TORCHRELAY_RUNS, else runs)"
    parser.add_argument("--runs", metavar="DIR", help=text)


def library(asked: str | None) -> Path:
    """The directory of the library: as asked for, else as the environment says, else `runs`.

    Of a URL it is the directory that stands for it, with the notes of the runs as they are now.
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
    """The run directories below a directory, or itself; not hidden ones, nor what lies in runs."""
    return sorted(_runs(existing_directory(str(root)), _DEPTH))


def find_run(text: str, asked: str | None = None) -> RunDirectory:
    """A run by its path, by its id, or by a part of its id that no other has; raises UsageError."""
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
        raise UsageError(
            f"there is no run {text}, and none in {shown(root)} with that in its id: {_newest(there)}"
        )
    if not found:
        return locate_run(text)  # which says what is wrong with the path
    named = ", ".join(shown(one) for one in found[:_NAMED])
    raise UsageError(
        f"{len(found)} runs in {shown(root)} have {text!r} in their ids: {named}; give more of the id"
    )


def _stored_run(url: str) -> RunDirectory:
    """Beside the others of its directory, so that it can be compared with them."""
    from torchrelay.runners.remote_runs.local_copies import mirror_of

    locate_run(url, whole=False)  # which says what is wrong with it
    name, above = last_name(url.rstrip("/")), parent(url.rstrip("/"))
    return mirror_of(url).run() if above is None else mirror_of(above).run(name)


def _whole(path: Path) -> RunDirectory:
    """A run of a library; of one in a store all that it keeps."""
    from torchrelay.runners.remote_runs.local_copies import mirrored_run

    return mirrored_run(path, travels)


def shown(path: Path) -> str:
    """How people call what lies at a path of a library: a URL, where the directory stands for one."""
    from torchrelay.runners.remote_runs.local_copies import shown_place

    return shown_place(path)


def _newest(there: Sequence[Path]) -> str:
    return f"there is {', '.join(one.name for one in there[-_NAMED:])}"


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
    """One run, an object of `runs ls --json`; `problem` says why its notes could not be read."""

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
        """The best value of the run's own metric, else what its newest test measured."""
        if self.best is not None:
            return f"{self.metric}={human_number(self.best)} (epoch {self.best_epoch})"
        found = self.test or {}
        told = [
            f"{name}={human_number(value) if isinstance(value, float) else value}"
            for name, value in sorted(found.items())
            if name != "epoch"
        ]
        return f"test {', '.join(told[:2])} (epoch {found.get('epoch')})" if told else "-"

    def json(self) -> dict[str, Any]:
        """With the path as people call it."""
        return {**vars(self), "path": shown(self.path)}


def library_line(path: Path, root: Path) -> LibraryLine:
    """Read what a run notes of itself; never raises for what its files are like."""
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
    """What the run is of; of a run without such a note, what its newest start was."""
    if note is not None:
        return note.code_id, note.config_id
    starts = captures(path)
    if not starts:
        return None, None
    config_id = starts[-1].get("config_id")
    return code_id_of(starts[-1]), config_id if isinstance(config_id, str) else None
