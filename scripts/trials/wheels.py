"""Check the required and forbidden contents of a wheel."""

from __future__ import annotations

import email
import hashlib
import zipfile
from collections.abc import Iterator
from pathlib import Path

OURS = ("tools", "jobs", "checkpoint", "models", "runners", "metadata", "integrations")
FIELDS = ("Name", "Version", "Summary", "Requires-Python", "License-Expression", "Description-Content-Type")


def contents(wheel: Path) -> dict[str, str]:
    """Name to SHA-256 of every member but RECORD, which follows from the others."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/RECORD")]
        return {name: hashlib.sha256(archive.read(name)).hexdigest() for name in names}


def complaints(wheel: Path) -> Iterator[str]:
    """What is wrong with a wheel, in words."""
    names = set(contents(wheel))
    top = {name.partition("/")[0] for name in names}
    for odd in sorted(one for one in top if one != "torchrelay" and not one.endswith(".dist-info")):
        yield f"it puts {odd!r} into site-packages"
    if "torchrelay/py.typed" not in names:
        yield "type checkers would not see its types: py.typed is missing"
    for room in OURS:
        if f"torchrelay/{room}/__init__.py" not in names:
            yield f"the room {room} is missing"
    if not any(name.endswith("licenses/LICENSE") for name in names):
        yield "the licence is missing"
    told = metadata(wheel)
    for field in FIELDS:
        if not told.get(field):
            yield f"its metadata has no {field}"
    if len(str(told.get_payload())) < 500:
        yield "its metadata has no description"


def metadata(wheel: Path) -> email.message.Message:
    """The METADATA of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))
