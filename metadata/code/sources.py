"""What a user may say about the source of a run: where it lies, what is left out, how large it may be."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from torchrelay.errors import UsageError

LIMIT_BYTES = 32 << 20


@dataclass(frozen=True)
class Root:
    """A directory of source; its files lie below `label` in the archive, at the top where that is empty.

    `only` names the files to take where the directory as a whole is nobody's project.
    """

    label: str
    path: Path
    only: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Sources:
    """The source of a run: `JobRunner(job, "runs/a", code=Sources([".", "../lib"], exclude=["data/"]))`.

    `roots` are directories, or names for them: `{"app": ".", "lib": "../lib"}`. Of one directory the files
    lie at the top of the archive, of several below the directories' names.
    `exclude` and `include` are patterns in the language of `.gitignore`, relative to each root; `include`
    adds files that git does not know and whose suffix is none of source. More than `limit_bytes` in all is
    refused. `git_ref=True` also commits the selected files as `refs/torchrelay/<code id>` in each root's
    repository, touching neither its branches nor its index.
    """

    roots: Sequence[str | Path] | Mapping[str, str | Path]
    exclude: Sequence[str] = ()
    include: Sequence[str] = ()
    limit_bytes: int = LIMIT_BYTES
    git_ref: bool = False

    def __post_init__(self) -> None:
        for name, value in (("exclude", self.exclude), ("include", self.include), ("roots", self.roots)):
            if isinstance(value, (str, os.PathLike)):
                raise UsageError(f"Sources({name}={str(value)!r}) is one text: give a list")
        if type(self.limit_bytes) is not int or self.limit_bytes < 1:
            raise UsageError(f"Sources(limit_bytes={self.limit_bytes!r}) is no number of bytes from 1 on")
        if not self.roots:
            raise UsageError("Sources has no roots: give the directories of the source")

    def labelled(self) -> tuple[Root, ...]:
        """The roots, absolute, each checked to be a directory; raises UsageError."""
        roots = [Root(label, _directory(path)) for label, path in self._named().items()]
        for inner in roots:
            for outer in roots:
                if inner is not outer and inner.path.is_relative_to(outer.path):
                    raise UsageError(
                        f"the source {inner.path} lies in the source {outer.path}: give the outer one alone"
                    )
        return tuple(sorted(roots, key=lambda root: root.label))

    def _named(self) -> dict[str, str | Path]:
        if isinstance(self.roots, Mapping):
            for label in self.roots:
                if not (isinstance(label, str) and label.isidentifier()):
                    raise UsageError(f"{label!r} cannot name a source: use letters, digits and _")
            return dict(self.roots)
        if len(self.roots) == 1:
            return {"": self.roots[0]}
        named: dict[str, str | Path] = {}
        for path in self.roots:
            label = _directory(path).name
            if label in named:
                raise UsageError(
                    f"two sources are called {label}: name them, code={{'first': {str(path)!r}, ...}}"
                )
            named[label] = path
        return named


Code: TypeAlias = Sources | str | Path | Sequence[str | Path] | Mapping[str, str | Path] | Literal[False]
"""What `code=` of JobRunner may be, besides None."""


def sources_of(code: Any) -> Sources:
    """What `code=` says; raises UsageError for what it cannot be."""
    if isinstance(code, Sources):
        return code
    if isinstance(code, (str, os.PathLike)):
        return Sources([Path(code)])
    if isinstance(code, Mapping):
        return Sources(dict(code))
    if isinstance(code, Sequence) and all(isinstance(one, (str, os.PathLike)) for one in code):
        return Sources([Path(one) for one in code])
    raise UsageError(
        f"code is {code!r:.80}; it is None (the script's directory), False (nothing is archived), "
        "directories, or torchrelay.Sources(...)"
    )


def _directory(path: str | Path) -> Path:
    try:
        found = Path(path).resolve()
        if found.is_dir():
            return found
    except (OSError, RuntimeError, ValueError) as error:
        raise UsageError(f"the source {str(path)!r} cannot be looked at: {error}") from None
    raise UsageError(f"the source {path} is no directory: give the directories of the source")
