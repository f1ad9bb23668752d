"""The one place that touches torch's own files, which are pickles.

Reading goes through torch's restricted unpickler alone (`weights_only=True`), which makes tensors and
plain containers and calls nothing that a file names. Writing runs no code of a file. Nothing of ours is
stored this way: only what comes from elsewhere, or goes there because somebody asked for it.
`tests/test_rules.py` allows these calls in this file and nowhere else.
"""

from __future__ import annotations

import errno
import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torchrelay.errors import BlobError, FormatError, StorageError
from torchrelay.jobs.runtime import check_file

_PROTOCOL = b"\x80"
"""How files of torch before 1.6 begin, and those that were written the same way since."""


def read_torch_file(path: Path) -> Any:
    """What a file of `torch.save` holds; tensors stay in the mapped file until they are used.

    Raises UsageError where there is no file, FormatError for a file that is none of torch's or holds
    other objects than tensors, numbers, texts and containers, StorageError when it cannot be read.
    """
    check_file(path, "a file of torch.save")
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=_mappable(path))
    except Exception as error:  # a hostile file can make the unpickler raise anything
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # EINVAL: torch seeks where nothing is
            raise StorageError(f"cannot read {path}: {error.strerror or error}") from error
        raise FormatError(f"{path} is {_why_not(path, error)}") from error


def write_torch_file(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file that `torch.load(path, weights_only=True)` reads; raises StorageError."""
    try:
        with path.open("xb") as file:
            torch.save(dict(content), file)
    except (OSError, RuntimeError) as error:
        raise StorageError(f"cannot write {path}: {error}") from error


def check_savable(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse, by BlobError with its name, a tensor whose element type torch cannot write or read."""
    known: set[torch.dtype] = set()
    for name, tensor in tensors.items():
        if tensor.dtype in known:
            continue
        try:
            torch.load(saved_bytes(torch.empty(0, dtype=tensor.dtype)), weights_only=True)
        except Exception as error:  # KeyError, RuntimeError, UnpicklingError: it depends on the type
            raise BlobError(f"{name}: torch cannot save tensors of {tensor.dtype}: leave it out") from error
        known.add(tensor.dtype)


def saved_bytes(value: Any) -> io.BytesIO:
    """A value as `torch.save` writes it, which is what DCP's load planner takes."""
    memory = io.BytesIO()
    torch.save(value, memory)
    memory.seek(0)
    return memory


def _why_not(path: Path, error: Exception) -> str:
    """What a file is that was refused, and why, without torch's advice to run its code."""
    if not (_mappable(path) or _beginning(path).startswith(_PROTOCOL)):
        return "no file of torch.save: give one that is, or say which format it has (--from)"
    if type(error).__name__ != "UnpicklingError":
        return f"no file of torch.save, or a damaged one: {_reason(error)}"
    return f"no file of torch.save that can be read without running its code: {_reason(error)}"


def _reason(error: Exception) -> str:
    text = str(error)
    refused = re.search(r"Unsupported [^.]*: ?(?:GLOBAL )?[\w.]+", text)
    if refused is not None:
        return f"{refused[0]}; save tensors, numbers, texts and containers of these (a state_dict)"
    told = re.search(r"WeightsUnpickler error:\s*([^\n]*)", text)  # around it stands torch's advice
    first = " ".join((told[1] if told else text.partition("\n")[0]).split())
    return f"{type(error).__name__} {first}".rstrip()[:200]


def _mappable(path: Path) -> bool:
    """Files of torch before 1.6 are no archives and cannot be mapped."""
    return _beginning(path) == b"PK\x03\x04"


def _beginning(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(4)
