"""The buffers that large files are written from: made in `setup`, for fresh memory would hold up a save."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import torch

from torchrelay.checkpoint.format.shard import writer
from torchrelay.checkpoint.state.kinds import Kind, kind_of
from torchrelay.checkpoint.state.leaves.tree import container_tensors
from torchrelay.checkpoint.storage.base import Placed, Storage
from torchrelay.checkpoint.storage.local_io import WORTH_IT
from torchrelay.checkpoint.storage.threads import WRITERS
from torchrelay.errors import StorageError
from torchrelay.jobs.session import Session


def touch_buffers(storage: Storage, session: Session) -> None:
    """Make them where a share of the registered tensors is worth direct writes; else a save makes its own."""
    if isinstance(storage, Placed) and sum(_sizes(session)) // len(session.nodes) >= WORTH_IT:
        with suppress(StorageError):  # a save that finds no memory either says so
            writer.pool().touch(WRITERS)


def _sizes(session: Session) -> Iterator[int]:
    """Bytes of tensors, of those in containers, and of modules' parameters; nothing else is looked into."""
    for place in session.local_nodes:
        for name, entry in session.workspace(place.name).entries().items():
            value = entry.value
            if entry.blob is not None and isinstance(value, torch.nn.Module):
                yield from map(_size, value.parameters())
            elif entry.blob is not None and isinstance(value, torch.Tensor):
                yield _size(value)
            elif entry.blob is not None and kind_of(value) is Kind.CONTAINER:
                yield from (_size(one) for _, one in container_tensors(name, value))


def _size(tensor: torch.Tensor) -> int:
    """None of what no save stores: it says so, and by name."""
    return tensor.nbytes if tensor.layout == torch.strided else 0
