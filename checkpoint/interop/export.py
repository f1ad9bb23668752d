"""Epochs in other formats: safetensors, Hugging Face directories, torch.save, DCP."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

from torchrelay.checkpoint.format.dtypes import memory_of
from torchrelay.checkpoint.interop.content import Content
from torchrelay.checkpoint.interop.epoch_content import content_of, mapping_of
from torchrelay.checkpoint.interop.huggingface import write_huggingface
from torchrelay.checkpoint.interop.publishing import check_free
from torchrelay.checkpoint.interop.remote_publishing import check_free_at, publish_anywhere
from torchrelay.checkpoint.interop.safetensors_files import write_safetensors
from torchrelay.checkpoint.interop.scratch import mapped_tensors
from torchrelay.checkpoint.interop.torch_files import check_savable, write_torch_file
from torchrelay.checkpoint.load.checkpoint import open_checkpoint
from torchrelay.checkpoint.load.handle import Cast
from torchrelay.checkpoint.load.lookup import Nodes
from torchrelay.checkpoint.storage.open import is_remote
from torchrelay.errors import UsageError
from torchrelay.jobs.runtime import local_directory
from torchrelay.records import dataclass

FORMATS = ("safetensors", "hf", "torch", "dcp")
SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class Exported:
    """What an export wrote; `left_out` names the leaves that the format, or nobody, asked for.

    `nodes` has, by the new names of what differs between nodes, whose value was taken.
    """

    path: Path | str
    tensors: int
    values: int
    bytes: int
    left_out: tuple[str, ...]
    nodes: Mapping[str, str] = field(default_factory=dict)


def export_checkpoint(
    where: str | os.PathLike[str],
    path: str | os.PathLike[str],
    epoch: int | str = "last",
    *,
    to: str = "safetensors",
    blobs: str | Sequence[str] | None = None,
    prefix: str = "",
    dtype: Cast = None,
    shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
    nodes: Nodes = None,
) -> Exported:
    """Write an epoch, or what `blobs` (names or patterns) means of it, in another format.

    `to` is `safetensors` (one file), `hf` (a directory of files of at most `shard_bytes` of data, with
    an index), `torch` (one file for `torch.load`), or `dcp` (a directory). The first two hold tensors
    only. `prefix`, with which some name must begin, is taken off; `dtype` converts floating-point tensors,
    all or by pattern of the new names. `nodes` says whose value is taken of what differs between nodes: a
    node, or one per blob; a tensor with several values is refused without it. Every byte is verified on its
    way; memory stays bounded. The result appears whole and durable or not at all; a file is replaced only
    with `overwrite`, a directory never. `path` may be a URL: files are then made in the directory for
    temporary ones, and sent, an index last.
    Raises UsageError, BlobError for what the format cannot hold, and what `open_checkpoint` raises.
    """
    if to not in FORMATS:
        raise UsageError(f"to={to!r} is no format: give one of {', '.join(FORMATS)}")
    if type(shard_bytes) is not int or shard_bytes < 1:
        raise UsageError(f"shard_bytes is {shard_bytes!r}; it is a whole number from 1")
    directory = to in ("hf", "dcp")
    if is_remote(path):
        check_free_at(str(path), overwrite=overwrite, directory=directory)
    else:
        check_free(Path(local_directory(path, "the target")), overwrite=overwrite, directory=directory)
    content = content_of(open_checkpoint(where, epoch), blobs, prefix, dtype, nodes)
    if not content.tensors and to in ("safetensors", "hf"):
        raise UsageError(f"there is no tensor to export, and {to} holds nothing else")
    writers: dict[str, Callable[[Path], None]] = {
        "safetensors": lambda at: write_safetensors(at, content.tensors, content.ties),
        "hf": lambda at: write_huggingface(at, content, shard_bytes),
        "torch": lambda at: write_torch_file(at, _mapped(content, at)),
        "dcp": lambda at: _write_dcp(content, at),
    }
    target = publish_anywhere(path, writers[to], overwrite=overwrite, directory=directory)
    kept = content.values if to in ("torch", "dcp") else {}
    lost = [name for name in content.values if name not in kept]
    nbytes = sum(tensor.nbytes for tensor in content.tensors.values())
    count = len(content.tensors) + len(content.ties)
    return Exported(target, count, len(kept), nbytes, (*content.left_out, *lost), content.nodes)


def _mapped(content: Content, at: Path) -> dict[str, Any]:
    """Everything as a mapping, tensors in a nameless file beside the target."""
    shapes = {name: (tensor.element, tensor.shape) for name, tensor in content.tensors.items()}
    tensors = mapped_tensors(at.parent, shapes)
    check_savable(tensors)
    for name, tensor in content.tensors.items():
        memory, at_byte = memory_of(tensors[name]), 0
        for piece in tensor.pieces():
            memory[at_byte : at_byte + len(piece)] = piece
            at_byte += len(piece)
    return mapping_of(content, tensors)


def _write_dcp(content: Content, at: Path) -> None:
    from torchrelay.checkpoint.interop.dcp_files import write_dcp

    write_dcp(at, _mapped(content, at))
