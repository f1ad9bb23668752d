"""Implement the storage interface on local directories."""

from __future__ import annotations

import builtins
import ctypes
import errno
import os
import secrets
import stat as stat_module
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path

from torchrelay.checkpoint.storage.base import PRIVATE, Memory, SingleWriter
from torchrelay.checkpoint.storage.local_io import (
    ALIGNMENT,
    SHORT_STRIDE,
    WORTH_IT,
    DirectFile,
    LocalReadHandle,
    Pacer,
    c_function,
    open_direct,
)
from torchrelay.checkpoint.storage.work import call_in_flight, moved
from torchrelay.errors import StorageError
from torchrelay.metadata.fs import SamePlace

_AT_FDCWD = -100
_NOREPLACE = 1
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL})
_NO_RENAMES = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})


def give_name(temporary: Path, full: Path, *, alone: bool = False) -> None:
    """Give the file of `temporary` its name `full`: by `link`, else by a rename that does not replace.

    `temporary` may stay. With `alone`, if neither works, a plain rename after a check will do, because there
    is no other writer. Raises FileExistsError if the name exists, another OSError if it cannot be given.
    """
    try:
        os.link(temporary, full)
    except FileExistsError:
        # A lost reply (NFS) repeats a link that had worked: then both names are one file.
        if not _same_file(temporary, full):
            raise
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        _rename(temporary, full, error, alone=alone)


def _rename(temporary: Path, full: Path, no_link: OSError, *, alone: bool) -> None:
    try:
        rename_without_replacing(temporary, full)
    except OSError as error:
        if error.errno not in _NO_RENAMES:
            raise
        if not alone:
            raise no_link from error
        if os.path.lexists(full):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(full)) from None
        temporary.rename(full)


def rename_without_replacing(source: Path, target: Path) -> None:
    """`renameat2` with RENAME_NOREPLACE; OSError with ENOSYS if the system lacks it."""
    if _renameat2 is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(target))
    if _renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), _NOREPLACE) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(target))


_renameat2 = c_function(
    "renameat2", ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint
)


def _same_file(one: Path, other: Path) -> bool:
    with suppress(OSError):
        return os.path.samestat(os.lstat(one), os.lstat(other))
    return False


MODE = 0o644


def _refusal(path: str | Path, verb: str, error: OSError) -> StorageError:
    reason = error.strerror or str(error)
    hint = {
        errno.ENOSPC: "free some space",
        errno.EDQUOT: "raise the quota or free some space",
        errno.EROFS: "choose a writable place",
        errno.EACCES: f"give uid {os.getuid()} access",
        errno.EPERM: f"give uid {os.getuid()} access",
        errno.ENOTDIR: "a part of the path is a file: choose another place",
        errno.ENOENT: "its directory has disappeared: put it back",
    }.get(error.errno or 0, "")
    failure = StorageError(f"cannot {verb} {path}: {reason}" + (f"; {hint}" if hint else ""))
    failure.errno = error.errno
    return failure


class _named(call_in_flight):  # noqa: N801 - as `call_in_flight`
    """Raises StorageError with the path for an OSError, and notes the call, which moves `nbytes`.

    `passing` is the error of presence that the method promises; any other means that a directory has
    disappeared.
    """

    __slots__ = ("_passing",)

    def __init__(
        self, path: str | Path, verb: str, passing: type[OSError] = StorageError, *, nbytes: int = 0
    ) -> None:
        super().__init__(verb, path, nbytes)
        self._passing = passing

    def _failed(self, error: BaseException) -> None:
        if isinstance(error, OSError) and not isinstance(error, (self._passing, StorageError)):
            raise _refusal(self._path, self._verb, error) from error


