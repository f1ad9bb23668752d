"""The small files of a run in a store: listed with their versions, downloaded within bounds, put whole."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import field
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
"""Up to here a file is one PUT from memory; a longer one is staged, so that it is put as it was."""
_SIDE_BY_SIDE = 8
_THREADS_MAY_SHARE = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "local", "file"})
_VERSIONS = ("ETag", "etag", "md5Hash", "content_md5", "generation", "mtime", "LastModified", "last_modified")
_TIMES = ("LastModified", "last_modified", "mtime", "modified", "updated", "created")
MOST_FILES = 20_000


@dataclass(frozen=True)
class Listed:
    """An object, or a folder, as a listing tells it; `version` is another one when the bytes may be.

    `link`: it is a link, or neither file nor folder, of a store that has such.
    `modified` is in seconds since 1970; None, as an empty `version`, where the store does not say.
    """

    name: str
    folder: bool
    size: int = 0
    version: str = ""
    modified: float | None = None
    link: bool = False
    coarse: bool = False
    """The version is a time in whole seconds: within one the bytes may change without it."""


class RunFiles(ObjectStorage):
    """A run's place in a store. Raises StorageError, as the storage of checkpoints does."""

    @property
    def side_by_side(self) -> int:
        """How many threads may use the file system at a time."""
        return _SIDE_BY_SIDE if self._protocols & _THREADS_MAY_SHARE else 1

    def entries(self, path: str) -> list[Listed]:
        """What lies in a folder; empty where there is none."""
        name = self._name(path)

        def look() -> list[Listed]:
            try:
                found = self.system.ls(name, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return []
            below = [one for one in found if str(one["name"]).rstrip("/").startswith(f"{name}/")]
            return [self._listed(one, str(one["name"]).rstrip("/")[len(name) + 1 :]) for one in below]

        return self._try("list", path, look)

    def _listed(self, told: Mapping[str, Any], name: str) -> Listed:
        link = bool(told.get("islink")) or told.get("type") in ("link", "other")
        folder = told.get("type") == "directory" and not link
        size = int(told.get("size") or 0)
        first = next((name for name in _VERSIONS if told.get(name) is not None), "")
        coarse = first == "mtime" and isinstance(told["mtime"], int)
        return Listed(self._decoded(name), folder, size, _version(told), _modified(told), link, coarse)

    def version(self, path: str) -> str | None:
        """The version of one object; None where there is none."""
        name = self._name(path)

        def look() -> str | None:
            try:
                return _version(self.system.info(name))
            except FileNotFoundError:
                return None

        return self._try("look at", path, look)

    def walk(self, enter: Callable[[str], bool], folder: str = "") -> Iterator[tuple[str, Listed]]:
        """All files below a folder by their names, of folders that `enter` wants; at most MOST_FILES.

        Names that could be no file here come as they were told, with a version of "odd". Links are none
        that are entered.
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
        """Bring the first `most` bytes of an object; FileNotFoundError where there is none (any more)."""
        at = 0
        while at < most:
            wanted = min(_PIECE_BYTES, most - at)
            data = self.read_range(path, at, wanted)
            file.write(data)
            at += len(data)
            if len(data) < wanted:
                return

    def put_as_it_is(self, path: str, local: Path) -> None:
        """Put a file as it is now, up to the size that it has now; OSError where it cannot be read."""
        descriptor = os.open(local, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise StorageError(f"{local} is no regular file: remove it")
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
        """Do `work` for each name, several at a time where the store allows; raises the first error."""
        if self.side_by_side == 1 or len(names) < 2:
            for name in names:
                work(name)
            return
        with ThreadPoolExecutor(self.side_by_side, "torchrelay-run-files") as pool:
            for _ in pool.map(work, names):
                pass


def _version(told: Mapping[str, Any]) -> str:
    """Size and whatever the store changes with the bytes; of memory:// the moment of creation."""
    known = [str(told[name]) for name in (*_VERSIONS, "created") if told.get(name) is not None]
    return f"{told.get('size')} {known[0]}" if known else ""


def _modified(told: Mapping[str, Any]) -> float | None:
    for name in _TIMES:
        found = told.get(name)
        if isinstance(found, datetime):
            return found.timestamp()
        if isinstance(found, (int, float)):
            return float(found)
    return None


MOST_BYTES = 256 << 20
"""Of one file; longer ones stay where they are, and that is said."""
IN_ALL_BYTES = 4 << 30
_SHOWN = 60

Keep = Callable[[str, Path, Path], bool]
"""Whether the file of this name that lies here stays, given it and the one that was brought."""


@dataclass
class Brought:
    """What was brought: the version of each name. `left_out` says of others why they were not."""

    versions: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def found_in(files: RunFiles, wanted: Callable[[str], bool]) -> tuple[dict[str, Listed], dict[str, str]]:
    """The wanted files of a run by their names, and what is left out of them, with the reason."""
    found: dict[str, Listed] = {}
    left_out: dict[str, str] = {}
    total = 0
    # A folder is looked into where a file in it may be wanted.
    for name, one in files.walk(lambda folder: wanted(f"{folder}/any.csv")):
        if one.version == "odd":
            left_out[printable(name)] = "its name could be no file's here"
        elif one.link and wanted(name):
            left_out[printable(name)] = "it is a link or no regular file"
        elif wanted(name):
            most = limit_of(name)
            if one.size > most and not name.endswith(".json"):
                left_out[printable(name)] = f"it has {one.size:,} bytes, more than {most:,}"
            elif total + min(one.size, most) > IN_ALL_BYTES:
                left_out[printable(name)] = "the files of the run are too large together"
            else:
                total += min(one.size, most)
                found[name] = one
    return found, left_out


def unlisted(files: RunFiles, names: Collection[str]) -> dict[str, Listed]:
    """Those of some names that are there all the same: a listing may lag behind what was written."""
    there = {name: files.stat(name) for name in names}
    return {name: Listed(name, folder=False, size=size) for name, size in there.items() if size is not None}


def limit_of(name: str) -> int:
    """How much is brought of a file. Of a note that is too long the reader shall see that it is."""
    return MAX_JSON_BYTES + 1 if name.endswith(".json") else MOST_BYTES


def bring(files: RunFiles, found: Mapping[str, Listed], into: Path, keep: Keep | None = None) -> Brought:
    """Bring what was found into a directory, each file whole or not at all; links there are never followed.

    A file that is gone meanwhile is left out. Raises StorageError, and UsageError for a link in the way.
    """
    brought = Brought()

    def one(name: str) -> None:
        target = place_for(into, name)
        if never_changes(name) and not target.is_symlink() and _size(target) == found[name].size:
            brought.versions[name] = found[name].version
            return
        temporary = into / f".tmp-{secrets.token_hex(6)}"
        try:
            with open(temporary, "xb") as file:
                files.copy_into(name, file, limit_of(name))
            if keep is None or not keep(name, target, temporary):
                temporary.replace(target)
            brought.versions[name] = found[name].version
        except FileNotFoundError:
            brought.left_out[printable(name)] = "it was deleted meanwhile"
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(f"cannot write {target}: {error.strerror}; free some space") from error
        finally:
            with suppress(OSError):
                temporary.unlink()

    files.each(one, list(found))
    return brought


def place_for(root: Path, name: str) -> Path:
    """Where a file of this name belongs; its folders are made. UsageError for a link on the way."""
    path = root
    for part in name.split("/")[:-1]:
        path = path / part
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            raise UsageError(f"{path} is a link or a file where a folder of the run belongs: remove it")
        try:
            path.mkdir(exist_ok=True)
        except OSError as error:
            raise StorageError(f"cannot make {path}: {error.strerror}") from error
    return root / name


def printable(name: str) -> str:
    """A name of a listing as anybody can print it, cut where it is long."""
    return name.encode("unicode_escape").decode()[:_SHOWN]


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return -1
