"""Which files below a directory are its source.

In a git repository: what git knows, and what it neither knows nor ignores if it looks like source. Else: what
looks like source, by suffix and size, and is not ignored by a `.gitignore`. Never runs, never what Python
makes of source.
"""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass as python_dataclass
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from torchrelay.errors import UsageError
from torchrelay.metadata.code.git import Repository, listed
from torchrelay.records import dataclass

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec


LARGEST_UNKNOWN_BYTES = 1 << 20
"""A file that git does not know is taken for source only up to this size."""

# fmt: off
_SUFFIXES = frozenset((
    ".py", ".pyi", ".pyx", ".pxd", ".ipynb", ".c", ".cc", ".cpp", ".cxx", ".cu", ".cuh", ".h", ".hh",
    ".hpp", ".hxx", ".inl", ".rs", ".go", ".java", ".kt", ".swift", ".js", ".mjs", ".ts", ".tsx", ".jsx",
    ".f", ".f90", ".jl", ".r", ".lua", ".m", ".pl", ".rb", ".sh", ".bash", ".zsh", ".fish", ".sql",
    ".proto", ".fbs", ".thrift", ".ptx", ".triton", ".json", ".jsonc", ".json5", ".jsonnet", ".yaml",
    ".yml", ".toml", ".ini", ".cfg", ".conf", ".gin", ".xml", ".txt", ".md", ".rst", ".tex", ".jinja",
    ".j2", ".tmpl", ".html", ".css", ".cmake", ".mk", ".bzl", ".in", ".patch", ".diff", ".urdf", ".xacro",
    ".sdf", ".mjcf", ".sbatch", ".slurm",
))
# fmt: on
_NAMES = frozenset(("Makefile", "Dockerfile", "Containerfile", "BUILD", "WORKSPACE", "LICENSE", "Procfile"))
_JUNK = frozenset(("__pycache__", "node_modules", "venv", "site-packages"))


def is_source(name: str) -> bool:
    """Whether a file that git does not know looks like source, by its last part alone."""
    last = name.rpartition("/")[2]
    stem, dot, suffix = last.rpartition(".")
    return last in _NAMES or (bool(stem and dot) and f".{suffix.lower()}" in _SUFFIXES)


def is_junk(name: str) -> bool:
    """Whether a file or folder that git does not know is nobody's source: hidden, or made by tools."""
    return any(part.startswith(".") or part in _JUNK for part in name.split("/"))


def is_made(name: str) -> bool:
    """Whether a file is made by running the source; left out even where git knows it."""
    return name.endswith((".pyc", ".pyo")) or "__pycache__" in name.split("/")


MOST_ENTRIES = 20_000
"""A tree with more is no project but somebody's home."""
_RULES = ".gitignore"
_LARGEST_RULES = 1 << 20


class Walk:
    """One look through a tree; `names` has what is not ignored, of any suffix. Links are not followed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.names: set[str] = set()
        self._seen = 0

    def run(self) -> set[str]:
        """Look; raises UsageError for a tree that is too large."""
        self._enter("", ())
        return self.names

    def _enter(self, folder: str, above: tuple[tuple[str, GitIgnoreSpec], ...]) -> None:
        try:
            with os.scandir(self.root / folder) as found:
                entries = sorted(found, key=lambda entry: entry.name)
        except OSError:
            return  # whoever may not look there cannot run what lies there
        self._seen += len(entries)
        if self._seen > MOST_ENTRIES:
            raise UsageError(
                f"{self.root} has more than {MOST_ENTRIES} files and is in no git repository: name the "
                "directories of the source (code=[...])"
            )
        names = {entry.name for entry in entries}
        if folder and (is_run(names) or "pyvenv.cfg" in names):
            return
        rules = (*above, (folder, own)) if (own := self._rules(folder, names)) is not None else above
        for entry in entries:
            name = f"{folder}{entry.name}"
            directory = entry.is_dir(follow_symlinks=False)
            if is_junk(entry.name) or _ignored(f"{name}/" if directory else name, rules):
                continue
            if directory:
                self._enter(f"{name}/", rules)
            else:
                self.names.add(name)

    def _rules(self, folder: str, names: set[str]) -> GitIgnoreSpec | None:
        if _RULES not in names:
            return None
        try:
            path = self.root / folder / _RULES
            if path.stat().st_size > _LARGEST_RULES:
                return None
            return patterns(path.read_text(errors="replace").splitlines())
        except OSError:
            return None


def is_run(names: set[str]) -> bool:
    """Whether a directory with these names in it is a run's, or holds checkpoints."""
    if {"run.json", "checkpoints"} <= names:
        return True
    return "log" in names and len(names & {"job.json", "data", "writer.json"}) > 1


