"""Read and write directories of torch.distributed.checkpoint (DCP), and let it load from epochs.

dcp.load({"model": model.state_dict()}, storage_reader=DcpReader("runs/hello", epoch=3))
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from torchrelay.checkpoint.files.tensor_files import Incoming, mapped_tensors, saved_bytes
from torchrelay.checkpoint.format.dtypes import by_name, logical_name
from torchrelay.checkpoint.format.manifest.schema import OF_POSITION
from torchrelay.checkpoint.load.checkpoint import Checkpoint, open_checkpoint
from torchrelay.checkpoint.load.lookup import Rename, choose, renamed_all, several_owners, split_name
from torchrelay.checkpoint.load.tensors import TensorHandle
from torchrelay.checkpoint.state.steps import gate
from torchrelay.errors import BlobError, FormatError, RelayError, StorageError, UsageError

T = TypeVar("T")


def write_dcp(directory: Path, content: Mapping[str, Any]) -> None:
    """Have DCP save a flat state dict into an empty directory; raises BlobError or StorageError."""
    for name, value in content.items():
        if isinstance(value, torch.Tensor) and (dtype := value.dtype) is not torch.bool:
            try:
                (torch.finfo if dtype.is_floating_point or dtype.is_complex else torch.iinfo)(dtype)
            except (TypeError, RuntimeError, NotImplementedError) as error:
                raise BlobError(f"{name}: DCP cannot save tensors of {dtype}: leave it out") from error
    # With more than one thread errors of the disk are lost: a save would seem to have worked.
    writer = FileSystemWriter(directory, thread_count=1, sync_files=True)
    try:
        _alone(lambda: save(dict(content), storage_writer=writer, no_dist=True))
    except (Exception, CheckpointException) as error:
        raise StorageError(f"DCP could not write {directory}: {_reason(error)}") from error


def read_dcp(directory: Path, scratch: Path, *, trust: bool) -> Incoming:
    """Read all of a DCP directory, tensors into an unnamed file in `scratch`.

    DCP's metadata is a pickle, which can run any code when it is read: raises UsageError unless `trust` is
    set. Raises FormatError if DCP cannot read it.
    """
    if not (directory / ".metadata").is_file():
        raise UsageError(f"{directory} has no .metadata: give a directory that DCP wrote")
    if not trust:
        raise UsageError(
            f"{directory}: reading DCP's metadata can run code of its writer (it is a pickle). Give "
            "trust=True (--i-trust-this) if you trust its source"
        )
    try:
        return Incoming(_alone(lambda: _read(directory, scratch)))
    except RelayError:
        raise
    except (Exception, CheckpointException) as error:  # a damaged pickle can raise anything
        raise FormatError(f"{directory} cannot be read by DCP: {_reason(error)}") from error


def _read(directory: Path, scratch: Path) -> dict[str, Any]:
    reader = FileSystemReader(directory)
    metadata = reader.read_metadata()
    shapes = {
        name: (by_name(logical_name(one.properties.dtype)), tuple(one.size))
        for name, one in metadata.state_dict_metadata.items()
        if isinstance(one, TensorStorageMetadata)
    }
    found: dict[str, Any] = {}
    _load_state_dict(
        found, storage_reader=reader, planner=_Into(mapped_tensors(scratch, shapes)), no_dist=True
    )
    return found


class _Into(_EmptyStateDictLoadPlanner):
    """Loads everything, in the saved tree, into existing tensors."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        super().__init__()
        self._tensors = tensors

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self.state_dict = {name: self._tensors.get(name, one) for name, one in self.state_dict.items()}
        for name, tensor in self._tensors.items():
            *way, last = (metadata.planner_data or {}).get(name, (name,))
            node = self.original_state_dict
            for step in way:
                node = node[step]
            node[last] = tensor


def _alone(work: Callable[[], T]) -> T:
    """Suppress DCP's warning that it runs in one process, which is intended."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return work()


def _reason(error: BaseException) -> str:
    """The last line, which is the failure itself if DCP joins the ranks' tracebacks into one text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else 'no reason given'}"[:300]


BATCH_BYTES = 64 << 20


class DcpReader(StorageReader):
    """Storage reader of DCP for one epoch; every byte that is loaded is verified.

    DCP's names are leaf names (`model.layer.weight`); a leaf that differs between nodes is `node:name`. DCP
    wraps errors in CheckpointException.

    Args:
        where: as for `open_checkpoint`.
        epoch: as for `open_checkpoint`.
        rename: new names by stored names.

    Example:
        dcp.load({"model": model.state_dict()}, storage_reader=DcpReader("runs/hello", epoch=3))
    """

    def __init__(
        self, where: str | os.PathLike[str], epoch: int | str = "last", *, rename: Rename | None = None
    ) -> None:
        super().__init__()
        self._checkpoint: Checkpoint = open_checkpoint(where, epoch)
        self._names = renamed_all(_addresses(self._checkpoint), rename)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another load of the same epoch; the id is ignored."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False, so that DCP never chooses this reader by itself."""
        return False

    def read_metadata(self) -> Metadata:
        """Return all tensors, each as one chunk, and all values."""
        tensors, values = (set(_addresses(self._checkpoint, kind)) for kind in ("tensor", "value"))
        known: dict[str, Any] = {}
        for name, old in self._names.items():
            if old in tensors:
                handle = self._checkpoint[old]
                chunk = ChunkStorageMetadata(torch.Size([0] * len(handle.shape)), handle.shape)
                form = TensorProperties(dtype=handle.dtype)
                known[name] = TensorStorageMetadata(form, handle.shape, [chunk])
        known |= {name: BytesStorageMetadata() for name, old in self._names.items() if old in values}
        return Metadata(state_dict_metadata=known)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Do nothing: the epoch is open already.

        Args:
            metadata: ignored.
            is_coordinator: ignored.

        Example:
            Called by `dcp.load`.
        """

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Do the plan's reads, one after another.

        Args:
            plan: DCP's reads.
            planner: gets the bytes and tensors.

        Returns:
            A completed future.

        Example:
            Called by `dcp.load`.
        """
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


def _addresses(checkpoint: Checkpoint, *kinds: str) -> list[str]:
    """All leaves except random states; those that differ between nodes as `node:name`."""
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


def _copy(handle: TensorHandle, item: ReadItem, target: torch.Tensor) -> None:
    """Copy the requested part of a tensor into `target`, at most 64 MiB (or one row) at a time."""
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