class LocalWriteHandle:
    """A new file, with a second descriptor for direct writes if it is large."""

    def __init__(self, path: str, descriptor: int) -> None:
        self.path = path
        self.alignment = 0
        self._descriptor = descriptor
        self._direct: DirectFile | None = None
        self._pacer = Pacer(descriptor)
        self._reserved = 0

    def write_at(self, offset: int, data: memoryview) -> None:
        """Write all of `data`; raises if the system writes nothing twice in a row."""
        view, stalls = data.cast("B"), 0
        with _named(self.path, "write", nbytes=len(view)):
            if self._direct is not None:
                done = self._direct.write(offset, view)
                view, offset = view[done:], offset + done
            while len(view):
                written = os.pwrite(self._descriptor, view, offset)
                stalls = stalls + 1 if written == 0 else 0
                if stalls > 1:
                    raise OSError(errno.EIO, "the system wrote nothing, twice")
                self._pacer.wrote(offset, written)
                view, offset = view[written:], offset + written

    def preallocate(self, nbytes: int) -> None:
        """Reserve blocks if the file system can, and open a large file for direct writes."""
        if nbytes == 0:
            return
        self._reserved = nbytes
        if nbytes >= WORTH_IT and self._direct is None:
            self._direct = open_direct(self.path, self._descriptor)
            self.alignment = ALIGNMENT if self._direct is not None else 0
        try:
            with call_in_flight("reserve space for", self.path, nbytes):
                os.posix_fallocate(self._descriptor, 0, nbytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise _refusal(self.path, "reserve space for", error) from error

    def hurry(self) -> None:
        """Start device writes after every MiB: for a file that is hashed while it is written."""
        self._pacer.stride = SHORT_STRIDE

    def sync_file(self) -> None:
        """Flush data and metadata to the device."""
        with _named(self.path, "sync", nbytes=self._reserved):
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Close once; later calls do nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        with _named(self.path, "close"):
            try:
                if self._direct is not None:
                    self._direct.close()
            finally:
                if descriptor >= 0:
                    os.close(descriptor)


class _LocalReads(LocalReadHandle):
    """A read handle whose errors name the file."""

    def read_into(self, offset: int, destination: memoryview, *, once: bool = False) -> int:
        with _named(self.path, "read", FileNotFoundError, nbytes=len(destination)):
            return super().read_into(offset, destination, once=once)

    def read(self, offset: int, length: int) -> bytes:
        with _named(self.path, "read", FileNotFoundError, nbytes=length):
            return super().read(offset, length)

    def read_scattered(self, offset: int, destinations: Sequence[Memory]) -> int:
        with _named(self.path, "read", FileNotFoundError):
            count = super().read_scattered(offset, destinations)
            moved(count)
            return count

    def close(self) -> None:
        with _named(self.path, "close"):
            super().close()


class LocalStorage:
    """A directory tree; links below the root are never followed.

    `single_writer="external"` also accepts a file system that can neither link nor rename without replacing.
    """

    doubt = None

    def __init__(self, root: str | Path, *, single_writer: SingleWriter = None) -> None:
        self.single_writer: SingleWriter = single_writer
        self.root = Path(root).absolute()
        self.url = str(self.root)
        self._root_is_durable = False
        self._place = SamePlace(self.root)

    def check_place(self) -> None:
        """Raise LostDirectoryError if the root is not the same directory as before."""
        self._place.check()

    def _changed(self, path: str) -> Path:
        self.check_place()
        return self._path(path)

    def _path(self, path: str) -> Path:
        return Path(self._text(path))

    def _text(self, path: str) -> str:
        """The full path, as text because that is faster for many reads."""
        parts = path.split("/") if path else []
        if any(part in ("", ".", "..") or "\0" in part for part in parts):
            raise StorageError(f"{path!r} is not a path below {self.root}")
        full = self.url
        for part in parts[:-1]:
            full = f"{full}/{part}"
            if os.path.islink(full):  # noqa: PTH114 - a text: many reads ask
                raise StorageError(
                    f"{full} is a link, which is not allowed in a checkpoint directory: remove it"
                )
        return f"{full}/{parts[-1]}" if parts else full

    def open_exclusive(self, path: str) -> LocalWriteHandle:
        """Create with O_EXCL; the mode does not depend on the umask."""
        full = self._changed(path)
        with _named(full, "create", FileExistsError):
            return _create(full)

    def link_exclusive(self, path: str, data: bytes) -> None:
        """Write and sync under a temporary name, then give it the real one, which never replaces."""
        full = self._changed(path)

        def name(temporary: Path) -> None:
            give_name(temporary, full, alone=self.single_writer is not None)

        with _named(full, "create", FileExistsError):
            self._beside(full, data, name, sync=True)

    def replace(self, path: str, data: bytes) -> None:
        """Write a temporary file and rename it; readers see the old or the new one."""
        full = self._changed(path)
        with _named(full, "replace"):
            self._beside(full, data, lambda temporary: temporary.replace(full), sync=False)

    def _beside(self, full: Path, data: bytes, name: Callable[[Path], object], *, sync: bool) -> None:
        """Write under a temporary name, then name it; repeated if a new writer of the log deleted it."""
        try:
            self._once_beside(full, data, name, sync=sync)
        except FileNotFoundError:
            self._once_beside(full, data, name, sync=sync)

    def _once_beside(self, full: Path, data: bytes, name: Callable[[Path], object], *, sync: bool) -> None:
        temporary = full.with_name(f"{PRIVATE}{secrets.token_hex(8)}")
        try:
            self._write_whole(temporary, data, sync=sync)
            name(temporary)
        finally:
            with suppress(OSError):
                temporary.unlink()

    def _write_whole(self, full: Path, data: bytes, *, sync: bool) -> None:
        with closing(_create(full)) as handle:
            handle.write_at(0, memoryview(data))
            if sync:
                handle.sync_file()

    def mkdir(self, path: str) -> None:
        """Create the directory and its parents."""
        full = self._changed(path)
        with _named(full, "create directory"):
            try:
                full.mkdir(parents=True, exist_ok=True)
            except FileExistsError as error:
                raise StorageError(
                    f"{full} is a file; a directory is needed there: choose another place"
                ) from error

    def sync_dir(self, path: str) -> None:
        """Fsync the directory; for the root, once, also the directories that lead to it."""
        full = self._path(path)
        with _named(full, "sync directory"):
            _sync_opened(_opened(full))
            if not path and not self._root_is_durable:
                _sync_above(full)
                self._root_is_durable = True

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        """Read into new memory."""
        size = self.stat(path)
        if size is None:
            raise FileNotFoundError(errno.ENOENT, "no such file", str(self._path(path)))
        with closing(self.open_read(path)) as handle:
            return handle.read(offset, max(0, min(length, size - offset)))

    def read_into(self, path: str, offset: int, destination: memoryview) -> int:
        """Read in place; a special file or a link raises."""
        with closing(self.open_read(path)) as handle:
            return handle.read_into(offset, destination)

    def open_read(self, path: str) -> LocalReadHandle:
        """Open for many reads; a special file or a link raises."""
        full = self._text(path)
        with _named(full, "read", FileNotFoundError):
            descriptor = os.open(full, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
            if stat_module.S_ISREG(os.fstat(descriptor).st_mode):
                return _LocalReads(full, descriptor)
            os.close(descriptor)
            raise StorageError(f"{full} is not a regular file")

    def stat(self, path: str) -> int | None:
        """Size of a regular file, not following a link."""
        full = self._text(path)
        with _named(full, "look at"):
            try:
                found = os.lstat(full)
            except (FileNotFoundError, NotADirectoryError):
                return None
        return found.st_size if stat_module.S_ISREG(found.st_mode) else None

    def delete(self, path: str) -> None:
        """Unlink, or remove a directory with nothing but temporary files of a crashed process."""
        full = self._changed(path)
        with _named(full, "delete"), suppress(FileNotFoundError):
            if full.is_dir() and not full.is_symlink():
                names = os.listdir(full)
                if all(name.startswith(PRIVATE) for name in names):
                    for name in names:
                        (full / name).unlink(missing_ok=True)
                full.rmdir()
            else:
                full.unlink()

    def list(self, path: str) -> list[str]:
        """Sorted names, without temporary ones."""
        return self._names(path, temporary=False)

    def leftovers(self, path: str) -> builtins.list[str]:
        """Sorted temporary names, of writes in flight and of crashed ones."""
        return self._names(path, temporary=True)

    def _names(self, path: str, *, temporary: bool) -> builtins.list[str]:
        full = self._path(path)
        with _named(full, "list"):
            try:
                return sorted(name for name in os.listdir(full) if name.startswith(PRIVATE) is temporary)
            except (FileNotFoundError, NotADirectoryError):
                return []

    def room(self) -> tuple[int, int] | None:
        """Free space from statvfs; None if it reports none, as some network file systems do."""
        try:
            found = os.statvfs(self.root)
        except OSError:
            return None
        files = found.f_favail if found.f_files else 2**63
        return (found.f_bavail * found.f_frsize, files) if found.f_blocks else None


def _create(full: Path) -> LocalWriteHandle:
    descriptor = os.open(full, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, MODE)
    try:
        os.fchmod(descriptor, MODE)
    except BaseException:
        os.close(descriptor)
        raise
    return LocalWriteHandle(str(full), descriptor)


def _opened(directory: Path) -> int:
    return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _sync_opened(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_above(root: Path) -> None:
    """Make the names of a new root and of the directories above it durable.

    Unreadable directories are skipped, because this process cannot have made a name there; so are other
    mounts.
    """
    device = root.stat().st_dev
    for directory in root.parents:
        if directory.stat().st_dev != device:
            return
        try:
            descriptor = _opened(directory)
        except PermissionError:
            continue
        _sync_opened(descriptor)
