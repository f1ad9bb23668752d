"""Snapshot of the current source, and the script of this process."""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from torchrelay.errors import UsageError
from torchrelay.metadata.code.archive import MOST_FILES, SourceFile, SourceManifest, member_name, stays_within
from torchrelay.metadata.code.git import Provenance, provenance_of, repository
from torchrelay.metadata.code.selection import Root, Sources, select
from torchrelay.metadata.zip_reader import LIMIT_NAME
from torchrelay.records import dataclass

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
    """Read the source; `with_git` also reads its git metadata.

    Raises UsageError for roots that are not directories and for more than `sources.limit_bytes`.
    """
    roots = sources.labelled() if roots is None else roots
    paths: dict[str, tuple[Root, str]] = {}
    left_out: dict[str, str] = {}
    submodules: dict[str, str] = {}
    git: dict[str, Provenance] = {}
    for root in roots:
        with repository(root.path) as repo:
            found = select(root, sources, repo)
            if repo is not None and with_git:
                git[root.label] = provenance_of(repo)
        paths |= {_under(root, name): (root, name) for name in found.names}
        left_out |= {_under(root, name): why for name, why in found.left_out.items()}
        submodules |= {_under(root, name): commit for name, commit in found.submodules.items()}
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


def _under(root: Root, name: str) -> str:
    return f"{root.label}/{name}" if root.label else name


def _read(
    paths: Mapping[str, tuple[Root, str]], left_out: dict[str, str], limit: int
) -> tuple[SourceManifest, dict[str, bytes]]:
    links: dict[str, str] = {}
    sizes: dict[str, int] = {}
    for name, (root, rest) in sorted(paths.items()):
        try:
            if why := _unfit(name):
                left_out[name] = why
            elif (root.path / rest).is_symlink():
                links[name] = _target(root, rest)
            elif stat.S_ISREG((found := (root.path / rest).lstat()).st_mode):
                sizes[name] = found.st_size
        except FileNotFoundError:
            continue  # a deleted file that is still tracked
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


def _unfit(name: str) -> str:
    try:
        name.encode()
    except UnicodeEncodeError:
        return "its name is not valid UTF-8"
    if len(member_name(name)) > LIMIT_NAME:
        return "its name is too long"
    return "its name has a backslash" if "\\" in name else ""


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
    if not path.is_file() or _is_installed(path):
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


def _is_installed(path: Path) -> bool:
    """Return True for installed programs, such as test runners."""
    of_others = not _PACKAGES.isdisjoint(path.parts)  # also of another environment
    return of_others or any(path.is_relative_to(place) for place in (*_installations(), *_OWN))


@cache
def _installations() -> tuple[Path, ...]:
    """Return the directories of this interpreter's modules and programs."""
    import sysconfig  # needed once the first epoch runs, not at the start

    places = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")}
    return tuple(Path(place).resolve() for place in places if place)
