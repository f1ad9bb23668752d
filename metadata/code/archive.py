"""Source as one zip: `manifest.json`, then the files below `files/`, the same bytes for the same code id.

Times are fixed, names sorted, permissions alike, nothing compressed. What a member's name cannot have is
written `=XX`, a byte in hex. An archive is named by its code id, which is the digest of its manifest.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torchrelay.errors import DamagedError, StorageError
from torchrelay.metadata.code.manifest import MOST_BYTES, Manifest, decode
from torchrelay.metadata.files import replace_file
from torchrelay.metadata.zip_members import ZipMembers, open_zip
from torchrelay.records import dataclass

_MANIFEST = "manifest.json"
_FIXED = (1980, 1, 1, 0, 0, 0)
_PLAIN = re.compile(rb"[A-Za-z0-9_.@+,~ -]")


@dataclass(frozen=True)
class Archive:
    """An open archive whose manifest is the one that its code id promises."""

    code_id: str
    manifest: Manifest
    _members: ZipMembers

    def read(self, name: str) -> bytes:
        """The bytes of a file, verified; raises DamagedError, KeyError for a name that is not there."""
        file = self.manifest.files[name]
        data = self._members.read(member_name(name), file.nbytes)
        if hashlib.sha256(data).hexdigest() != file.sha256:
            raise DamagedError(f"{self._members.what}: {name} is not the file that was archived")
        return data

    def read_all(self) -> dict[str, bytes]:
        """All files, verified."""
        return {name: self.read(name) for name in self.manifest.files}


def archive_bytes(manifest: Manifest, contents: Mapping[str, bytes]) -> bytes:
    """The archive of source; equal for equal source."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(_info(_MANIFEST), manifest.encode())
        for name in sorted(manifest.files):
            archive.writestr(_info(member_name(name)), contents[name])
    return made.getvalue()


def write_archive(directory: Path, manifest: Manifest, contents: Mapping[str, bytes]) -> Path:
    """Store an archive below `directory` unless it is there, whole; raises StorageError."""
    path = directory / f"{manifest.code_id}.zip"
    try:
        with open_archive(path) as there:
            there.read_all()
        return path
    except StorageError:
        pass  # missing or damaged
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"cannot make {directory}: {error.strerror}") from error
    replace_file(path, archive_bytes(manifest, contents))
    return path


@contextmanager
def open_archive(path: str | os.PathLike[str]) -> Iterator[Archive]:
    """Open an archive by the path that has its code id; raises DamagedError, StorageError."""
    code_id = Path(path).name.removesuffix(".zip")
    with open_zip(path) as members:
        data = members.read(_MANIFEST, MOST_BYTES)
        if hashlib.sha256(data).hexdigest() != code_id:
            raise DamagedError(f"{path}: its list of files is not the one that its name promises")
        manifest = decode(data, str(path))
        wanted = {_MANIFEST, *map(member_name, manifest.files)}
        if wanted != set(members.members):
            raise DamagedError(f"{path}: does not hold the files that its list names, and no others")
        yield Archive(code_id, manifest, members)


def member_name(name: str) -> str:
    """Below `files/`, in the few characters that members have; different for different names."""
    return "/".join(("files", *map(_part, name.split("/"))))


def _part(part: str) -> str:
    raw = part.encode()
    text = "".join(chr(byte) if _PLAIN.fullmatch(bytes((byte,))) else f"={byte:02X}" for byte in raw)
    return text if text.strip(" .") else "".join(f"={byte:02X}" for byte in raw)


def _info(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, _FIXED)
    info.create_system = 3  # Unix, wherever it is made
    info.external_attr = 0o100644 << 16
    return info
