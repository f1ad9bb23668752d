"""Source archives: manifest, writing, extraction and comparison.

The code id is the digest of the manifest, which has names, contents and links, but no times, permissions or
locations. So equal source has the same id everywhere. Archives are reproducible: fixed times, sorted names,
equal permissions, no compression. Bytes that are invalid in a member's name are written as `=XX`.
"""

from __future__ import annotations

import difflib
import hashlib
import io
import json
import os
import posixpath
import re
import stat
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torchrelay.errors import DamagedError, FormatError, StorageError, UsageError
from torchrelay.metadata.fs import replace_file
from torchrelay.metadata.zip_reader import ZipMembers, open_zip
from torchrelay.records import dataclass

FORMAT = 1
MOST_FILES = 50_000
MOST_BYTES = 64 << 20
SHORT = 12
"""Displayed digits of a code id."""
_SHA = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class SourceFile:
    """A file by its content."""

    sha256: str
    nbytes: int


@dataclass(frozen=True)
class SourceManifest:
    """Files and links by name; the target of a link is relative to its folder."""

    files: Mapping[str, SourceFile]
    links: Mapping[str, str]

    def encode(self) -> bytes:
        """Return the stored form; equal for equal source."""
        value = {
            "files": [[name, one.sha256, one.nbytes] for name, one in sorted(self.files.items())],
            "format": FORMAT,
            "links": [list(link) for link in sorted(self.links.items())],
        }
        return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()

    @property
    def code_id(self) -> str:
        """Id of the code, 64 hex digits."""
        return hashlib.sha256(self.encode()).hexdigest()

    @property
    def nbytes(self) -> int:
        """Total size of the files."""
        return sum(one.nbytes for one in self.files.values())


def decode(data: bytes, what: str) -> SourceManifest:
    """Decode the result of `encode`; raises DamagedError, or FormatError for a newer format."""
    try:
        value = json.loads(data)
        if value["format"] != FORMAT:
            raise FormatError(f"{what}: has format {value['format']!r:.20}, but this version reads {FORMAT}")
        files = {name: SourceFile(sha, nbytes) for name, sha, nbytes in value["files"]}
        for one in files.values():
            if type(one.nbytes) is not int or one.nbytes < 0 or not _SHA.fullmatch(one.sha256):
                raise ValueError("an invalid digest or size")
        manifest = SourceManifest(files, dict(value["links"]))
        wrong = _wrong(manifest) or ("is not in canonical form" if manifest.encode() != data else "")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedError(f"{what}: is not a list of source files ({error!r:.80})") from None
    if wrong:
        raise DamagedError(f"{what}: {wrong}")
    return manifest


def is_plain(name: Any) -> bool:
    """Return True if a name stays below its folder."""
    if not isinstance(name, str) or "\0" in name or "\\" in name:
        return False
    return all(part not in ("", ".", "..") for part in name.split("/"))


def stays_within(name: str, target: str) -> bool:
    """Return True if the target of a link stays below the folder of its name."""
    if not target or target.startswith("/") or "\0" in target or "\\" in target:
        return False
    found = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
    return found != ".." and not found.startswith("../")


def _wrong(manifest: SourceManifest) -> str:
    if len(manifest.files) + len(manifest.links) > MOST_FILES:
        return f"more than {MOST_FILES} files"
    for name in (*manifest.files, *manifest.links):
        if not is_plain(name):
            return f"the name {name!r:.80} leads outside"
    for name, target in manifest.links.items():
        if name in manifest.files or not (isinstance(target, str) and stays_within(name, target)):
            return f"the link {name!r:.80} leads outside"
    return ""


_MANIFEST = "manifest.json"
_FIXED = (1980, 1, 1, 0, 0, 0)
_PLAIN = re.compile(rb"[A-Za-z0-9_.@+,~ -]")


@dataclass(frozen=True)
class Archive:
    """An open archive whose manifest matches its code id."""

    code_id: str
    manifest: SourceManifest
    _members: ZipMembers

    def read(self, name: str) -> bytes:
        """Read and verify a file; raises DamagedError, KeyError for an unknown name."""
        file = self.manifest.files[name]
        data = self._members.read(member_name(name), file.nbytes)
        if hashlib.sha256(data).hexdigest() != file.sha256:
            raise DamagedError(f"{self._members.what}: {name} is not the archived file")
        return data

    def read_all(self) -> dict[str, bytes]:
        """Read and verify all files."""
        return {name: self.read(name) for name in self.manifest.files}


