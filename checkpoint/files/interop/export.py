"""Epochs in other formats: what of them goes out, and under which names."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

from torchrelay.checkpoint.files.interop.safetensors import (
    Content,
    Outgoing,
    mapped_tensors,
    write_huggingface,
    write_safetensors,
)
from torchrelay.checkpoint.files.interop.torch_files import check_savable, write_torch_file
from torchrelay.checkpoint.files.publish import check_free, check_free_at, publish_anywhere
from torchrelay.checkpoint.format.dtypes import by_name, memory_of
from torchrelay.checkpoint.format.manifest.schema import OF_POSITION
from torchrelay.checkpoint.load.checkpoint import Checkpoint, open_checkpoint
from torchrelay.checkpoint.load.lookup import (
    Nodes,
    check_decided,
    check_prefix_used,
    choose,
    find_row,
    node_for,
    node_of,
    pattern_list,
    several_owners,
)
from torchrelay.checkpoint.load.tensors import Cast, cast_of, check_types_used, checked_cast
from torchrelay.checkpoint.state.names import without_reserved
from torchrelay.checkpoint.storage.open import is_remote
from torchrelay.errors import UsageError
from torchrelay.jobs.runtime import local_directory
from torchrelay.records import dataclass


def content_of(
    checkpoint: Checkpoint,
    blobs: str | Sequence[str] | None,
    prefix: str,
    dtype: Cast,
    nodes: Nodes = None,
) -> Content:
    """Tensors and values by pattern; without one all but random states, and values that differ by node.

    `prefix` is taken off the names that begin with it. `nodes` says whose value is meant of what differs
    between nodes. Raises UsageError for a pattern that matches nothing, for names that become one, and for
    a tensor with several values of which nobody said which.
    """
    checked_cast(dtype)
    manifest = checkpoint.manifest
    tensors: dict[str, Outgoing] = {}
    ties: dict[str, str] = {}
    chosen = _chosen(checkpoint, blobs, nodes)
    new_names = _new_names([name for name, _, _ in chosen], prefix)
    check_types_used((*new_names.values(), *manifest.rows), dtype)
    places = {name: (find_row(manifest, name, node), node) for name, node, kind in chosen if kind == "tensor"}
    # Of several names the one that the program had first, as readers of other formats expect.
    first = {place: name for name, place in reversed(places.items())}
    first.update({place: name for name, place in places.items() if manifest.leaves[place[0]].name == name})
    for name, place in places.items():
        new = new_names[name]
        if first[place] == name:
            tensors[new] = _outgoing(checkpoint, name, place[1], cast_of(new, dtype))
        else:
            ties[new] = new_names[first[place]]
    values: dict[str, Any] = {
        new_names[name]: checkpoint.value(_address(name, node))
        for name, node, kind in chosen
        if kind == "value"
    }
    taken = {name for name, _, _ in chosen}
    left = [leaf.name for leaf in manifest.leaves if leaf.name not in taken] if blobs is None else []
    own = {new_names[name]: node for name, node, _ in chosen if node and several_owners(manifest, name)}
    return Content(tensors, values, ties, tuple(dict.fromkeys(left)), own)


def _chosen(
    checkpoint: Checkpoint, blobs: str | Sequence[str] | None, nodes: Nodes
) -> list[tuple[str, str | None, str]]:
    if blobs is None:
        return _all_leaves(checkpoint, nodes)
    manifest, patterns = checkpoint.manifest, pattern_list(blobs)
    found: list[tuple[str, str | None, str]] = []
    for pattern in patterns:
        hits = [
            (name, node, kind)
            for kind in ("tensor", "value")
            for name, node in choose(manifest, pattern, kind, strict=False, nodes=nodes)
        ]
        if not hits:
            choose(manifest, pattern, "tensor", strict=True)  # says what there is
        found += hits
    found = list(dict.fromkeys(found))
    if len({name for name, _, _ in found}) != len(found):
        raise UsageError(f"{patterns} mean leaves of several nodes under one name: export them one by one")
    return found


def _all_leaves(checkpoint: Checkpoint, nodes: Nodes) -> list[tuple[str, str | None, str]]:
    manifest = checkpoint.manifest
    removed = manifest.removed(checkpoint.entry.groups)
    left_out = {leaf.name for leaf in manifest.leaves if leaf.role in OF_POSITION or leaf.group in removed}
    kinds = {name: manifest.leaves[rows[0]].kind for name, rows in manifest.rows.items()}
    wanted = [name for name in kinds if name not in left_out]
    check_decided(manifest, [name for name in wanted if kinds[name] == "tensor"], nodes)
    decided = [
        name
        for name in wanted
        if node_of(manifest, name, nodes) is not None or not several_owners(manifest, name)
    ]
    found = [(name, node_for(manifest, name, nodes), kinds[name]) for name in decided]
    return sorted(found, key=lambda one: one[2])


def _new_names(names: Sequence[str], prefix: str) -> dict[str, str]:
    """The names outside: without the prefix, and without what wrappers inserted into older epochs' names."""
    found: dict[str, str] = {}
    taken: dict[str, str] = {}
    check_prefix_used(names, prefix)
    for name in names:
        new = without_reserved(name).removeprefix(prefix)
        if not new or taken.setdefault(new, name) != name:
            raise UsageError(f"prefix={prefix!r} leaves {name!r} without a name of its own: choose another")
        found[name] = new
    return found


def _outgoing(checkpoint: Checkpoint, name: str, node: str | None, cast: Any) -> Outgoing:
    handle = checkpoint[_address(name, node)]
    floating = handle.dtype.is_floating_point
    element = by_name(str(handle.dtype).removeprefix("torch."))
    return Outgoing(element, tuple(handle.shape), handle.fill, cast if floating else None)


def _address(name: str, node: str | None) -> str:
    return name if node is None else f"{node}:{name}"


def mapping_of(content: Content, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """One flat mapping of tensors, the same objects for ties, and values."""
    return {
        **tensors,
        **{name: tensors[kept] for name, kept in content.ties.items()},
        **content.values,
    }


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
    from torchrelay.checkpoint.files.interop.dcp import write_dcp

    write_dcp(at, _mapped(content, at))
