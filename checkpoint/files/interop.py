"""Export epochs to other formats, and import checkpoints from them.

A mapping of names to tensors, as a module's `state_dict`, becomes leaves that load into a module. Deeper
structures (an optimizer's state dict) become one value with tensors inside, which is loaded unchanged. All
else at the top level is a blob by itself.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from torchrelay.checkpoint.files.publish import check_free, expanded, fetched, publish
from torchrelay.checkpoint.files.tensor_files import (
    ExportContent,
    ExportedTensor,
    Incoming,
    check_savable,
    mapped_tensors,
    read_huggingface,
    read_safetensors,
    read_torch_file,
    write_huggingface,
    write_safetensors,
    write_torch_file,
)
from torchrelay.checkpoint.format.canonical_json import sha256
from torchrelay.checkpoint.format.dtypes import all_dense, by_name, memory_of
from torchrelay.checkpoint.format.manifest import codec
from torchrelay.checkpoint.format.manifest.schema import OF_POSITION, Manifest, ShardRow
from torchrelay.checkpoint.format.names import attempt_directory, manifest_path
from torchrelay.checkpoint.format.position import CommittedPosition, Facts, Position
from torchrelay.checkpoint.format.shard.header import ShardIdentity
from torchrelay.checkpoint.format.shard.writer import write_shard
from torchrelay.checkpoint.format.values import encode
from torchrelay.checkpoint.load.checkpoint import Checkpoint, open_checkpoint
from torchrelay.checkpoint.load.lookup import (
    Nodes,
    check_decided,
    choose,
    find_row,
    node_for,
    node_of,
    pattern_list,
    several_owners,
    without_prefix,
)
from torchrelay.checkpoint.load.tensors import Cast, cast_of, check_types_used, checked_cast
from torchrelay.checkpoint.log.view import LeaseInfo
from torchrelay.checkpoint.log.writer import LogWriter
from torchrelay.checkpoint.save.assignments import NodeClass
from torchrelay.checkpoint.save.commit import compose, world_of
from torchrelay.checkpoint.save.plan import plan_classes
from torchrelay.checkpoint.state.flatten import leaves_of
from torchrelay.checkpoint.state.leaf import MAIN_GROUP, Leaf, Role, Value, spec_of
from torchrelay.checkpoint.state.names import without_reserved
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.checkpoint.storage.work import progress
from torchrelay.errors import UsageError
from torchrelay.jobs.cluster import NodePlace, check_blob_names
from torchrelay.jobs.runtime import is_directory
from torchrelay.records import dataclass


def content_of(
    checkpoint: Checkpoint, blobs: str | Sequence[str] | None, prefix: str, dtype: Cast, nodes: Nodes = None
) -> ExportContent:
    """Tensors and values by pattern; by default all but random states, and values that differ by node.

    `prefix` is removed from the names that begin with it. `nodes` chooses the node of leaves that differ.
    Raises UsageError for a pattern that matches nothing, for duplicate names, and for a tensor with several
    values and no chosen node.
    """
    checked_cast(dtype)
    manifest = checkpoint.manifest
    tensors: dict[str, ExportedTensor] = {}
    ties: dict[str, str] = {}
    chosen = (
        _all_leaves(checkpoint, nodes) if blobs is None else _matching(manifest, pattern_list(blobs), nodes)
    )
    # Older epochs contain names of wrappers.
    outside = without_prefix((name for name, _, _ in chosen), prefix, without_reserved)
    new_names = {name: new for new, name in outside.items()}
    check_types_used((*new_names.values(), *manifest.rows), dtype)
    places = {name: (find_row(manifest, name, node), node) for name, node, kind in chosen if kind == "tensor"}
    # Of several names the first in the program, as readers of other formats expect.
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
    return ExportContent(tensors, values, ties, tuple(dict.fromkeys(left)), own)


def _matching(manifest: Manifest, patterns: Sequence[str], nodes: Nodes) -> list[tuple[str, str | None, str]]:
    """Names, nodes and kinds of the leaves that match."""
    found: list[tuple[str, str | None, str]] = []
    for pattern in patterns:
        hits = [
            (name, node, kind)
            for kind in ("tensor", "value")
            for name, node in choose(manifest, pattern, kind, strict=False, nodes=nodes)
        ]
        if not hits:
            choose(manifest, pattern, "tensor", strict=True)  # raises with the alternatives
        found += hits
    found = list(dict.fromkeys(found))
    if len({name for name, _, _ in found}) != len(found):
        raise UsageError(f"{patterns} match leaves of several nodes under one name: export them one by one")
    return found


def _all_leaves(checkpoint: Checkpoint, nodes: Nodes) -> list[tuple[str, str | None, str]]:
    """All leaves that are exported by default."""
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


def _outgoing(checkpoint: Checkpoint, name: str, node: str | None, cast: Any) -> ExportedTensor:
    handle = checkpoint[_address(name, node)]
    floating = handle.dtype.is_floating_point
    element = by_name(str(handle.dtype).removeprefix("torch."))
    return ExportedTensor(element, tuple(handle.shape), handle.fill, cast if floating else None)


def _address(name: str, node: str | None) -> str:
    return name if node is None else f"{node}:{name}"


FORMATS = ("safetensors", "hf", "torch", "dcp")
SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class Exported:
    """Result of an export; `left_out` names leaves that the format cannot hold, or that were not requested.

    `nodes` has the node whose value was taken, by the new names of leaves that differ between nodes.
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
    """Write an epoch, or some blobs of it, in another format.

    Every byte is verified; memory stays bounded. The result appears complete and durable or not at all.

    Args:
        where: as for `open_checkpoint`.
        path: file or directory to write, or a URL (written to the directory for temporary files first).
        epoch: as for `open_checkpoint`.
        to: `safetensors` (one file), `hf` (a directory of files with an index), both for tensors only;
            `torch` (one file for `torch.load`), or `dcp` (a directory).
        blobs: names or patterns; None: all.
        prefix: removed from names; at least one must begin with it.
        dtype: type, or types by pattern of the new names, for floating-point tensors.
        shard_bytes: maximum bytes of data in a file of `hf`.
        overwrite: replace an existing file; a directory is never replaced.
        nodes: whose value to take of tensors that differ between nodes: a node, or one per blob.

    Returns:
        Path, numbers and bytes of what was written, and the names left out.

    Raises:
        UsageError: an argument is invalid, or the target exists.
        BlobError: the format cannot hold a tensor.

    Example:
        export_checkpoint("runs/hello", "model.safetensors", blobs="model", prefix="model.")
    """
    if to not in FORMATS:
        raise UsageError(f"invalid to={to!r}: expected one of {', '.join(FORMATS)}")
    if type(shard_bytes) is not int or shard_bytes < 1:
        raise UsageError(f"invalid shard_bytes={shard_bytes!r}: expected a whole number from 1")
    directory = to in ("hf", "dcp")
    check_free(place := expanded(path, "the target"), overwrite=overwrite, directory=directory)
    content = content_of(checkpoint := open_checkpoint(where, epoch), blobs, prefix, dtype, nodes)
    if not content.tensors and to in ("safetensors", "hf"):
        raise UsageError(f"no tensor to export, and {to} holds only tensors")
    writers: dict[str, Callable[[Path], None]] = {
        "safetensors": lambda at: write_safetensors(at, content.tensors, content.ties),
        "hf": lambda at: write_huggingface(at, content, shard_bytes),
        "torch": lambda at: write_torch_file(at, _mapped(content, at)),
        "dcp": lambda at: _dcp().write_dcp(at, _mapped(content, at)),
    }
    with progress(f"exporting epoch {checkpoint.manifest.position}", content.nbytes):
        target = publish(place, writers[to], overwrite=overwrite, directory=directory)
    values, dropped = (content.values, ()) if to in ("torch", "dcp") else ((), content.values)
    counts = len(content.tensors) + len(content.ties), len(values), content.nbytes
    return Exported(target, *counts, (*content.left_out, *dropped), content.nodes)


