"""A zip archive written through the storage interface, whole and durable or not at all; one to read.

zipfile would hash what it writes in the same thread. Here one thread writes, straight from where the bytes
lie, while others hash them (CRC-32 for the zip, xxh3 for us).

Source: PKWARE APPNOTE 6.3.10, sections 4.3.7 (local header), 4.3.12 (directory), 4.3.14 to 16 (its end),
4.5.3 (zip64). That CRCs of parts can be joined: M. Adler, zlib's crc32_combine.
"""

from __future__ import annotations

import os
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import field
from functools import lru_cache
from pathlib import Path

from torchrelay.checkpoint.files.publish import publish
from torchrelay.checkpoint.format.dtypes import BLOCK, block_digests
from torchrelay.checkpoint.storage.base import WriteHandle
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.checkpoint.storage.open import FILE, is_remote, object_at
from torchrelay.checkpoint.storage.work import WRITERS, share
from torchrelay.errors import BlobError, StorageError, UsageError
from torchrelay.jobs.runtime import check_file
from torchrelay.metadata.zip_reader import name_fits
from torchrelay.records import dataclass

ALIGNMENT = 64
PIECE = BLOCK
"""What is hashed twice while it lies in the processor's cache."""
_LIMIT32 = 0xFFFFFFFF
_DATE = (1980 - 1980) << 9 | 1 << 5 | 1
"""1980-01-01, the least that a zip can say: archives of the same content are the same bytes."""
_PADDING_ID = 0xD935
"""The extra field that other tools align members with."""


@dataclass
class Chunk:
    """Memory that goes into a member; of a tensor's bytes the digests are kept."""

    memory: memoryview
    wants_digests: bool = False
    digests: bytes = b""


@dataclass
class _ZipPiece:
    chunk: Chunk
    at: int
    memory: memoryview
    crc: int = 0
    digests: bytes = b""

    def hash(self) -> None:
        self.crc = zlib.crc32(self.memory)
        if self.chunk.wants_digests:
            self.digests = block_digests(self.memory)


@dataclass(frozen=True)
class _Written:
    name: bytes
    header_at: int
    nbytes: int
    crc: int


@dataclass
class ZipWriter:
    """Adds members one after another, then the directory. `handle` is a new file."""

    handle: WriteHandle
    at: int = 0
    _members: list[_Written] = field(default_factory=list)

    def add(self, name: str, chunks: Sequence[Chunk]) -> None:
        """Write one member, and the digests of its chunks into them."""
        if not name_fits(name):
            raise BlobError(f"an archive has no member {name[:100]!r}: it could not be opened again")
        nbytes = sum(len(chunk.memory) for chunk in chunks)
        raw = name.encode("ascii")
        extra = _extra(self.at, len(raw), nbytes)
        data = self.at + 30 + len(raw) + len(extra)
        crc = self._write(list(_pieces(chunks, data)))
        header = _local_header(raw, nbytes, crc, extra)
        self.handle.write_at(self.at, memoryview(header))
        self._members.append(_Written(raw, self.at, nbytes, crc))
        self.at = data + nbytes

    def finish(self) -> int:
        """Write the directory; the size of the archive."""
        entries = b"".join(map(_directory_entry, self._members))
        end = _end(len(self._members), self.at, len(entries))
        self.handle.write_at(self.at, memoryview(entries + end))
        return self.at + len(entries) + len(end)

    def _write(self, pieces: list[_ZipPiece]) -> int:
        """Write all pieces in order, so that the device begins early, while others are hashed."""

        def write_all() -> None:
            for piece in pieces:
                self.handle.write_at(piece.at, piece.memory)

        def work(mine: Iterator[Callable[[], None]]) -> None:
            for one in mine:
                one()

        todo = [write_all, *(piece.hash for piece in pieces)]
        share(work, todo, min(WRITERS, len(todo)) if len(pieces) > 8 else 1)
        crc = 0
        for piece in pieces:
            crc = combined(crc, piece.crc, len(piece.memory))
            piece.chunk.digests += piece.digests
        return crc


def _pieces(chunks: Sequence[Chunk], at: int) -> Iterator[_ZipPiece]:
    for chunk in chunks:
        for start in range(0, len(chunk.memory), PIECE):
            part = chunk.memory[start : start + PIECE]
            yield _ZipPiece(chunk, at, part)
            at += len(part)


def _extra(at: int, name_bytes: int, nbytes: int) -> bytes:
    """The extra field of a local header at `at`: sizes where they are long, then padding."""
    long = struct.pack("<HHQQ", 1, 16, nbytes, nbytes) if nbytes >= _LIMIT32 else b""
    padding = -(at + 30 + name_bytes + len(long) + 4) % ALIGNMENT
    return long + struct.pack("<HH", _PADDING_ID, padding) + bytes(padding)


def _local_header(name: bytes, nbytes: int, crc: int, extra: bytes) -> bytes:
    size = min(nbytes, _LIMIT32)
    version = 45 if size == _LIMIT32 else 20
    fixed = struct.pack(
        "<4s5H3I2H", b"PK\x03\x04", version, 0, 0, 0, _DATE, crc, size, size, len(name), len(extra)
    )
    return fixed + name + extra


