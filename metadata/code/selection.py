"""Select the source files below a directory.

In a git repository: tracked files, and untracked files that are not ignored and look like source. Otherwise:
files that look like source, by suffix and size, and are not ignored by a `.gitignore`. Never runs or compiled
files.
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
"""Largest untracked file that counts as source."""

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
    """Return True if an untracked file looks like source, by its name."""
    last = name.rpartition("/")[2]
    stem, dot, suffix = last.rpartition(".")
    return last in _NAMES or (bool(stem and dot) and f".{suffix.lower()}" in _SUFFIXES)


def is_junk(name: str) -> bool:
    """Return True for an untracked file or folder that is hidden or made by tools."""
    return any(part.startswith(".") or part in _JUNK for part in name.split("/"))


def is_made(name: str) -> bool:
    """Return True for a file made by running the source, excluded even if tracked."""
    return name.endswith((".pyc", ".pyo")) or "__pycache__" in name.split("/")


MOST_ENTRIES = 20_000
"""Limit on files; larger trees are probably home directories."""
_RULES = ".gitignore"
_LARGEST_RULES = 1 << 20


class Walk:
    """A traversal of a tree; `names` are the files that are not ignored. Does not follow links."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.names: set[str] = set()
        self._seen = 0

    def run(self) -> set[str]:
        """Traverse; raises UsageError for a tree that is too large."""
        self._enter("", ())
        return self.names

    def _enter(self, folder: str, above: tuple[tuple[str, GitIgnoreSpec], ...]) -> None:
        try:
            with os.scandir(self.root / folder) as found:
                entries = sorted(found, key=lambda entry: entry.name)
        except OSError:
            return  # unreadable directories cannot contain the run's source
        self._seen += len(entries)
        if self._seen > MOST_ENTRIES:
            raise UsageError(
                f"{self.root} has more than {MOST_ENTRIES} files and is not in a git repository: name "
                "the directories of the source (code=[...])"
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
    """Return True if a directory with these entries is a run or checkpoint directory."""
    if {"run.json", "checkpoints"} <= names:
        return True
    return "log" in names and len(names & {"job.json", "data", "writer.json"}) > 1


def patterns(lines: Sequence[str]) -> GitIgnoreSpec:
    """Parse patterns in `.gitignore` syntax; raises UsageError for an invalid one."""
    from pathspec import GitIgnoreSpec

    try:
        return GitIgnoreSpec.from_lines(lines)
    except ValueError as error:
        raise UsageError(f"invalid pattern: {error}") from None


def _ignored(name: str, rules: tuple[tuple[str, GitIgnoreSpec], ...]) -> bool:
    """Return True if ignored; the innermost file with a matching rule decides."""
    for folder, spec in reversed(rules):
        said = spec.check_file(name[len(folder) :]).include
        if said is not None:
            return said
    return False


LIMIT_BYTES = 32 << 20


@python_dataclass(frozen=True)
class Root:
    """A directory of source; its files are below `label` in the archive, or at the top if that is empty.

    `only` names the files to use if the directory as a whole is not a project.
    """

    label: str
    path: Path
    only: tuple[str, ...] | None = None


@python_dataclass(frozen=True)
class Sources:
    """Selection of the source of a run.

    Args:
        roots: Directories, or a mapping of names to directories such as `{"app": ".", "lib": "../lib"}`. The
            files of a single directory are at the top of the archive, others below the names.
        exclude: Patterns in `.gitignore` syntax, relative to each root.
        include: Patterns of untracked files to add that do not look like source.
        limit_bytes: Largest total size; more is an error.
        git_ref: Also commit the files as `refs/torchrelay/<code id>` in each root's repository, without
            changing its branches or index.

    Raises:
        UsageError: An argument is invalid.

    Example:
        JobRunner(job, "runs/a", code=Sources([".", "../lib"], exclude=["data/"]))
    """

    roots: Sequence[str | Path] | Mapping[str, str | Path]
    exclude: Sequence[str] = ()
    include: Sequence[str] = ()
    limit_bytes: int = LIMIT_BYTES
    git_ref: bool = False

    def __post_init__(self) -> None:
        for name, value in (("exclude", self.exclude), ("include", self.include), ("roots", self.roots)):
            if isinstance(value, (str, os.PathLike)):
                raise UsageError(f"Sources({name}={str(value)!r}) is a str: expected a list")
        if type(self.limit_bytes) is not int or self.limit_bytes < 1:
            raise UsageError(
                f"Sources(limit_bytes={self.limit_bytes!r}) is invalid: expected at least 1 byte"
            )
        if not self.roots:
            raise UsageError("Sources has no roots: expected the directories of the source")

    def labelled(self) -> tuple[Root, ...]:
        """Return the absolute roots, each checked to be a directory; raises UsageError."""
        roots = [Root(label, _directory(path)) for label, path in self._named().items()]
        for inner in roots:
            for outer in roots:
                if inner is not outer and inner.path.is_relative_to(outer.path):
                    raise UsageError(
                        f"the source {inner.path} is inside the source {outer.path}: give only the outer one"
                    )
        return tuple(sorted(roots, key=lambda root: root.label))

    def _named(self) -> dict[str, str | Path]:
        if isinstance(self.roots, Mapping):
            for label in self.roots:
                if not (isinstance(label, str) and label.isidentifier()):
                    raise UsageError(f"{label!r} is not a valid name of a source: use letters, digits and _")
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
"""Values of `code=` of JobRunner besides None."""


def sources_of(code: Any) -> Sources:
    """Convert `code=`; raises UsageError for invalid values."""
    if isinstance(code, Sources):
        return code
    if isinstance(code, (str, os.PathLike)):
        return Sources([Path(code)])
    if isinstance(code, Mapping):
        return Sources(dict(code))
    if isinstance(code, Sequence) and all(isinstance(one, (str, os.PathLike)) for one in code):
        return Sources([Path(one) for one in code])
    raise UsageError(
        f"invalid code={code!r:.80}: expected None (the script's directory), False (nothing is archived), "
        "directories, or torchrelay.Sources(...)"
    )


def _directory(path: str | Path) -> Path:
    try:
        found = Path(path).resolve()
        if found.is_dir():
            return found
    except (OSError, RuntimeError, ValueError) as error:
        raise UsageError(f"the source {str(path)!r} cannot be accessed: {error}") from None
    raise UsageError(f"the source {path} is not a directory: expected the directories of the source")


_OF_A_RUN = ("checkpoints", "code", "lineage", "logs")


@dataclass
class SourceSelection:
    """Selected names relative to the root, and the reasons why others were excluded."""

    names: set[str] = field(default_factory=set)
    left_out: dict[str, str] = field(default_factory=dict)
    submodules: dict[str, str] = field(default_factory=dict)


def select(root: Root, sources: Sources, repo: Repository | None) -> SourceSelection:
    """Select the source below a root; raises UsageError for invalid patterns and trees that are too large."""
    if root.only is not None:
        return SourceSelection(set(root.only))
    found = SourceSelection()
    listing = listed(repo) if repo is not None else None
    if listing is not None and (listing.tracked or listing.untracked):
        found.submodules = listing.submodules
        untracked = {name for name in listing.untracked if not is_junk(name)}
        names = listing.tracked | _like_source(root.path, untracked, sources, found)
    else:  # no git, or a folder ignored by the outer repository
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
                found.left_out[name] = f"{size} bytes, and not tracked by git"
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
    """Return the names inside run or checkpoint directories."""
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
        # A run may be in the root itself, beside the source; a folder `config` may be the user's.
        return "" in runs and (name in _OF_A_RUN or name in ("run.json", "status.json"))

    return {name for name in names if inside(name)}
