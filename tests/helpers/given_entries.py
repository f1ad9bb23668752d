"""Shards of tensors that are given one by one, as tests think of them; the writer takes columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrelay.checkpoint.format.names import Key
from torchrelay.checkpoint.format.shard import writer
from torchrelay.checkpoint.format.shard.entries import Entries, described
from torchrelay.checkpoint.format.shard.header import ShardIdentity
from torchrelay.checkpoint.format.shard.writer import ShardReport
from torchrelay.checkpoint.storage.base import Storage

if TYPE_CHECKING:
    import torch


class ShardEntry(NamedTuple):
    """A tensor, or a piece of one: `dtype` and `shape` are those of the whole leaf, `data` what is stored."""

    key: Key
    dtype: str
    shape: tuple[int, ...]
    data: torch.Tensor | memoryview


def entries_of(given: Sequence[ShardEntry]) -> Entries:
    """The columns of these."""
    keys, types = [entry.key for entry in given], [entry.dtype for entry in given]
    return described(keys, types, [entry.shape for entry in given]).of([entry.data for entry in given])


def write_shard(
    storage: Storage, directory: str, identity: ShardIdentity, given: Sequence[ShardEntry], **more: Any
) -> list[ShardReport]:
    """Write the files of these."""
    return writer.write_shard(storage, directory, identity, entries_of(given), **{"values": {}, **more})