def _directory_entry(member: _Written) -> bytes:
    long = [value for value in (member.nbytes, member.nbytes, member.header_at) if value >= _LIMIT32]
    extra = struct.pack(f"<HH{len(long)}Q", 1, 8 * len(long), *long) if long else b""
    size, at = min(member.nbytes, _LIMIT32), min(member.header_at, _LIMIT32)
    version = 45 if long else 20
    fixed = struct.pack(
        "<4s6H3I5H2I", b"PK\x01\x02", 3 << 8 | version, version, 0, 0, 0, _DATE, member.crc, size, size,
        len(member.name), len(extra), 0, 0, 0, 0o100644 << 16, at,
    )  # fmt: skip
    return fixed + member.name + extra


def _end(count: int, at: int, nbytes: int) -> bytes:
    long = b""
    if at + nbytes >= _LIMIT32 or count >= 0xFFFF:
        where = at + nbytes
        long = struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 3 << 8 | 45, 45, 0, 0, count, count, nbytes, at)
        long += struct.pack("<4sIQI", b"PK\x06\x07", 0, where, 1)
    few = min(count, 0xFFFF)
    short = (b"PK\x05\x06", 0, 0, few, few, min(nbytes, _LIMIT32), min(at, _LIMIT32), 0)
    return long + struct.pack("<4s4H2IH", *short)


def combined(first: int, second: int, nbytes: int) -> int:
    """The CRC-32 of two parts together, by those of the parts; the second is `nbytes` long."""
    return (_times(_zeros(nbytes), first) ^ second) if nbytes else first


@lru_cache(maxsize=256)
def _zeros(nbytes: int) -> tuple[int, ...]:
    """What `nbytes` zeros do to a CRC: a 32 by 32 matrix over GF(2), by columns."""
    power = (0xEDB88320, *(1 << bit for bit in range(31)))  # one zero bit
    for _ in range(3):
        power = _squared(power)
    found: tuple[int, ...] | None = None
    while nbytes:
        if nbytes & 1:
            found = power if found is None else tuple(_times(power, column) for column in found)
        nbytes >>= 1
        power = _squared(power) if nbytes else power
    return found or tuple(1 << bit for bit in range(32))


def _times(matrix: Sequence[int], vector: int) -> int:
    result = bit = 0
    while vector:
        if vector & 1:
            result ^= matrix[bit]
        vector >>= 1
        bit += 1
    return result


def _squared(matrix: Sequence[int]) -> tuple[int, ...]:
    return tuple(_times(matrix, column) for column in matrix)


Fill = Callable[[ZipWriter], None]
"""Puts all members into a new archive."""


Where = str | os.PathLike[str]
_READ = 32 << 20


def write_archive(where: Where, fill: Fill, *, overwrite: bool) -> str:
    """Write an archive; returns where it lies.

    The path is taken as it is written: no suffix is added and no `~` expanded. Raises UsageError where the
    name is taken, StorageError.
    """
    if is_remote(where):
        return _write_remote(str(where), fill, overwrite=overwrite)
    path = _local_path(where)

    def make(temporary: Path) -> None:
        handle = LocalStorage(temporary.parent).open_exclusive(temporary.name)
        handle.hurry()
        _filled(handle, fill)

    publish(path, make, overwrite=overwrite)
    return str(path)


def _filled(handle: WriteHandle, fill: Fill) -> None:
    try:
        writer = ZipWriter(handle)
        fill(writer)
        writer.finish()
    finally:
        handle.close()


def _write_remote(url: str, fill: Fill, *, overwrite: bool) -> str:
    storage, name = object_at(url, "the archive")
    if not overwrite and storage.stat(name) is not None:
        raise UsageError(f"{storage.url}/{name} exists already: choose another name, or overwrite=True")
    handle = storage.open_replacing(name) if overwrite else storage.open_creating(name)
    try:
        writer = ZipWriter(handle)
        fill(writer)
        writer.finish()
        handle.sync_file()
    except FileExistsError:
        raise UsageError(f"{storage.url}/{name} exists already: somebody else was faster") from None
    finally:
        handle.close()
    return f"{storage.url}/{name}"


@contextmanager
def fetched(where: Where) -> Iterator[tuple[str, str]]:
    """A local path to read the archive from, and what to call it. Raises UsageError, StorageError."""
    if not is_remote(where):
        path = _local_path(where)
        check_file(path, "an archive")
        yield str(path), str(path)
        return
    storage, name = object_at(str(where), "the archive")
    shown = f"{storage.url}/{name}"
    size = storage.stat(name)
    if size is None:
        raise UsageError(f"{shown} is not there: give an archive")
    with tempfile.TemporaryFile() as file:
        for at in range(0, size, _READ):
            data = storage.read_range(name, at, _READ)
            if len(data) != min(_READ, size - at):
                raise StorageError(f"{shown} ended while it was read: try again")
            file.write(data)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}", shown


def _local_path(where: Where) -> Path:
    if not isinstance(where, (str, os.PathLike)) or not isinstance(os.fspath(where), str):
        raise UsageError(f"{' '.join(repr(where).split()):.80} is no path: give a str or a Path")
    text = os.fspath(where)
    text = text.removeprefix(FILE)
    if not text.strip() or "\0" in text or text.endswith("/"):
        raise UsageError(f"{where!r} names no file: give a path such as 'model.zip'")
    return Path(text).absolute()
