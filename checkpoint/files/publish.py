"""Create a file or directory at a user's path or URL, complete and durable or not at all.

Temporary names contain the target and the process, so that a later writer can delete leftovers without a
lock. A process that visibly ended writes nothing more. One that cannot be seen from here (another host, an
earlier boot, another container) counts as gone when its files have not changed for a week.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from torchrelay.checkpoint.format.canonical_json import sha256
from torchrelay.checkpoint.log.lease import WriterIdentity, process_start
from torchrelay.checkpoint.storage.base import PRIVATE
from torchrelay.checkpoint.storage.local import LocalStorage, give_name
from torchrelay.checkpoint.storage.open import FILE, is_remote, object_at, shown
from torchrelay.errors import DamagedError, FormatError, RelayError, StorageError, UsageError
from torchrelay.jobs.runtime import check_target, local_directory
from torchrelay.metadata.fs import sync_directory

if TYPE_CHECKING:
    from torchrelay.checkpoint.storage.object_store import ObjectStorage

Where = str | os.PathLike[str]
_PIECE_BYTES = 32 << 20
UNSEEN_SECS = 7 * 24 * 3600.0
"""Seconds without a change after which a writer that cannot be seen counts as gone."""
_DIGITS = 12
_NAME = re.compile(
    rf"{re.escape(PRIVATE)}([0-9a-f]+)-([0-9a-f]+)-([0-9]{{1,9}})-([0-9]{{1,19}})-[0-9a-f]+(?:\..*)?"
)


def _this_process() -> tuple[str, int, str]:
    """Process namespace ("0" if unknown), pid and start time, as in temporary names."""
    me = WriterIdentity.here("")
    known = bool(me.boot_id and me.pid_namespace and me.pid_start)
    return _digest(f"{me.boot_id} {me.pid_namespace}") if known else "0", me.pid, me.pid_start or "0"


def temporary_beside(path: Path) -> Path:
    """A hidden temporary name for the future `path`; deletes leftovers of dead writers."""
    sweep(path)
    place, pid, start = _this_process()
    return path.with_name(
        f"{PRIVATE}{_digest(path.name)}-{place}-{pid}-{start}-{secrets.token_hex(6)}{path.suffix}"
    )


def sweep(path: Path) -> None:
    """Delete leftovers of dead writers of `path`; errors are ignored."""
    here, mine = _this_process()[0], _digest(path.name)
    names: list[str] = []
    with suppress(OSError):
        names = os.listdir(path.parent)
    for name in names:
        found = _NAME.fullmatch(name)
        if found is None or found[1] != mine:
            continue
        left, now = path.with_name(name), process_start(int(found[3]))
        seen = found[2] == here != "0"
        if (now is None or now not in ("", found[4])) if seen else _is_old(left):
            _delete(left)


def _is_old(path: Path) -> bool:
    """Whether nothing of it has changed for long."""
    with suppress(OSError):
        newest = max(one.lstat().st_mtime for one in (path, *path.rglob("*")))
        return time.time() - newest > UNSEEN_SECS
    return False


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with suppress(OSError):
        path.unlink()


def _digest(text: str) -> str:
    return sha256(os.fsencode(text))[:_DIGITS]


def as_written(where: Where, what: str) -> Path | str:
    """The path or URL as given, no `~` expanded. Raises UsageError if invalid."""
    if not isinstance(where, (str, os.PathLike)) or not isinstance(os.fspath(where), str):
        raise UsageError(f"invalid path {' '.join(repr(where).split()):.80}: expected {what}, as str or Path")
    if is_remote(where):
        return str(where)
    text = os.fspath(where).removeprefix(FILE)
    if not text.strip() or "\0" in text or text.endswith("/") or "://" in text:
        raise UsageError(f"{where!r} names no file: give {what}")
    return Path(text).absolute()


def expanded(where: Where, what: str) -> Path | str:
    """The same with `~` expanded, as for run directories."""
    if is_remote(where):
        return str(where).rstrip("/")
    return local_directory(where.removeprefix(FILE) if isinstance(where, str) else where, what)


def check_free(place: Path | str, *, overwrite: bool = False, directory: bool = False) -> None:
    """Raise UsageError for a path or URL that exists. A directory is never replaced."""
    if isinstance(place, str):
        storage, name = object_at(place, "the target")
        if storage.list(name) or (storage.stat(name) is not None and (directory or not overwrite)):
            raise _taken(f"{storage.url}/{name}")
        return
    check_target(place)
    if place.is_symlink() or place.exists():
        if directory and place.is_dir() and not any(place.iterdir()):
            return
        if directory or not place.is_file():
            raise UsageError(f"{place} exists already and is never replaced: choose another name")
        if not overwrite:
            raise _taken(place)


def _taken(place: Path | str) -> UsageError:
    return UsageError(f"{place} exists already: choose another name, or overwrite=True (--overwrite)")


def publish(
    place: Path | str,
    write: Callable[[Path], object],
    *,
    overwrite: bool = False,
    directory: bool = False,
    several: bool = False,
) -> Path | str:
    """Have `write` make a file or directory that then appears as `place`, complete and durable; its name.

    `write` gets a hidden name beside a path, or in a temporary directory for a URL. With `several` it gets a
    directory, for a file with the name of `place` and others that it refers to, which are published first. In
    a store, indexes of a directory are sent last. Raises UsageError if the name exists, StorageError if the
    disk fails; nothing is left then. Leftovers of a killed writer of this path are deleted.
    """
    check_free(place, overwrite=overwrite, directory=directory)
    name = place if isinstance(place, Path) else shown(place)
    try:
        if isinstance(place, str):
            _send(place, write, overwrite=overwrite, directory=directory, several=several)
            return name
        parent, temporary = LocalStorage(place.parent), temporary_beside(place)
        try:
            parent.mkdir("")
            if directory or several:
                temporary.mkdir()
            write(temporary)
            for one in [*temporary.rglob("*"), temporary]:
                if one.is_dir():
                    sync_directory(one)
                    continue
                with one.open("rb") as file:
                    os.fsync(file.fileno())
            if directory:
                temporary.rename(place)
            elif several:
                _name_several(temporary, place, overwrite=overwrite)
            else:
                _name(temporary, place, overwrite=overwrite)
            parent.sync_dir("")
        finally:
            _delete(temporary)
    except FileExistsError:
        raise _taken(name) from None
    except RelayError:
        raise
    except OSError as error:
        raise StorageError(f"cannot write {name}: {error.strerror or error}") from error
    return name


def _name(temporary: Path, place: Path, *, overwrite: bool) -> None:
    """Give a file its name: a link never replaces, a rename does."""
    if overwrite:
        temporary.replace(place)
    else:
        give_name(temporary, place)


def _name_several(folder: Path, place: Path, *, overwrite: bool) -> None:
    others = [one.rename(place.with_name(one.name)) for one in folder.iterdir() if one.name != place.name]
    try:
        _name(folder / place.name, place, overwrite=overwrite)
    except OSError:
        for one in others:
            one.unlink()
        raise


def _send(
    url: str, write: Callable[[Path], object], *, overwrite: bool, directory: bool, several: bool
) -> None:
    storage, name = object_at(url, "the target")
    with tempfile.TemporaryDirectory(prefix="torchrelay-") as scratch:
        made = Path(scratch) / "made"
        if directory or several:
            made.mkdir()
        write(made)
        files = sorted(one for one in made.rglob("*") if one.is_file()) or [made]
        # An index after the files in it, the log of an epoch after its files.
        files.sort(key=lambda one: one.suffix == ".json" or one.name == ".metadata")
        files.sort(key=lambda one: one.name == name if several else one.parent.name == "log")
        for file in files:
            path = "/".join([*([] if several else [name]), *file.relative_to(made).parts])
            with file.open("rb") as data:
                storage.put_file(path, data, file.stat().st_size, create=path == name and not overwrite)


@contextmanager
def fetched(place: Path | str, what: str) -> Iterator[Path]:
    """A path itself; for a URL a local copy, whose errors name the URL. Raises UsageError for nothing."""
    if isinstance(place, Path):
        yield place
        return
    storage, name = object_at(place, what)
    with tempfile.TemporaryDirectory(prefix="torchrelay-") as scratch:
        copy = Path(scratch) / Path(name).name
        for path in _files(storage, name):
            target = copy.joinpath(*path.split("/")[1:])
            target.parent.mkdir(parents=True, exist_ok=True)
            size = storage.stat(path) or 0
            with target.open("xb") as file:
                for at in range(0, size, _PIECE_BYTES):
                    data = storage.read_range(path, at, _PIECE_BYTES)
                    if len(data) != min(_PIECE_BYTES, size - at):
                        raise StorageError(f"{storage.url}/{path} ended while it was read: try again")
                    file.write(data)
        if not copy.exists():
            raise UsageError(f"{storage.url}/{name} does not exist: give {what}")
        try:
            yield copy
        except (DamagedError, FormatError) as error:
            raise type(error)(str(error).replace(str(copy), f"{storage.url}/{name}")) from error


def _files(storage: ObjectStorage, path: str) -> Iterator[str]:
    if storage.stat(path) is not None:
        yield path
        return
    for name in storage.list(path):
        yield from _files(storage, f"{path}/{name}")
