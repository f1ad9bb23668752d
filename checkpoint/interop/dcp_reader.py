"""Epochs as a storage that torch.distributed.checkpoint loads from, resharding included.

dcp.load({"model": model.state_dict()}, storage_reader=DcpReader("runs/hello", epoch=3))
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from torchrelay.checkpoint.format.manifest.schema import OF_POSITION
from torchrelay.checkpoint.interop.torch_files import saved_bytes
from torchrelay.checkpoint.load.checkpoint import Checkpoint, open_checkpoint
from torchrelay.checkpoint.load.handle import TensorHandle
from torchrelay.checkpoint.load.lookup import Rename, choose, renamed_all, several_owners, split_name
from torchrelay.checkpoint.state.gate import gate

BATCH_BYTES = 64 << 20


class DcpReader(StorageReader):
    """Reads one epoch; every byte that is loaded is verified.

    `where` and `epoch` are those of `open_checkpoint`. DCP's names are our leaf names
    (`model.layer.weight`), changed by `rename`; what every node has of its own is called `node:name`.
    Errors come as DCP wraps them (CheckpointException), with ours inside.
    """

    def __init__(
        self, where: str | os.PathLike[str], epoch: int | str = "last", *, rename: Rename | None = None
    ) -> None:
        super().__init__()
        self._checkpoint: Checkpoint = open_checkpoint(where, epoch)
        self._names = renamed_all(_addresses(self._checkpoint), rename)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new load of the same epoch begins; an id that DCP passes changes nothing."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Never chosen by DCP itself: give this reader as `storage_reader`."""
        return False

    def read_metadata(self) -> Metadata:
        """All tensors, each as one chunk, and all values."""
        known = {**self._tensors(), **dict.fromkeys(self._values(), BytesStorageMetadata())}
        return Metadata(state_dict_metadata=known)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Nothing to do: the epoch was opened when this reader was made."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Do the plan's reads, one after another."""
        gate()
        for item in plan.items:
            name = self._names[item.storage_index.fqn]
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, saved_bytes(self._checkpoint.value(name)))
            else:
                target = planner.resolve_tensor(item).detach()
                _copy(self._checkpoint[name], item, target)
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _values(self) -> list[str]:
        values = set(_addresses(self._checkpoint, "value"))
        return [name for name, old in self._names.items() if old in values]

    def _tensors(self) -> dict[str, Any]:
        tensors = set(_addresses(self._checkpoint, "tensor"))
        return {
            name: _described(self._checkpoint[old]) for name, old in self._names.items() if old in tensors
        }


def _addresses(checkpoint: Checkpoint, *kinds: str) -> list[str]:
    """All leaves, those that nodes have of their own by `node:name`; without random states."""
    manifest = checkpoint.manifest
    removed = manifest.removed(checkpoint.entry.groups)
    left_out = {leaf.name for leaf in manifest.leaves if leaf.role in OF_POSITION or leaf.group in removed}
    found = []
    for kind in kinds or ("tensor", "value"):
        of_kind = [name for name, rows in manifest.rows.items() if manifest.leaves[rows[0]].kind == kind]
        shared = [name for name in of_kind if not several_owners(manifest, name)]
        found += shared
        for node in manifest.world.nodes if len(shared) < len(of_kind) else ():
            own = choose(manifest, f"{node}:*", kind, strict=False)
            found += [f"{node}:{name}" for name, _ in own if name not in shared]
    return [name for name in found if split_name(name, manifest.world.names)[1] not in left_out]


def _described(handle: TensorHandle) -> TensorStorageMetadata:
    chunk = ChunkStorageMetadata(torch.Size([0] * len(handle.shape)), handle.shape)
    return TensorStorageMetadata(TensorProperties(dtype=handle.dtype), handle.shape, [chunk])


def _copy(handle: TensorHandle, item: ReadItem, target: torch.Tensor) -> None:
    """The asked part of a tensor into `target`, at most 64 MiB (or one row) of it in memory at a time."""
    box = [(start, start + length) for start, length in zip(item.storage_offsets, item.lengths, strict=True)]
    if not box:
        target.copy_(handle.read())
        return
    rows = max(1, target.shape[0])
    step = max(1, BATCH_BYTES * rows // max(1, target.nbytes))
    for first in range(0, target.shape[0], step):
        last = min(first + step, target.shape[0])
        part = handle.read_box([(box[0][0] + first, box[0][0] + last), *box[1:]])
        target[first:last].copy_(part)