def archive_bytes(manifest: SourceManifest, contents: Mapping[str, bytes]) -> bytes:
    """Return the bytes of an archive; equal for equal source."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(_info(_MANIFEST), manifest.encode())
        for name in sorted(manifest.files):
            archive.writestr(_info(member_name(name)), contents[name])
    return made.getvalue()


def write_archive(directory: Path, manifest: SourceManifest, contents: Mapping[str, bytes]) -> Path:
    """Store an archive in `directory` unless a valid one exists; raises StorageError."""
    path = directory / f"{manifest.code_id}.zip"
    with suppress(StorageError), open_archive(path) as there:  # else it is missing or damaged
        there.read_all()
        return path
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"cannot create {directory}: {error.strerror}") from error
    replace_file(path, archive_bytes(manifest, contents))
    return path


@contextmanager
def open_archive(path: str | os.PathLike[str]) -> Iterator[Archive]:
    """Open an archive, whose file name is its code id; raises DamagedError, StorageError."""
    code_id = Path(path).name.removesuffix(".zip")
    with open_zip(path) as members:
        data = members.read(_MANIFEST, MOST_BYTES)
        if hashlib.sha256(data).hexdigest() != code_id:
            raise DamagedError(f"{path}: its list of files does not match its name")
        manifest = decode(data, str(path))
        wanted = {_MANIFEST, *map(member_name, manifest.files)}
        if wanted != set(members.members):
            raise DamagedError(f"{path}: its files do not match its list")
        yield Archive(code_id, manifest, members)


def member_name(name: str) -> str:
    """Return the member name of a file: below `files/`, in valid characters, unique per name."""
    return "/".join(("files", *map(_part, name.split("/"))))


def _part(part: str) -> str:
    raw = part.encode()
    text = "".join(chr(byte) if _PLAIN.fullmatch(bytes((byte,))) else f"={byte:02X}" for byte in raw)
    return text if text.strip(" .") else "".join(f"={byte:02X}" for byte in raw)


def _info(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, _FIXED)
    info.create_system = 3  # Unix, on all systems
    info.external_attr = 0o100644 << 16
    return info


def unpack_source(archive: Archive, directory: Path, *, force: bool = False) -> None:
    """Write the files and links of an archive, never through links; files with `#!` become executable.

    The directory must be empty, unless `force` is given, which overwrites files and keeps others. Raises
    DamagedError before writing anything.
    """
    contents = archive.read_all()
    try:
        used = (directory.is_symlink() or directory.exists()) and bool(force or os.listdir(directory))
    except OSError as error:
        raise UsageError(f"{directory} is not a usable directory: {error.strerror}") from None
    if used and not force:
        raise UsageError(f"{directory} is not empty: give a new directory, or --force to overwrite files")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, data in contents.items():
            path = _place(directory, name)
            replace_file(path, data, sync="nothing")
            if data.startswith(b"#!"):
                path.chmod(0o755)
        for name, target in archive.manifest.links.items():
            path = _place(directory, name)
            with suppress(FileNotFoundError):
                path.unlink()
            path.symlink_to(target)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(f"cannot write {error.filename or directory}: {error.strerror}") from error


def _place(directory: Path, name: str) -> Path:
    """Return the path of a file and create its folders, which must not be links."""
    folder = directory
    for part in name.split("/")[:-1]:
        folder = folder / part
        with suppress(FileExistsError):
            folder.mkdir()
        if not stat.S_ISDIR(folder.lstat().st_mode):
            raise StorageError(f"{folder} exists and is not a directory, which {name} needs; remove it")
    return folder / name.rpartition("/")[2]


_SHOWN = 8
_LARGEST_TEXT = 4 << 20


@dataclass(frozen=True)
class SourceChanges:
    """Sorted names of changed, added and removed files."""

    added: tuple[str, ...]
    changed: tuple[str, ...]
    removed: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.added or self.changed or self.removed)

    def __str__(self) -> str:
        words = [*self.changed, *(f"+{one}" for one in self.added), *(f"-{one}" for one in self.removed)]
        more = f" and {len(words) - _SHOWN} more" if len(words) > _SHOWN else ""
        return ", ".join(words[:_SHOWN]) + more


NO_CHANGES = SourceChanges((), (), ())


@dataclass(frozen=True)
class FileDiff:
    """One file of a difference; `lines` is None for binary files."""

    name: str
    lines: tuple[str, ...] | None

    @property
    def counts(self) -> tuple[int, int]:
        """Numbers of added and removed lines."""
        body = (self.lines or ())[2:]
        return sum(one.startswith("+") for one in body), sum(one.startswith("-") for one in body)


def changes(old: Mapping[str, str], new: Mapping[str, str]) -> SourceChanges:
    """Compare names and digests as returned by `snapshot.of_manifest`."""
    both = old.keys() & new.keys()
    return SourceChanges(
        tuple(sorted(new.keys() - old.keys())),
        tuple(sorted(name for name in both if old[name] != new[name])),
        tuple(sorted(old.keys() - new.keys())),
    )


def file_diffs(
    found: SourceChanges, old: Callable[[str], bytes], new: Callable[[str], bytes]
) -> Iterator[FileDiff]:
    """Yield unified diffs of the differing files, in name order."""
    for name in sorted((*found.added, *found.changed, *found.removed)):
        before, from_name = ([], "/dev/null") if name in found.added else (_text(old(name)), f"a/{name}")
        after, to_name = ([], "/dev/null") if name in found.removed else (_text(new(name)), f"b/{name}")
        if before is None or after is None:
            yield FileDiff(name, None)
            continue
        shown: list[str] = []
        for line in difflib.unified_diff(before, after, from_name, to_name, lineterm=""):
            shown.append(line.removesuffix("\n"))
            if not line.endswith("\n") and line[:1] in "+- " and not line.startswith(("+++ ", "--- ")):
                shown.append("\\ No newline at end of file")
        yield FileDiff(name, tuple(shown))


def _text(data: bytes) -> list[str] | None:
    if len(data) > _LARGEST_TEXT or b"\0" in data:
        return None
    try:
        *lines, last = data.decode().split("\n")  # not at other ends of lines
    except UnicodeDecodeError:
        return None
    return [*(f"{line}\n" for line in lines), *([last] if last else [])]
