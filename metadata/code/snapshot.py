"""Snapshot of the current source: its selection below a directory, its bytes, and the script of this process.

In a git repository: tracked files, and untracked files that are not ignored and look like source. Otherwise:
files that look like source, by suffix and size, and are not ignored by a `.gitignore`. Never runs or compiled
files.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import stat
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass as python_dataclass
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from torchrelay.errors import UsageError
from torchrelay.metadata.code.archive import MOST_FILES, SourceFile, SourceManifest, member_name, stays_within
from torchrelay.metadata.code.git import Listing, Provenance, Repository, listed, provenance_of, repository
from torchrelay.metadata.zip_reader import LIMIT_NAME
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


def _walked(root: Path) -> set[str]:
    """Return the files below a root that are not ignored, without following links; raises UsageError."""
    names: set[str] = set()
    pending: list[tuple[str, tuple[tuple[str, GitIgnoreSpec], ...]]] = [("", ())]
    seen = 0
    while pending:
        folder, rules = pending.pop()
        try:
            entries = list(os.scandir(root / folder))
        except OSError:
            continue  # unreadable directories cannot contain the run's source
        seen += len(entries)
        if seen > MOST_ENTRIES:
            raise UsageError(
                f"{root} has more than {MOST_ENTRIES} files and is not in a git repository: name "
                "the directories of the source (code=[...])"
            )
        own = {entry.name for entry in entries}
        if folder and (is_run(own) or "pyvenv.cfg" in own):
            continue
        with suppress(OSError):
            path = root / folder / _RULES
            if _RULES in own and path.stat().st_size <= _LARGEST_RULES:
                rules = (*rules, (folder, patterns(path.read_text(errors="replace").splitlines())))
        for entry in entries:
            slash = "/" if entry.is_dir(follow_symlinks=False) else ""
            name = f"{folder}{entry.name}{slash}"
            if is_junk(entry.name) or _ignored(name, rules):
                continue
            if slash:
                pending.append((name, rules))
            else:
                names.add(name)
    return names


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
    """A directory of source, below `label` in the archive; `only` names its files if it is not a project."""

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
        named = dict(self.roots) if isinstance(self.roots, Mapping) else {}
        if wrong := [one for one in named if not (isinstance(one, str) and one.isidentifier())]:
            raise UsageError(f"{wrong[0]!r} is not a valid name of a source: use letters, digits and _")
        for path in () if named else self.roots:
            label = "" if len(self.roots) == 1 else _directory(path).name
            if label in named:
                raise UsageError(
                    f"two sources are called {label}: name them, code={{'first': {str(path)!r}, ...}}"
                )
            named[label] = path
        roots = [Root(label, _directory(path)) for label, path in named.items()]
        for inner, outer in permutations(roots, 2):
            if inner.path.is_relative_to(outer.path):
                raise UsageError(
                    f"the source {inner.path} is inside the source {outer.path}: give only the outer one"
                )
        return tuple(sorted(roots, key=lambda root: root.label))


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


def select(
    root: Root, sources: Sources, repo: Repository | None
) -> tuple[set[str], dict[str, str], dict[str, str]]:
    """Return the names of the source below a root, why others were left out, and commits of submodules.

    Raises UsageError for invalid patterns and trees that are too large.
    """
    left_out: dict[str, str] = {}
    if root.only is not None:
        return set(root.only), left_out, {}
    listing = listed(repo) if repo is not None else None
    if listing is None or not (listing.tracked or listing.untracked):
        listing = Listing(untracked=_walked(root.path))  # no git, or a folder ignored by the outer repository
    untracked = {name for name in listing.untracked if not is_junk(name)}
    names = listing.tracked | _like_source(root.path, untracked, sources, left_out)
    # Names inside run or checkpoint directories.
    runs = set()
    for folder in {posixpath.dirname(n) for n in names if posixpath.basename(n) in ("run.json", "job.json")}:
        with suppress(OSError):
            if is_run(set(os.listdir(root.path / folder))):
                runs.add(folder)

    def inside(name: str) -> bool:
        folder, _, _ = name.rpartition("/")
        if folder:
            return folder in runs or inside(folder)
        # A run may be in the root itself, beside the source; a folder `config` may be the user's.
        return "" in runs and (name in _OF_A_RUN or name in ("run.json", "status.json"))

    names -= {name for name in names if inside(name)}
    if sources.exclude:
        unwanted = patterns(sources.exclude)
        names = {name for name in names if not unwanted.match_file(name)}
    names = {name for name in names if not is_made(name)}
    return names, {name: why for name, why in left_out.items() if not is_made(name)}, listing.submodules


def _like_source(root: Path, names: set[str], sources: Sources, left_out: dict[str, str]) -> set[str]:
    wanted = patterns(sources.include) if sources.include else None
    chosen = set()
    for name in names:
        if wanted is not None and wanted.match_file(name):
            chosen.add(name)
        elif is_source(name):
            with suppress(OSError):
                status = (root / name).lstat()
                if stat.S_ISREG(status.st_mode) and status.st_size > LARGEST_UNKNOWN_BYTES:
                    left_out[name] = f"{status.st_size} bytes, and not tracked by git"
                    continue
            chosen.add(name)
        elif "." not in posixpath.basename(name) and (root / name).is_symlink() and (root / name).is_dir():
            chosen.add(name)  # imports may go through it
    return chosen


_NAMED = 5
GONE = ""
"""Digest of an unreadable file."""


@dataclass(frozen=True)
class Snapshot:
    """Source with its bytes; `left_out` has the reasons for excluded files."""

    manifest: SourceManifest
    contents: Mapping[str, bytes]
    roots: tuple[Root, ...]
    left_out: Mapping[str, str]
    submodules: Mapping[str, str]
    git: Mapping[str, Provenance]

    def name_of(self, path: Path) -> str | None:
        """Return the archive name of a path below a root; empty for the root at the top."""
        path = place_of(path)
        for root in self.roots:
            if path.is_relative_to(root.path):
                inside = path.relative_to(root.path).as_posix()
                return "/".join(part for part in (root.label, inside) if part not in ("", "."))
        return None


def take(sources: Sources, *, roots: tuple[Root, ...] | None = None, with_git: bool = True) -> Snapshot:
    """Read the source, `with_git` also its git metadata; UsageError for more than `sources.limit_bytes`."""
    roots = sources.labelled() if roots is None else roots
    paths: dict[str, tuple[Root, str]] = {}
    left_out: dict[str, str] = {}
    submodules: dict[str, str] = {}
    git: dict[str, Provenance] = {}
    for root in roots:
        with repository(root.path) as repo:
            names, others, commits = select(root, sources, repo)
            if repo is not None and with_git:
                git[root.label] = provenance_of(repo)
        above = f"{root.label}/" if root.label else ""
        paths |= {above + name: (root, name) for name in names}
        left_out |= {above + name: why for name, why in others.items()}
        submodules |= {above + name: commit for name, commit in commits.items()}
    manifest, contents = _read(paths, left_out, sources.limit_bytes)
    return Snapshot(manifest, contents, roots, left_out, submodules, git)


def digests(roots: Iterable[Root], names: Iterable[str]) -> dict[str, str]:
    """Return the current digests of archive names: a SHA-256, `-> target`, or GONE."""
    by_label, found = {root.label: root for root in roots}, {}
    for name in names:
        label, _, rest = name.partition("/") if "" not in by_label else ("", "", name)
        root = by_label.get(label)
        found[name] = GONE if root is None else digest_in(root, rest)
    return found


def of_manifest(manifest: SourceManifest) -> dict[str, str]:
    """Return the digests of a manifest, like `digests`."""
    links = {name: f"-> {target}" for name, target in manifest.links.items()}
    return {name: one.sha256 for name, one in manifest.files.items()} | links


def place_of(path: Path) -> Path:
    """Return the location of a file without following the last link, which is source itself."""
    return path.parent.resolve() / path.name if path.is_symlink() and not path.is_dir() else path.resolve()


def digest_in(root: Root, rest: str) -> str:
    """Return the current digest of a file of a root, as in `digests`."""
    path = root.path / rest
    try:
        if path.is_symlink():
            return f"-> {_target(root, rest)}"
        return hashlib.sha256(_bytes_of(path)).hexdigest()
    except (OSError, ValueError):
        return GONE


def _read(
    paths: Mapping[str, tuple[Root, str]], left_out: dict[str, str], limit: int
) -> tuple[SourceManifest, dict[str, bytes]]:
    links: dict[str, str] = {}
    sizes: dict[str, int] = {}
    for name, (root, rest) in sorted(paths.items()):
        try:
            if len(member_name(name)) > LIMIT_NAME:
                left_out[name] = "its name is too long"
            elif "\\" in name:
                left_out[name] = "its name has a backslash"
            elif (root.path / rest).is_symlink():
                links[name] = _target(root, rest)
            elif stat.S_ISREG((found := (root.path / rest).lstat()).st_mode):
                sizes[name] = found.st_size
        except FileNotFoundError:
            continue  # a deleted file that is still tracked
        except UnicodeEncodeError:
            left_out[name] = "its name is not valid UTF-8"
        except (OSError, ValueError) as error:
            left_out[name] = str(getattr(error, "strerror", None) or error)
    _check_size(sizes, limit)
    contents: dict[str, bytes] = {}
    for name in sizes:
        root, rest = paths[name]
        try:
            contents[name] = _bytes_of(root.path / rest)
        except (OSError, ValueError) as error:
            left_out[name] = str(getattr(error, "strerror", None) or error)
    _check_size({name: len(data) for name, data in contents.items()}, limit)  # files may have grown
    files = {name: SourceFile(hashlib.sha256(data).hexdigest(), len(data)) for name, data in contents.items()}
    return SourceManifest(files, links), contents


def _target(root: Root, name: str) -> str:
    """Return the target of a link relative to its folder; raises ValueError if it is outside the root."""
    path = root.path / name
    target = str(path.readlink())
    if target.startswith("/"):
        target = os.path.relpath(target, path.parent)
    inside = path.resolve().is_relative_to(root.path)
    if not stays_within(name, target) or not inside:
        raise ValueError("a link that leads out of the source")
    return target


def _bytes_of(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("not a regular file")
        return file.read()


def _check_size(sizes: Mapping[str, int], limit: int) -> None:
    total = sum(sizes.values())
    if total <= limit and len(sizes) <= MOST_FILES:
        return
    largest: list[Any] = sorted(sizes.items(), key=lambda one: (-one[1], one[0]))[:_NAMED]
    named = ", ".join(f"{name} ({_megabytes(size)})" for name, size in largest)
    raise UsageError(
        f"the source has {len(sizes)} files of {_megabytes(total)}, more than the limit of "
        f"{_megabytes(limit)} and {MOST_FILES} files; the largest are {named}: exclude files by "
        ".gitignore or code=Sources([...], exclude=[...], limit_bytes=...), or use code=False"
    )


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


_OWN = [
    Path(__file__).resolve().parents[2] / room
    for room in ("jobs", "metadata", "checkpoint", "models", "runners", "tools", "src/torchrelay")
]
"""Programs of this package."""
_PACKAGES = frozenset({"site-packages", "dist-packages"})
_TOO_WIDE = 1
"""Directories with at most this many components are not projects."""


@dataclass(frozen=True)
class Script:
    """A program file and its import directory."""

    root: Root
    name: str


def main_script() -> Script | None:
    """Return the user's file that Python runs; for `-m a.b` with the directory of `a`."""
    main = sys.modules.get("__main__")
    file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if not isinstance(file, str):
        return None
    path = Path(file).resolve()
    # An installed program, such as a test runner, also of another environment.
    installed = any(path.is_relative_to(place) for place in (*_installations(), *_OWN))
    if not path.is_file() or installed or not _PACKAGES.isdisjoint(path.parts):
        return None
    depth = spec.name.count(".") if spec is not None else 0
    if depth >= len(path.parents):
        return None
    folder = path.parents[depth]
    name = path.relative_to(folder).as_posix()
    # home, root and temporary directories contain more than the source of a run
    shared = {Path(tempfile.gettempdir()).resolve()}
    with suppress(RuntimeError):
        shared.add(Path.home().resolve())
    alone = len(folder.parts) <= _TOO_WIDE or folder in shared
    return Script(Root("", folder, (name,) if alone else None), name)


@cache
def _installations() -> tuple[Path, ...]:
    """Return the directories of this interpreter's modules and programs."""
    import sysconfig  # needed once the first epoch runs, not at the start

    places = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")}
    return tuple(Path(place).resolve() for place in places if place)
