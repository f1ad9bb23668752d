"""Read members of untrusted zip archives; every member is checked before any byte of it is used.

Only uncompressed members with unique, plain relative names are accepted, stored contiguously from the first
byte of the file, so that nothing is hidden between them. Callers never write to paths named by an archive.

Reference: PKWARE APPNOTE 6.3; Python's `zipfile` reads the directory.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import struct
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from torchrelay.errors import DamagedError, StorageError
from torchrelay.metadata.fs import open_regular
from torchrelay.records import dataclass

LIMIT_MEMBERS = 100_000
LIMIT_NAME = 1024
_NAME = re.compile(r"[A-Za-z0-9_.@+=,~ -]+(/[A-Za-z0-9_.@+=,~ -]+)*")
_LOCAL = struct.Struct("<4s5H3I2H")
_ENCRYPTED = 0x1


@dataclass(frozen=True)
class ZipMembers:
    """The checked members of an open archive, by name in file order, as ranges of bytes of the file."""

    what: str
    members: Mapping[str, range]
    _file: BinaryIO
    _zip: zipfile.ZipFile

    def read(self, name: str, limit_bytes: int) -> bytes:
        """Read a member and check its CRC; raises DamagedError, also above the limit, or StorageError."""
        member = self.members.get(name)
        if member is None:
            raise DamagedError(f"{self.what}: has no member {name!r}")
        if len(member) > limit_bytes:
            raise DamagedError(f"{self.what}: {name!r} has {len(member)} bytes, more than {limit_bytes}")
        try:
            return self._zip.read(name)
        except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
            raise DamagedError(f"{self.what}: {name!r} is damaged ({error})") from None
        except OSError as error:
            raise _unreadable(self.what, error) from error

    def read_into(self, name: str, at: int, destination: memoryview) -> None:
        """Fill `destination` from byte `at` of a member, without checking the CRC: it has its own digests."""
        member = self.members[name]
        if at + len(destination) > len(member):
            raise DamagedError(f"{self.what}: {name!r} ends before byte {at + len(destination)}")
        at += member.start
        while len(destination):
            try:
                count = os.preadv(self._file.fileno(), [destination], at)
            except OSError as error:
                raise _unreadable(self.what, error) from error
            if not count:
                raise DamagedError(f"{self.what}: {name!r} is cut off")
            destination, at = destination[count:], at + count


@contextmanager
def open_zip(path: str | os.PathLike[str], what: str = "") -> Iterator[ZipMembers]:
    """Open and check an archive, which must be a regular file; errors call it `what`, or by its path."""
    what = what or str(path)
    try:
        file = open_regular(Path(path))
    except (OSError, ValueError) as error:
        raise _unreadable(what, error) from None
    with file:
        try:
            archive = zipfile.ZipFile(file)
            members = _checked(archive, file, os.fstat(file.fileno()).st_size, what)
        except StorageError:
            raise
        except (zipfile.BadZipFile, EOFError, NotImplementedError, ValueError, struct.error) as error:
            raise DamagedError(f"{what}: is not a zip archive ({error})") from None
        except OSError as error:
            if error.errno == errno.EINVAL:  # the file refers to missing positions
                raise DamagedError(f"{what}: is not a zip archive ({error})") from None
            raise _unreadable(what, error) from error
        with archive:
            yield ZipMembers(what, members, file, archive)


def _unreadable(what: str, error: Exception) -> StorageError:
    return StorageError(f"{what}: cannot be read ({getattr(error, 'strerror', None) or error})")


def _checked(archive: zipfile.ZipFile, file: BinaryIO, size: int, what: str) -> dict[str, range]:
    infos = archive.infolist()
    if len(infos) > LIMIT_MEMBERS:
        raise DamagedError(f"{what}: {len(infos)} members, more than {LIMIT_MEMBERS}")
    members: dict[str, range] = {}
    end = 0
    for info in sorted(infos, key=lambda info: info.header_offset):
        if wrong := _wrong(info) or ("stands twice" if info.filename in members else ""):
            raise DamagedError(f"{what}: member {info.filename[:80]!r} {wrong}")
        if info.header_offset != end:
            raise DamagedError(
                f"{what}: member {info.filename!r} does not begin at the end of the previous one"
            )
        start = _start(file, info, what)
        end = start + info.file_size
        if end > min(size, archive.start_dir):
            raise DamagedError(
                f"{what}: member {info.filename!r} extends beyond the members' part of the file"
            )
        members[info.filename] = range(start, end)
    if end != archive.start_dir:
        raise DamagedError(f"{what}: there are extra bytes between the members and their directory")
    return members


def name_fits(name: str) -> bool:
    """Return True for a valid member name; other archives cannot be opened."""
    return len(name) <= LIMIT_NAME and _NAME.fullmatch(name) is not None and not _leads_elsewhere(name)


def _leads_elsewhere(name: str) -> bool:
    return any(part.strip(" .") == "" for part in name.split("/"))


def _wrong(info: zipfile.ZipInfo) -> str:
    """Return what is unsupported about a member; empty if nothing is."""
    kind = stat.S_IFMT(info.external_attr >> 16)
    if len(info.filename) > LIMIT_NAME or not _NAME.fullmatch(info.filename):
        return "has an unsupported name"
    if _leads_elsewhere(info.filename):
        return "has a name that leads outside"
    if info.orig_filename != info.filename:
        return "has a name with hidden parts"
    if info.flag_bits & _ENCRYPTED:
        return "is encrypted"
    if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
        return "is compressed, but members must be stored"
    if kind not in (0, stat.S_IFREG):
        return "is not a regular file"
    return ""


def _start(file: BinaryIO, info: zipfile.ZipInfo, what: str) -> int:
    """Return the start of the bytes, after checking the local header against the directory."""
    file.seek(info.header_offset)
    raw = file.read(_LOCAL.size)
    if len(raw) < _LOCAL.size:
        raise DamagedError(f"{what}: the header of {info.filename!r} is cut off")
    magic, _, flags, method, _, _, _, _, _, name_size, extra_size = _LOCAL.unpack(raw)
    name = file.read(name_size)
    if magic != b"PK\x03\x04" or method != zipfile.ZIP_STORED or flags & _ENCRYPTED:
        raise DamagedError(f"{what}: the header of {info.filename!r} is not that of a stored member")
    if name != info.filename.encode("ascii"):
        raise DamagedError(f"{what}: the header of {info.filename!r} has another name")
    return info.header_offset + _LOCAL.size + int(name_size) + int(extra_size)
