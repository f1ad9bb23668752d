"""List the small files of a remote run with their versions, and download them within limits."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from torchrelay.checkpoint.storage.object_store import ObjectStorage
from torchrelay.errors import StorageError, UsageError
from torchrelay.metadata.fs import MAX_JSON_BYTES
from torchrelay.records import dataclass
from torchrelay.runners.remote_runs.names import DEEPEST, is_name, never_changes

_PIECE_BYTES = 4 << 20
_AT_ONCE_BYTES = 8 << 20
"""Files up to this size are one PUT from memory; longer ones are staged, so that their content is fixed."""
_SIDE_BY_SIDE = 8
_THREADS_MAY_SHARE = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "local", "file"})
_VERSIONS = ("ETag", "etag", "md5Hash", "content_md5", "generation", "mtime", "LastModified", "last_modified")
_TIMES = ("LastModified", "last_modified", "mtime", "modified", "updated", "created")
MOST_FILES = 20_000


@dataclass(frozen=True)
class Listed:
    """An object or a folder in a listing; `version` differs when the bytes may differ.

    `link`: a link, or neither file nor folder, in stores that have these. `modified` is in seconds since
    1970; it is None, and `version` empty, if the store does not report it.
    """

    name: str
    folder: bool
    size: int = 0
    version: str = ""
    modified: float | None = None
    link: bool = False
    coarse: bool = False
    """The version is a time in whole seconds, so bytes may change without a new version."""


class RunFiles(ObjectStorage):
    """Location of a run in a store. Raises StorageError, as the storage of checkpoints does."""

    @property
    def side_by_side(self) -> int:
        """Number of threads that may use the file system at a time."""
        return _SIDE_BY_SIDE if self._protocols & _THREADS_MAY_SHARE else 1

    def entries(self, path: str) -> list[Listed]:
        """List a folder; empty if it does not exist."""
        name = self._name(path)

        def look() -> list[Listed]:
            try:
                found = self.system.ls(name, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return []
            below = [one for one in found if str(one["name"]).rstrip("/").startswith(f"{name}/")]
            return [self._listed(one, str(one["name"]).rstrip("/")[len(name) + 1 :]) for one in below]

        return self._try("list", path, look)

    def _listed(self, entry: Mapping[str, Any], name: str) -> Listed:
        link = bool(entry.get("islink")) or entry.get("type") in ("link", "other")
        folder = entry.get("type") == "directory" and not link
        size = int(entry.get("size") or 0)
        first = next((name for name in _VERSIONS if entry.get(name) is not None), "")
        coarse = first == "mtime" and isinstance(entry["mtime"], int)
        return Listed(self._decoded(name), folder, size, _version(entry), _modified(entry), link, coarse)

    def version(self, path: str) -> str | None:
        """Return the version of an object; None if it does not exist."""
        name = self._name(path)

        def look() -> str | None:
            try:
                return _version(self.system.info(name))
            except FileNotFoundError:
                return None

        return self._try("look at", path, look)

    def walk(self, enter: Callable[[str], bool], folder: str = "") -> Iterator[tuple[str, Listed]]:
        """Yield all files below a folder, by name, in folders that `enter` accepts; at most MOST_FILES.

        Names that are not possible locally are yielded with the version "odd". Links are not followed.
        """
        left = [folder]
        count = 0
        while left:
            here = left.pop()
            for one in self.entries(here):
                name = f"{here}/{one.name}" if here else one.name
                if not is_name(one.name) or name.count("/") >= DEEPEST:
                    yield name, Listed(one.name, one.folder, version="odd")
                elif one.folder and enter(name):
                    left.append(name)
                elif not one.folder and (count := count + 1) <= MOST_FILES:
                    yield name, one

    def copy_into(self, path: str, file: IO[bytes], most: int) -> None:
        """Download the first `most` bytes of an object; FileNotFoundError if it does not exist."""
        at = 0
        while at < most:
            wanted = min(_PIECE_BYTES, most - at)
            data = self.read_range(path, at, wanted)
            file.write(data)
            at += len(data)
            if len(data) < wanted:
                return

    def put_as_it_is(self, path: str, local: Path) -> None:
        """Upload a file with its current size; OSError if it cannot be read."""
        descriptor = os.open(local, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise StorageError(f"{local} is not a regular file: remove it")
            if found.st_size <= _AT_ONCE_BYTES:
                self.replace(path, file.read(found.st_size))
                return
            staged, at = self.open_replacing(path), 0
            try:
                while at < found.st_size and (data := file.read(min(_PIECE_BYTES, found.st_size - at))):
                    staged.write_at(at, memoryview(data))
                    at += len(data)
                staged.sync_file()
            finally:
                staged.close()

    def each(self, work: Callable[[str], object], names: list[str]) -> None:
        """Call `work` for each name, in parallel if the store allows; raises the first error."""
        if self.side_by_side == 1 or len(names) < 2:
            for name in names:
                work(name)
            return
        with ThreadPoolExecutor(self.side_by_side, "torchrelay-run-files") as pool:
            for _ in pool.map(work, names):
                pass


def _version(entry: Mapping[str, Any]) -> str:
    """Return size and a value that the store changes with the bytes; for memory:// the creation time."""
    known = [str(entry[name]) for name in (*_VERSIONS, "created") if entry.get(name) is not None]
    return f"{entry.get('size')} {known[0]}" if known else ""


