"""Tensors in a file without a name: as much memory as the system can spare, and no more."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from torchrelay.checkpoint.format.dtypes import ElementType, torch_dtype
from torchrelay.errors import StorageError

_ALIGNMENT = 64
Shapes = Mapping[str, tuple[ElementType, tuple[int, ...]]]


def mapped_tensors(directory: Path, shapes: Shapes) -> dict[str, torch.Tensor]:
    """Tensors whose bytes lie in a nameless file in `directory`, gone with the last of them.

    The kernel writes their pages out when memory is short. Raises StorageError where there is no space.
    """
    places: dict[str, int] = {}
    end = 0
    for name, (element, shape) in shapes.items():
        places[name] = end
        end += -(-element.nbytes(shape) // _ALIGNMENT) * _ALIGNMENT
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            if end:
                os.posix_fallocate(file.fileno(), 0, end)
            memory = mmap.mmap(file.fileno(), end) if end else None
    except OSError as error:
        raise StorageError(
            f"cannot reserve {end} bytes in {directory}: {error.strerror or error}; free some space"
        ) from error
    return {name: tensor_in(memory, places[name], *shapes[name]) for name in shapes}


def tensor_in(
    memory: mmap.mmap | None, offset: int, element: ElementType, shape: tuple[int, ...]
) -> torch.Tensor:
    """A tensor that lies in a mapping, which lives as long as it."""
    nbytes = element.nbytes(shape)
    if memory is None or nbytes == 0:
        return torch.empty(shape, dtype=torch_dtype(element))
    raw = torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=offset)
    if offset % element.itemsize:
        raw = raw.clone()  # other writers need not align
    return raw.view(torch_dtype(element)).reshape(shape)
