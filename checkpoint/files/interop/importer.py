"""Other formats become an epoch: their tensors and values as leaves.

A mapping of names to tensors is what a module's `state_dict` looks like: its entries become leaves that
load into a module. Whatever is deeper (an optimizer's state dict, say) becomes one value with tensors
inside, which comes back as it was. Everything at the top that is no mapping is a blob by itself.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from torchrelay.checkpoint.files.interop.safetensors import Incoming, read_huggingface, read_safetensors
from torchrelay.checkpoint.files.interop.torch_files import read_torch_file
from torchrelay.checkpoint.files.publish import check_free, check_free_at, fetched_anywhere, publish_anywhere
from torchrelay.checkpoint.format import values
from torchrelay.checkpoint.format.canonical_json import sha256
from torchrelay.checkpoint.format.manifest.position import Entry, Facts, Position
from torchrelay.checkpoint.format.manifest.schema import Manifest, ShardRow, manifest_path, try_directory
from torchrelay.checkpoint.format.shard.layout import ShardIdentity
from torchrelay.checkpoint.format.shard.writer import write_shard
from torchrelay.checkpoint.log.writer import LogWriter
from torchrelay.checkpoint.save.commit import TryIdentity, compose, world_of
from torchrelay.checkpoint.save.planning.assignments import NodeClass, Plan
from torchrelay.checkpoint.save.planning.plan import plan_classes
from torchrelay.checkpoint.state.flatten import leaves_of
from torchrelay.checkpoint.state.leaf import MAIN_GROUP, Leaf, Role, Value, spec_of
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.checkpoint.storage.open import is_remote
from torchrelay.errors import UsageError
from torchrelay.jobs.cluster import NodePlace, check_blob_names
from torchrelay.jobs.runtime import is_directory, local_directory
from torchrelay.records import dataclass


def leaves_from(incoming: Incoming, blob: str | None) -> list[Leaf]:
    """The leaves. Flat tensors belong to `blob`, or, where it is None, to what their names begin with.

    Raises BlobError for what cannot be stored, UsageError for names that cannot be.
    """
    tree = incoming.tree
    if not isinstance(tree, Mapping) or not all(isinstance(name, str) for name in tree):
        raise UsageError(f"there is a {type(tree).__name__} where a mapping of names is needed")
    found: list[Leaf] = []
    owners: dict[str, None] = {}
    flat = any(isinstance(value, torch.Tensor) for value in tree.values())
    for name, value in tree.items():
        if is_state_dict(value):
            found += _module(name, value)
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
    return _checked(_tied(found), owners)


def is_state_dict(value: Any) -> bool:
    """Whether this is a mapping of texts to tensors (and a few plain values)."""
    return (
        isinstance(value, Mapping)
        and all(isinstance(name, str) and name for name in value)
        and any(isinstance(one, torch.Tensor) for one in value.values())
        and not any(isinstance(one, (Mapping, list, tuple)) for one in value.values())
    )


def _module(blob: str, state: Mapping[str, Any]) -> Iterator[Leaf]:
    for name, value in state.items():
        yield from _entry(f"{blob}.{name}", blob, value)


def _entry(name: str, blob: str, value: Any) -> Iterator[Leaf]:
    if isinstance(value, torch.Tensor):
        role = Role.TENSOR if name == blob else Role.PARAMETER
        yield Leaf(name, blob, role, MAIN_GROUP, value.detach())
    elif name == blob:
        yield from leaves_of({name: value})
    else:
        yield Leaf(name, blob, Role.VALUE, MAIN_GROUP, Value(values.encode(value, name)))


def _tied(leaves: list[Leaf]) -> list[Leaf]:
    """Of several names of the same memory the first is stored."""
    first: dict[tuple[Any, ...], str] = {}
    found = []
    for leaf in leaves:
        content = leaf.content
        if isinstance(content, torch.Tensor) and leaf.alias_of is None and _dense(content):
            place = (content.data_ptr(), content.dtype, content.shape, content.stride())
            kept = first.setdefault(place, leaf.name)
            if kept != leaf.name:
                leaf = Leaf(leaf.name, leaf.blob, leaf.role, leaf.group, content, kept)  # noqa: PLW2901
        found.append(leaf)
    return found


def _dense(tensor: torch.Tensor) -> bool:
    plain = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta
    return plain and tensor.numel() > 0


def _checked(leaves: list[Leaf], owners: Mapping[str, None]) -> list[Leaf]:
    if not leaves:
        raise UsageError("there is nothing in it to import")
    check_blob_names(owners)
    seen: set[str] = set()
    for leaf in leaves:
        if not all(leaf.name.split(".")) and leaf.name != leaf.blob:
            raise UsageError(f"a tensor or value of {leaf.blob!r} would be called {leaf.name!r}: rename it")
        if leaf.name in seen:
            raise UsageError(f"two tensors or values would be called {leaf.name!r}: choose another blob name")
        seen.add(leaf.name)
    return leaves


FORMATS = ("torch", "dcp", "safetensors", "hf")


@dataclass(frozen=True)
class Imported:
    """What an import made."""

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
    """Make a directory of checkpoints with one epoch, 0, of what a foreign checkpoint holds.

    `format` is `torch`, `dcp`, `safetensors` or `hf` (see `export_checkpoint`). Tensors at the top of
    the source become leaves of `blob`; with None the first part of their names is their blob. The epoch is
    for `open_checkpoint`: no run resumes from it. Files of `torch.save` are read by torch's restricted
    unpickler; DCP's metadata are not, so they need `trust=True`. Memory stays bounded: sources are
    mapped. `prefix` must be new or empty; it appears whole or not at all.
    Raises UsageError, BlobError for what cannot be stored, FormatError or DamagedError for a source that
    is not what it should be, StorageError. Both places may be URLs; a copy of the source is then made.
    """
    if format not in FORMATS:
        raise UsageError(f"format={format!r} is no format: give one of {', '.join(FORMATS)}")
    if is_remote(prefix):
        check_free_at(str(prefix), overwrite=False, directory=True)
    else:
        check_free(Path(local_directory(prefix, "the prefix")), overwrite=False, directory=True)
    with fetched_anywhere(source, "the source") as path:
        if is_directory(path) is None:
            raise UsageError(f"{source} is not there: give what shall be imported")
        return _imported(path, prefix, format, blob, trust=trust)


def _imported(
    path: Path, prefix: str | os.PathLike[str], format: str, blob: str | None, *, trust: bool
) -> Imported:
    made: list[tuple[int, int, int]] = []

    def make(temporary: Path) -> None:
        leaves = leaves_from(_read(path, format, temporary, trust=trust), blob)
        _write_epoch(temporary, leaves)
        tensors = [spec_of(leaf) for leaf in leaves if not isinstance(leaf.content, Value)]
        stored = sum(spec.nbytes for spec in tensors if spec.alias_of is None)
        made.append((len(tensors), len(leaves) - len(tensors), stored))

    return Imported(publish_anywhere(prefix, make, directory=True), *made[0])


def _read(path: Path, format: str, scratch: Path, *, trust: bool) -> Incoming:
    if format == "torch":
        return Incoming(read_torch_file(path))
    if format == "safetensors":
        return read_safetensors(path)
    if format == "hf":
        return read_huggingface(path)
    from torchrelay.checkpoint.files.interop.dcp import read_dcp

    return read_dcp(path, scratch, trust=trust)


def _write_epoch(root: Path, leaves: Sequence[Leaf]) -> None:
    """One committed epoch of one node, as a save writes it."""
    storage = LocalStorage(root)
    log = LogWriter.take(storage, None)
    try:
        plan = plan_classes([NodeClass((0,), tuple(spec_of(leaf) for leaf in leaves))])
        position, view = Position(0), log.view
        identity = TryIdentity(
            str(view.job_uuid), str(view.job_name), position, view.state.current,
            log.generation, position.directory(secrets.token_hex(6)),
        )  # fmt: skip
        storage.mkdir(try_directory(identity.try_name))
        place = NodePlace("imported", 0, 1, socket.gethostname(), 0)
        shards = _shards(storage, plan, identity, place, {leaf.name: leaf for leaf in leaves})
        inline = {leaf.name: leaf.content.json for leaf in leaves if isinstance(leaf.content, Value)}
        manifest = compose(plan, identity, world_of([place]), shards, inline, Facts())
        _commit(storage, log, manifest)
    finally:
        log.release()


def _shards(
    storage: LocalStorage, plan: Plan, identity: TryIdentity, place: NodePlace, leaves: Mapping[str, Leaf]
) -> list[ShardRow]:
    rows = []
    for group, assignments in plan.files(place.rank).items():
        tensors: list[Any] = []
        values: dict[str, Any] = {}
        for one in assignments:
            content = leaves[one.leaf.name].content
            if isinstance(content, Value):
                values[one.leaf.name] = content.json
            else:
                tensors.append(content)
        entries = plan.tensors(place.rank, group).of(tensors)
        name = ShardIdentity(identity.job_name, identity.position, place.name, group, identity.try_name)
        directory = try_directory(identity.try_name)
        for part, report in enumerate(write_shard(storage, directory, name, entries, values=values), 1):
            rows.append(
                ShardRow(place.rank, group, part, report.bytes, report.header_bytes, report.header_sha256)
            )
        storage.sync_dir(directory)
    return rows


def _commit(storage: LocalStorage, log: LogWriter, manifest: Manifest) -> None:
    data = manifest.encode()
    storage.link_exclusive(manifest_path(manifest.tries[0]), data)
    storage.sync_dir(try_directory(manifest.tries[0]))
    log.commit(
        Entry(
            manifest.branch,
            manifest.position,
            manifest.tries[0],
            len(data),
            sha256(data),
            groups=manifest.groups,
            resumable=False,
        )
    )