def patterns(lines: Sequence[str]) -> GitIgnoreSpec:
    """Patterns in the language of `.gitignore`; raises UsageError for one that is none."""
    from pathspec import GitIgnoreSpec

    try:
        return GitIgnoreSpec.from_lines(lines)
    except ValueError as error:
        raise UsageError(f"a pattern cannot be understood: {error}") from None


def _ignored(name: str, rules: tuple[tuple[str, GitIgnoreSpec], ...]) -> bool:
    """The innermost file of rules that says something counts."""
    for folder, spec in reversed(rules):
        said = spec.check_file(name[len(folder) :]).include
        if said is not None:
            return said
    return False


LIMIT_BYTES = 32 << 20


@python_dataclass(frozen=True)
class Root:
    """A directory of source; its files lie below `label` in the archive, at the top where that is empty.

    `only` names the files to take where the directory as a whole is nobody's project.
    """

    label: str
    path: Path
    only: tuple[str, ...] | None = None


@python_dataclass(frozen=True)
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


_OF_A_RUN = ("checkpoints", "code", "lineage", "logs")


@dataclass
class SourceSelection:
    """Names relative to the root, and why others that look like source are not among them."""

    names: set[str] = field(default_factory=set)
    left_out: dict[str, str] = field(default_factory=dict)
    submodules: dict[str, str] = field(default_factory=dict)


def select(root: Root, sources: Sources, repo: Repository | None) -> SourceSelection:
    """Look below a root; raises UsageError for patterns that are none and trees that are too large."""
    if root.only is not None:
        return SourceSelection(set(root.only))
    found = SourceSelection()
    listing = listed(repo) if repo is not None else None
    if listing is not None and (listing.tracked or listing.untracked):
        found.submodules = listing.submodules
        untracked = {name for name in listing.untracked if not is_junk(name)}
        names = listing.tracked | _like_source(root.path, untracked, sources, found)
    else:  # no git, or a folder that the repository around it ignores
        names = _like_source(root.path, Walk(root.path).run(), sources, found)
    names -= _in_runs(root.path, names)
    if sources.exclude:
        unwanted = patterns(sources.exclude)
        names = {name for name in names if not unwanted.match_file(name)}
    found.names = {name for name in names if not is_made(name)}
    found.left_out = {name: why for name, why in found.left_out.items() if not is_made(name)}
    return found


def _like_source(root: Path, names: Iterable[str], sources: Sources, found: SourceSelection) -> set[str]:
    wanted = patterns(sources.include) if sources.include else None
    chosen = set()
    for name in names:
        if wanted is not None and wanted.match_file(name):
            chosen.add(name)
        elif is_source(name):
            if (size := _size(root / name)) > LARGEST_UNKNOWN_BYTES:
                found.left_out[name] = f"{size} bytes, and git does not know it"
            else:
                chosen.add(name)
        elif "." not in posixpath.basename(name) and (root / name).is_symlink() and (root / name).is_dir():
            chosen.add(name)  # imports may go through it
    return chosen


def _size(path: Path) -> int:
    try:
        found = path.lstat()
    except OSError:
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) else 0


def _in_runs(root: Path, names: set[str]) -> set[str]:
    """The names that lie in a run's directory, or in one of checkpoints."""
    marked = {posixpath.dirname(n) for n in names if posixpath.basename(n) in ("run.json", "job.json")}
    runs = set()
    for folder in marked:
        with suppress(OSError):
            if is_run({one.name for one in (root / folder).iterdir()}):
                runs.add(folder)

    def inside(name: str) -> bool:
        folder, _, _ = name.rpartition("/")
        if folder:
            return folder in runs or inside(folder)
        # A run may lie in the root itself, beside the source; a folder `config` may well be the user's.
        return "" in runs and (name in _OF_A_RUN or name in ("run.json", "status.json"))

    return {name for name in names if inside(name)}
