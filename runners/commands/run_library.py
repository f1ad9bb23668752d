"""The library: all runs below one directory, whatever experiments they belong to, found by id or path."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from torchrelay.errors import UsageError
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.runners.remote_runs.names import for_a_look, is_remote, last_name, parent, travels
from torchrelay.runners.remote_runs.resolve import existing_directory, locate_run

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
    from torchrelay.runners.remote_runs.mirror import mirror_of

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
    from torchrelay.runners.remote_runs.mirror import mirror_of

    locate_run(url, whole=False)  # which says what is wrong with it
    name, above = last_name(url.rstrip("/")), parent(url.rstrip("/"))
    return mirror_of(url).run() if above is None else mirror_of(above).run(name)


def _whole(path: Path) -> RunDirectory:
    """A run of a library; of one in a store all that it keeps."""
    from torchrelay.runners.remote_runs.mirror import mirrored_run

    return mirrored_run(path, travels)


def shown(path: Path) -> str:
    """How people call what lies at a path of a library: a URL, where the directory stands for one."""
    from torchrelay.runners.remote_runs.mirror import shown_place

    return shown_place(path)


def _newest(there: Sequence[Path]) -> str:
    return f"there is {', '.join(one.name for one in there[-_NAMED:])}"


def experiment_of(run: Path, root: Path) -> str:
    """The directories between the library and the run; empty where there are none."""
    return run.parent.relative_to(root).as_posix().removeprefix(".") if root in run.parents else ""


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
