"""Tensors that lie in a file beside the model: found inside of its folder only.

The format lets a model name any file. Here the name must be a relative path that stays, links resolved, in
the folder of the model, and the bytes asked for must lie in a regular file.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import torch

from torchrelay.errors import DamagedError, StorageError, UsageError


def external_bytes(proto: Any, folder: Path | None, nbytes: int) -> torch.Tensor:
    """The `nbytes` bytes that a TensorProto says lie elsewhere, as uint8.

    Raises UsageError for a place outside of `folder`, DamagedError for bytes that are not there.
    """
    what = f"tensor {proto.name!r}"
    said = {entry.key: entry.value for entry in proto.external_data}
    if folder is None:
        raise UsageError(
            f"{what} lies in a file of its own, {said.get('location')!r}: say where with folder=, or give "
            f"a path"
        )
    path = _inside(folder, said.get("location", ""), what)
    offset, length = _number(said, "offset", what, 0), _number(said, "length", what, nbytes)
    if length != nbytes:
        raise DamagedError(
            f"{what} needs {nbytes} bytes, and the model says that {length} are stored in {path}"
        )
    return _read(path, offset, nbytes, what)


def _inside(folder: Path, location: str, what: str) -> Path:
    root = Path(os.path.realpath(folder))
    given = Path(location)
    if not location or "\0" in location or "\\" in location or given.is_absolute() or ".." in given.parts:
        raise UsageError(
            f"{what} is said to lie in {location!r}, which is no path inside of the model's folder"
        )
    path = Path(os.path.realpath(root / given))
    if not path.is_relative_to(root):
        raise UsageError(f"{what} is said to lie in {location!r}, which leads out of {root}")
    return path


def _number(said: dict[str, str], key: str, what: str, default: int) -> int:
    text = said.get(key, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise UsageError(f"{what} has {key} {text[:40]!r} in its external data: no number of bytes")
    return int(text)


def _read(path: Path, offset: int, nbytes: int, what: str) -> torch.Tensor:
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise StorageError(f"{what} lies in {path}, which cannot be opened: {error.strerror}") from error
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode):
        os.close(file)
        raise UsageError(f"{what} is said to lie in {path}, which is no regular file")
    with open(file, "rb", buffering=0) as opened:
        if offset + nbytes > found.st_size:
            raise DamagedError(
                f"{what} needs bytes {offset} to {offset + nbytes} of {path}, which has {found.st_size}"
            )
        content = torch.empty(nbytes, dtype=torch.uint8)
        view = memoryview(content.numpy())  # type: ignore[arg-type]
        opened.seek(offset)
        done = 0
        while done < nbytes:
            now = opened.readinto(view[done : done + 2**30])
            if not now:
                raise DamagedError(f"{what}: {path} ended after {offset + done} bytes")
            done += now
    return content
