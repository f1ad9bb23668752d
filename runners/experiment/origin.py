"""Where a program comes from: the script or module, and so its name, its source and its runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchrelay.errors import UsageError
from torchrelay.metadata.code.selection import Root, Sources, sources_of
from torchrelay.metadata.code.snapshot import Snapshot, main_script, take
from torchrelay.metadata.experiments import RunStore
from torchrelay.records import dataclass
from torchrelay.runners.remote_runs.names import refuse_remote

RUNS = "TORCHRELAY_RUNS"
"""The variable that says where runs lie; `--runs` comes before it."""


@dataclass(frozen=True)
class Origin:
    """`file` is the program's; `roots` are those of the script that Python was started with."""

    name: str
    file: Path
    sources: Sources | None
    roots: tuple[Root, ...] | None
    runs: Path

    def snapshot(self) -> Snapshot | None:
        """The source as it is now; None where the program says `code = False`. Raises UsageError."""
        return None if self.sources is None else take(self.sources, roots=self.roots, with_git=False)

    @property
    def code_option(self) -> Any:
        """The same source, as JobRunner is told of it."""
        if self.sources is None:
            return False
        return None if self.roots is not None else self.sources

    def store(self, runs: str | None, environ: Mapping[str, str] | None = None) -> RunStore:
        """Where the runs lie: as asked for, else as the environment says, else as the program says."""
        said = runs or (os.environ if environ is None else environ).get(RUNS)
        refuse_remote(said or "", f"the program {self.name}")
        return RunStore(Path(os.path.abspath(said or self.runs)) / self.name)  # noqa: PTH100 - without `..`


def origin_of(program: type[Any]) -> Origin:
    """Look where a class comes from; raises UsageError for one that was typed in."""
    script = main_script() if program.__module__ == "__main__" else None
    roots: tuple[Root, ...] | None = None
    if script is not None:
        file, folder, roots = script.root.path / script.name, script.root.path, (script.root,)
    else:
        file, folder = _of_module(program)
    sources: Sources | None = Sources([folder])
    if program.code is not None:
        sources, roots = (None if program.code is False else sources_of(program.code)), None
    name = _checked(program.name or (file.stem if script is not None else program.__name__))
    runs = file.parent / program.runs_dir if program.runs_dir is not None else folder / "runs"
    return Origin(name, file, sources, roots, runs)


def _of_module(program: type[Any]) -> tuple[Path, Path]:
    module = sys.modules.get(program.__module__)
    file = getattr(module, "__file__", None)
    if not isinstance(file, str):
        raise UsageError(
            f"{program.__name__} comes from no file: the verbs need a script or a module; without them use "
            f"{program.__name__}().train()"
        )
    path = Path(file).resolve()
    depth = program.__module__.count(".") + (path.name == "__init__.py")
    return path, path.parents[depth]


def _checked(name: Any) -> str:
    if not isinstance(name, str) or not name or name.startswith(".") or "/" in name or "\0" in name:
        raise UsageError(f"{name!r:.80} cannot name an experiment: its runs lie in a directory of this name")
    return name