def _dcp() -> Any:
    return import_module("torchrelay.checkpoint.files.dcp")


def _mapped(content: ExportContent, at: Path) -> dict[str, Any]:
    """Everything as a mapping, tensors in an unnamed file beside the target."""
    shapes = {name: (tensor.element, tensor.shape) for name, tensor in content.tensors.items()}
    tensors = mapped_tensors(at.parent, shapes)
    check_savable(tensors)
    for name, tensor in content.tensors.items():
        memory, at_byte = memory_of(tensors[name]), 0
        for piece in tensor.pieces():
            memory[at_byte : at_byte + len(piece)] = piece
            at_byte += len(piece)
    ties = {name: tensors[kept] for name, kept in content.ties.items()}
    return {**tensors, **ties, **content.values}


def leaves_from(incoming: Incoming, blob: str | None) -> list[Leaf]:
    """The leaves. Flat tensors belong to `blob`, or, if it is None, to the first part of their names."""
    tree = incoming.tree
    if not isinstance(tree, Mapping) or not all(isinstance(name, str) for name in tree):
        raise UsageError(f"invalid top level {type(tree).__name__}: expected a mapping of names")
    found: list[Leaf] = []
    owners: dict[str, None] = {}
    flat = any(isinstance(value, torch.Tensor) for value in tree.values())
    for name, value in tree.items():
        if (
            isinstance(value, Mapping)
            and all(isinstance(name, str) and name for name in value)
            and any(isinstance(one, torch.Tensor) for one in value.values())
            and not any(isinstance(one, (Mapping, list, tuple)) for one in value.values())
        ):
            for key, one in value.items():
                found += _entry(f"{name}.{key}", name, one)
            owners[name] = None
        elif flat and blob is not None:
            found += _entry(f"{blob}.{name}", blob, value)
            owners[blob] = None
        else:
            owner = name.partition(".")[0]
            owners[owner] = None
            found += _entry(name, owner, value)
    full = (lambda name: f"{blob}.{name}") if flat and blob is not None else (lambda name: name)
    by_name = {leaf.name: leaf for leaf in found}
    for name, kept in incoming.ties.items():
        one = by_name[full(kept)]
        found.append(Leaf(full(name), one.blob, one.role, one.group, one.content, one.alias_of or one.name))
    if not found:
        raise UsageError("nothing to import")
    check_blob_names(owners)
    seen: set[str] = set()
    for leaf in found:
        if not all(leaf.name.split(".")) and leaf.name != leaf.blob:
            raise UsageError(f"a tensor or value of {leaf.blob!r} would be called {leaf.name!r}: rename it")
        if leaf.name in seen:
            raise UsageError(f"two tensors or values would be called {leaf.name!r}: choose another blob name")
        seen.add(leaf.name)
    return _tied(found)


