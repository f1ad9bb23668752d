"""What source consists of: a SHA-256 per file. The digest of this list is the code id.

Names, bytes and links count; times, permissions, the order in which files were made and the place where
they lie do not, so the same source has the same id anywhere.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
from collections.abc import Mapping
from typing import Any

from torchrelay.errors import DamagedError, FormatError
from torchrelay.records import dataclass

FORMAT = 1
MOST_FILES = 50_000
MOST_BYTES = 64 << 20
SHORT = 12
"""Digits of a code id that people are shown."""
_SHA = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class SourceFile:
    """A file by what is in it."""

    sha256: str
    nbytes: int


@dataclass(frozen=True)
class Manifest:
    """Files and links by name; a link has the name of its target relative to its own folder."""

    files: Mapping[str, SourceFile]
    links: Mapping[str, str]

    def encode(self) -> bytes:
        """As it lies in an archive; equal for equal source."""
        value = {
            "files": [[name, one.sha256, one.nbytes] for name, one in sorted(self.files.items())],
            "format": FORMAT,
            "links": [list(link) for link in sorted(self.links.items())],
        }
        return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()

    @property
    def code_id(self) -> str:
        """64 hex digits."""
        return hashlib.sha256(self.encode()).hexdigest()

    @property
    def nbytes(self) -> int:
        """Of all files."""
        return sum(one.nbytes for one in self.files.values())


def decode(data: bytes, what: str) -> Manifest:
    """Read what `encode` wrote; raises DamagedError for anything else, FormatError for a later format."""
    try:
        value = json.loads(data)
        if value["format"] != FORMAT:
            raise FormatError(f"{what}: is of format {value['format']!r:.20}, this version reads {FORMAT}")
        manifest = Manifest(
            {name: _file(sha, nbytes) for name, sha, nbytes in value["files"]},
            dict(value["links"]),
        )
        wrong = _wrong(manifest) or ("is written in another way" if manifest.encode() != data else "")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedError(f"{what}: is no list of source files ({error!r:.80})") from None
    if wrong:
        raise DamagedError(f"{what}: {wrong}")
    return manifest


def is_plain(name: Any) -> bool:
    """Whether a name stays below the folder in which it is used."""
    if not isinstance(name, str) or "\0" in name or "\\" in name:
        return False
    return all(part not in ("", ".", "..") for part in name.split("/"))


def stays_within(name: str, target: str) -> bool:
    """Whether a link's target lies below the folder in which the link's own name is used."""
    if not target or target.startswith("/") or "\0" in target or "\\" in target:
        return False
    found = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
    return found != ".." and not found.startswith("../")


def _file(sha: Any, nbytes: Any) -> SourceFile:
    if type(nbytes) is not int or nbytes < 0 or not isinstance(sha, str) or not _SHA.fullmatch(sha):
        raise ValueError("a digest or size that cannot be")
    return SourceFile(sha, nbytes)


def _wrong(manifest: Manifest) -> str:
    if len(manifest.files) + len(manifest.links) > MOST_FILES:
        return f"more than {MOST_FILES} files"
    for name in (*manifest.files, *manifest.links):
        if not is_plain(name):
            return f"the name {name!r:.80} leads elsewhere"
    for name, target in manifest.links.items():
        if name in manifest.files or not (isinstance(target, str) and stays_within(name, target)):
            return f"the link {name!r:.80} leads elsewhere"
    return ""
