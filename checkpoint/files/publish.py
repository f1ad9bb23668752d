"""From a user's path or URL to a new file there, whole and durable or not at all.

A name tells what is made and by which process, so that a later writer of the same file can clear up without
any lock: a process that is seen to be gone writes nothing more. Of one that cannot be seen from here (another
host, an earlier boot, another container) nothing is believed but that nothing of it has changed for a week.
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

from torchrelay.checkpoint.format.canonical_json import sha256
from torchrelay.checkpoint.log.lease import WriterIdentity, process_start
from torchrelay.checkpoint.storage.base import PRIVATE
from torchrelay.checkpoint.storage.object_store import ObjectStorage
from torchrelay.checkpoint.storage.open import is_remote, object_at
from torchrelay.errors import StorageError, UsageError
from torchrelay.jobs.runtime import check_target, local_directory
from torchrelay.records import dataclass

UNSEEN_SECS = 7 * 24 * 3600.0
"""So long nothing of a writer that cannot be seen has changed before it is taken for gone."""
_DIGITS = 12
_NAME = re.compile(rf"{re.escape(PRIVATE)}([0-9a-f]+)-([0-9a-f]+)-([0-9]{{1,9}})-([0-9]{{1,19}})-[0-9a-f]+")


@dataclass(frozen=True)
class Maker:
    """The process behind a name: where processes can be told apart (nothing if nowhere), pid, start."""

    place: str
    pid: int
    start: str

    @classmethod
    def here(cls) -> Maker:
        """The process that asks."""
        me = WriterIdentity.here("")
        known = bool(me.boot_id and me.pid_namespace and me.pid_start)
        return cls(_digest(f"{me.boot_id} {me.pid_namespace}") if known else "0", me.pid, me.pid_start or "0")

    def seen_from(self, other: Maker) -> bool:
        """Whether `other` can tell if this one lives."""
        return self.place == other.place != "0"

    def is_gone(self) -> bool:
        """Whether the process has ended; asked where it can be seen."""
        now = process_start(self.pid)
        return now is None or now not in ("", self.start)


def temporary_beside(path: Path) -> Path:
    """A new name for what is to become `path`, which listings hide; what dead writers left of it goes."""
    sweep(path)
    me = Maker.here()
    return path.with_name(
        f"{PRIVATE}{_digest(path.name)}-{me.place}-{me.pid}-{me.start}-{secrets.token_hex(6)}"
    )


def sweep(path: Path) -> None:
    """Delete what writers of `path` left that are gone; what cannot be deleted stays, in silence."""
    me, mine = Maker.here(), _digest(path.name)
    names: list[str] = []
    with suppress(OSError):
        names = os.listdir(path.parent)
    for name in names:
        found = _NAME.fullmatch(name)
        if found is None or found[1] != mine:
            continue
        maker, left = Maker(found[2], int(found[3]), found[4]), path.with_name(name)
        if maker.is_gone() if maker.seen_from(me) else _is_old(left):
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


def check_free(path: Path, *, overwrite: bool, directory: bool) -> None:
    """Refuse, by UsageError, a name that is taken. A directory is never replaced."""
    check_target(path)
    if path.is_symlink() or path.exists():
        if directory and path.is_dir() and not any(path.iterdir()):
            return
        if directory or not path.is_file():
            raise UsageError(f"{path} exists already and is never replaced: choose another name")
        if not overwrite:
            raise UsageError(f"{path} exists already: choose another name, or overwrite=True (--overwrite)")


def publish(
    path: Path, make: Callable[[Path], None], *, overwrite: bool = False, directory: bool = False
) -> None:
    """Let `make` write at a hidden name beside `path`, sync everything, and give it its name.

    Raises UsageError where the name is taken, StorageError where the disk refuses; nothing is left then. What
    a writer of this path left that was killed goes first.
    """
    check_free(path, overwrite=overwrite, directory=directory)
    temporary = temporary_beside(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if directory:
            temporary.mkdir()
        make(temporary)
        _sync_tree(temporary)
        if directory or overwrite:
            temporary.rename(path)
        else:
            os.link(temporary, path)
        _sync(path.parent)
    except StorageError:
        raise
    except FileExistsError:
        raise UsageError(
            f"{path} exists already: choose another name, or overwrite=True (--overwrite)"
        ) from None
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        _remove(temporary)


def _sync_tree(path: Path) -> None:
    for folder, _, files in os.walk(path, topdown=False):
        for name in files:
            _sync(Path(folder, name))
        _sync(Path(folder))
    if path.is_file():
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


Where = str | os.PathLike[str]
_PIECE_BYTES = 32 << 20


def publish_anywhere(
    where: Where, make: Callable[[Path], None], *, overwrite: bool = False, directory: bool = False
) -> Path | str:
    """`publish` for a path; at a URL what `make` writes lies in a temporary directory first, whole.

    Objects of a directory appear one by one: those that tell of the others come last. Returns the place.
    """
    if not is_remote(where):
        path = Path(local_directory(where, "the target"))
        publish(path, make, overwrite=overwrite, directory=directory)
        return path
    url = str(where).rstrip("/")
    check_free_at(url, overwrite=overwrite, directory=directory)
    storage, name = object_at(url, "the target")
    with tempfile.TemporaryDirectory(prefix="torchrelay-") as scratch:
        made = Path(scratch) / "made"
        if directory:
            made.mkdir()
        make(made)
        files = sorted((one for one in made.rglob("*") if one.is_file()), key=_told_last) or [made]
        for file in files:
            below = file.relative_to(made).parts
            _send(storage, "/".join([name, *below]), file)
    return f"{storage.url}/{name}"


def check_free_at(url: str, *, overwrite: bool, directory: bool) -> None:
    """Refuse, by UsageError, a name in a store that is taken. A directory is never replaced."""
    storage, name = object_at(url.rstrip("/"), "the target")
    if storage.list(name) or (storage.stat(name) is not None and (directory or not overwrite)):
        raise UsageError(f"{storage.url}/{name} exists already: choose another name, or overwrite a file")


@contextmanager
def fetched_anywhere(where: Where, what: str) -> Iterator[Path]:
    """A path itself; of a URL a local copy, of the object there or of all that lie below it."""
    if not is_remote(where):
        yield Path(local_directory(where, what))
        return
    storage, name = object_at(str(where).rstrip("/"), what)
    with tempfile.TemporaryDirectory(prefix="torchrelay-") as scratch:
        copy = Path(scratch) / Path(name).name
        for path in _files(storage, name):
            _fetch(storage, path, copy.joinpath(*path.split("/")[1:]))
        yield copy


def _files(storage: ObjectStorage, path: str) -> Iterator[str]:
    if storage.stat(path) is not None:
        yield path
        return
    for name in storage.list(path):
        yield from _files(storage, f"{path}/{name}")


def _told_last(file: Path) -> tuple[bool, bool, str]:
    """An index after what it names, and the log of an epoch after its files."""
    return file.parent.name == "log", file.suffix == ".json" or file.name == ".metadata", str(file)


def _send(storage: ObjectStorage, path: str, file: Path) -> None:
    with file.open("rb") as data:
        storage.put_file(path, data, file.stat().st_size)


def _fetch(storage: ObjectStorage, path: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    size = storage.stat(path) or 0
    with target.open("xb") as file:
        for at in range(0, size, _PIECE_BYTES):
            data = storage.read_range(path, at, _PIECE_BYTES)
            if len(data) != min(_PIECE_BYTES, size - at):
                raise StorageError(f"{storage.url}/{path} ended while it was read: try again")
            file.write(data)