def _entry(name: str, blob: str, value: Any) -> Iterator[Leaf]:
    if isinstance(value, torch.Tensor):
        role = Role.TENSOR if name == blob else Role.PARAMETER
        yield Leaf(name, blob, role, MAIN_GROUP, value.detach())
    elif name == blob:
        yield from leaves_of({name: value})
    else:
        yield Leaf(name, blob, Role.VALUE, MAIN_GROUP, Value(encode(value, name)))


def _tied(leaves: list[Leaf]) -> list[Leaf]:
    """Make further names of the same memory aliases of the first."""
    first: dict[tuple[Any, ...], str] = {}
    found = []
    for leaf in leaves:
        content, kept = leaf.content, leaf.alias_of
        if not isinstance(content, Value) and kept is None and all_dense([content]) and content.numel() > 0:
            place = (content.data_ptr(), content.dtype, content.shape, content.stride())
            kept = first.setdefault(place, leaf.name)
        found.append(leaf if kept in (leaf.name, leaf.alias_of) else replace(leaf, alias_of=kept))
    return found


IMPORT_FORMATS = ("torch", "dcp", "safetensors", "hf")


@dataclass(frozen=True)
class Imported:
    """Result of an import."""

    path: Path | str
    tensors: int
    values: int
    bytes: int


