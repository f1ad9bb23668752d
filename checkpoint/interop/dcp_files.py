"""Directories of torch.distributed.checkpoint (DCP), written and read in one process by DCP itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import save

from torchrelay.checkpoint.format.dtypes import by_name, logical_name
from torchrelay.checkpoint.interop.content import Incoming
from torchrelay.checkpoint.interop.scratch import mapped_tensors
from torchrelay.errors import BlobError, FormatError, RelayError, StorageError, UsageError

T = TypeVar("T")


def write_dcp(directory: Path, content: Mapping[str, Any]) -> None:
    """Let DCP save a flat state dict into an empty directory.

    Raises BlobError for element types whose size DCP cannot tell, StorageError for what it met.
    """
    for name, value in content.items():
        if isinstance(value, torch.Tensor):
            _check_sized(name, value.dtype)
    # More threads than one hide errors of the disk: a save would seem to have worked.
    writer = FileSystemWriter(directory, thread_count=1, sync_files=True)
    try:
        _alone(lambda: save(dict(content), storage_writer=writer, no_dist=True))
    except (Exception, CheckpointException) as error:
        raise StorageError(f"DCP could not write {directory}: {_reason(error)}") from error


def read_dcp(directory: Path, scratch: Path, *, trust: bool) -> Incoming:
    """All that a DCP directory holds, tensors in a nameless file in `scratch`.

    DCP's metadata is a pickle, which can run any code when it is read: UsageError unless `trust` says
    that the directory comes from somebody who may. FormatError for what DCP cannot read.
    """
    if not (directory / ".metadata").is_file():
        raise UsageError(f"{directory} has no .metadata: give a directory that DCP wrote")
    if not trust:
        raise UsageError(
            f"{directory}: reading DCP's metadata can run code that its writer chose (it is a pickle). Say "
            "trust=True (--i-trust-this) if you know who wrote it"
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
    """Loads everything, in the tree that was saved, into tensors that exist already."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        super().__init__()
        self._tensors = tensors

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self.state_dict = {name: self._tensors.get(name, one) for name, one in self.state_dict.items()}
        _replace(self.original_state_dict, metadata.planner_data or {}, self._tensors)


def _replace(tree: Any, paths: Mapping[str, tuple[Any, ...]], tensors: Mapping[str, Any]) -> None:
    for name, tensor in tensors.items():
        *way, last = paths.get(name, (name,))
        node = tree
        for step in way:
            node = node[step]
        node[last] = tensor


def _check_sized(name: str, dtype: torch.dtype) -> None:
    try:
        if dtype is not torch.bool:
            (torch.finfo if dtype.is_floating_point or dtype.is_complex else torch.iinfo)(dtype)
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise BlobError(f"{name}: DCP cannot save tensors of {dtype}: leave it out") from error


def _alone(work: Callable[[], T]) -> T:
    """DCP says at every call that it runs in one process, which is what we ask for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return work()


def _reason(error: BaseException) -> str:
    """The last line: that of the failure itself, where DCP puts the ranks' tracebacks into one text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else 'no reason given'}"[:300]