def _modified(entry: Mapping[str, Any]) -> float | None:
    """Return the modification time in seconds since 1970, if known."""
    for name in _TIMES:
        found = entry.get(name)
        if isinstance(found, datetime):
            return found.timestamp()
        if isinstance(found, (int, float)):
            return float(found)
    return None


MOST_BYTES = 256 << 20
"""Largest file to download; longer ones are left out with a message."""
IN_ALL_BYTES = 4 << 30
_SHOWN = 60

Keep = Callable[[str, Path, Path], bool]
"""Decides if the local file of this name is kept, given its path and that of the downloaded one."""


def found_in(files: RunFiles, wanted: Callable[[str], bool]) -> tuple[dict[str, Listed], dict[str, str]]:
    """Return the wanted files of a run by name, and the files left out with reasons."""
    found: dict[str, Listed] = {}
    left_out: dict[str, str] = {}
    total = 0
    # A folder is listed if a file in it may be wanted.
    for name, one in files.walk(lambda folder: wanted(f"{folder}/any.csv")):
        if one.version == "odd":
            left_out[printable(name)] = "its name is not possible as a local file name"
        elif one.link and wanted(name):
            left_out[printable(name)] = "it is a link or not a regular file"
        elif wanted(name):
            most = limit_of(name)
            if one.size > most and not name.endswith(".json"):
                left_out[printable(name)] = f"it has {one.size:,} bytes, more than {most:,}"
            elif total + min(one.size, most) > IN_ALL_BYTES:
                left_out[printable(name)] = "the files of the run are too large in total"
            else:
                total += min(one.size, most)
                found[name] = one
    return found, left_out


def unlisted(files: RunFiles, names: Collection[str]) -> dict[str, Listed]:
    """Return those of some names that exist although they were not listed: listings may lag."""
    there = {name: files.stat(name) for name in names}
    return {name: Listed(name, folder=False, size=size) for name, size in there.items() if size is not None}


def limit_of(name: str) -> int:
    """Return the bytes to download of a file; of JSON one more than allowed, so that readers notice."""
    return MAX_JSON_BYTES + 1 if name.endswith(".json") else MOST_BYTES


def bring(
    files: RunFiles, found: Mapping[str, Listed], into: Path, keep: Keep | None = None
) -> tuple[dict[str, str], dict[str, str]]:
    """Download files into a directory, each atomically; local links are never followed.

    Returns the version of each name, and the reason for each file that is left out because it was deleted
    meanwhile. Raises StorageError, and UsageError if a link blocks a path.
    """
    versions, left_out = dict[str, str](), dict[str, str]()

    def one(name: str) -> None:
        target = place_for(into, name)
        if never_changes(name) and not target.is_symlink() and _size(target) == found[name].size:
            versions[name] = found[name].version
            return
        temporary = into / f".tmp-{secrets.token_hex(6)}"
        try:
            with open(temporary, "xb") as file:
                files.copy_into(name, file, limit_of(name))
            if keep is None or not keep(name, target, temporary):
                temporary.replace(target)
            versions[name] = found[name].version
        except FileNotFoundError:
            left_out[printable(name)] = "it was deleted meanwhile"
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(f"cannot write {target}: {error.strerror}; free some space") from error
        finally:
            with suppress(OSError):
                temporary.unlink()

    files.each(one, list(found))
    return versions, left_out


def place_for(root: Path, name: str) -> Path:
    """Return the path for a name and create its folders. Raises UsageError if a link blocks it."""
    path = root
    for part in name.split("/")[:-1]:
        path = path / part
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            raise UsageError(f"{path} is a link or a file instead of a folder of the run: remove it")
        try:
            path.mkdir(exist_ok=True)
        except OSError as error:
            raise StorageError(f"cannot create {path}: {error.strerror}") from error
    return root / name


def printable(name: str) -> str:
    """Escape and shorten a name of a listing for messages."""
    return name.encode("unicode_escape").decode()[:_SHOWN]


def _size(path: Path) -> int:
    """Return the size of a file; -1 if it does not exist."""
    try:
        return path.lstat().st_size
    except OSError:
        return -1