def import_checkpoint(
    source: str | os.PathLike[str],
    prefix: str | os.PathLike[str],
    *,
    format: str,
    blob: str | None = "model",
    trust: bool = False,
) -> Imported:
    """Convert a foreign checkpoint to a new directory of checkpoints with one epoch, 0.

    The epoch is for `open_checkpoint`; no run resumes from it. Files of `torch.save` are read by torch's
    restricted unpickler. Memory stays bounded, because sources are mapped. The result appears complete or not
    at all.

    Args:
        source: path or URL of the checkpoint.
        prefix: directory or URL to create; must be new or empty.
        format: `torch`, `dcp`, `safetensors` or `hf` (see `export_checkpoint`).
        blob: blob of the tensors at the top level; None: the first part of their names.
        trust: allow DCP's metadata, a pickle that can run any code.

    Returns:
        Path, numbers and bytes of what was imported.

    Raises:
        UsageError: an argument is invalid, or the target exists.
        BlobError: an object cannot be stored.
        DamagedError, FormatError, StorageError: the source is damaged, of another format, or unreadable.

    Example:
        import_checkpoint("model.safetensors", "imported", format="safetensors")
    """
    if format not in IMPORT_FORMATS:
        raise UsageError(f"invalid format={format!r}: expected one of {', '.join(IMPORT_FORMATS)}")
    target = expanded(prefix, "the prefix")
    check_free(target, directory=True)
    with fetched(expanded(source, "the source"), "what shall be imported") as path:
        if is_directory(path) is None:
            raise UsageError(f"{source} does not exist: give the checkpoint to import")
        made: list[tuple[int, int, int]] = []
        readers: dict[str, Callable[[Path], Incoming]] = {
            "torch": lambda scratch: Incoming(read_torch_file(path)),
            "safetensors": lambda scratch: read_safetensors(path),
            "hf": lambda scratch: read_huggingface(path),
            "dcp": lambda scratch: _dcp().read_dcp(path, scratch, trust=trust),
        }

        def make(temporary: Path) -> None:
            leaves = leaves_from(readers[format](temporary), blob)
            tensors = [spec_of(leaf) for leaf in leaves if not isinstance(leaf.content, Value)]
            stored = sum(spec.nbytes for spec in tensors if spec.alias_of is None)
            with progress(f"importing {path.name}", stored):
                _write_epoch(temporary, leaves)
            made.append((len(tensors), len(leaves) - len(tensors), stored))

        return Imported(publish(target, make, directory=True), *made[0])


def _write_epoch(root: Path, leaves: Sequence[Leaf]) -> None:
    """Write one committed epoch of one node, as a save does."""
    storage = LocalStorage(root)
    log = LogWriter.take(storage, None)
    contents = {leaf.name: leaf.content for leaf in leaves}
    values = {name: one.json for name, one in contents.items() if isinstance(one, Value)}
    try:
        plan = plan_classes([NodeClass((0,), tuple(spec_of(leaf) for leaf in leaves))])
        position, view = Position(0), log.view
        lease = LeaseInfo(str(view.job_name), str(view.job_uuid), view.state.current, log.generation)
        attempt_name = position.directory(secrets.token_hex(6))
        directory = attempt_directory(attempt_name)
        storage.mkdir(directory)
        place = NodePlace("imported", 0, 1, socket.gethostname(), 0)
        shards = []
        for group, assignments in plan.files(0).items():
            names = [one.leaf.name for one in assignments]
            entries = plan.tensors(0, group).of([contents[name] for name in names if name not in values])
            identity = ShardIdentity(lease.job, position, place.name, group, attempt_name)
            own = {name: values[name] for name in names if name in values}
            for part, report in enumerate(write_shard(storage, directory, identity, entries, values=own), 1):
                sizes = (report.bytes, report.header_bytes, report.header_sha256)
                shards.append(ShardRow(0, group, part, *sizes))
            storage.sync_dir(directory)
        manifest = compose(plan, lease, position, attempt_name, world_of([place]), shards, values, Facts())
        data = codec.encode(manifest)
        storage.link_exclusive(manifest_path(attempt_name), data)
        storage.sync_dir(directory)
        of = (manifest.branch, position, attempt_name, len(data), sha256(data))
        log.commit(CommittedPosition(*of, groups=manifest.groups, resumable=False))
    finally:
        log.release()
