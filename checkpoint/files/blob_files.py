"""Save blobs in single files without a job, atomically, and load them by name.

save_blobs("weights.safetensors", {"model": model, "classes": ["cat", "dog"]}, dtype=torch.bfloat16)
model.load_state_dict(load_blobs("weights.safetensors", "model", prefix="model."))
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import Any

import torch

from torchrelay.checkpoint.files.blob_reader import (
    BlobFile,
    open_blob_file,
    openings,
    row,
    seal,
    slices,
    tensor_rows,
)
from torchrelay.checkpoint.files.publish import Where, as_written, publish
from torchrelay.checkpoint.format import canonical_json
from torchrelay.checkpoint.format.dtypes import logical_dtype, memory_of
from torchrelay.checkpoint.format.names import Key, Whole, nearest
from torchrelay.checkpoint.format.position import Patterns, Position, Selection, matches, selection_of
from torchrelay.checkpoint.format.shard.entries import LEAVES, Entries, form_of, whole_entries
from torchrelay.checkpoint.format.shard.header import HeaderFrame, ShardIdentity, ShardLimits, ShardPart, cut
from torchrelay.checkpoint.format.shard.writer import write_part
from torchrelay.checkpoint.load.lookup import Rename, pattern_list, renamed_all, without_prefix
from torchrelay.checkpoint.load.tensors import Cast, cast, check_types_used, checked_cast, checked_device
from torchrelay.checkpoint.state.checkpoint_set import select, used_patterns
from torchrelay.checkpoint.state.flatten import leaves_of
from torchrelay.checkpoint.state.leaf import MAIN_GROUP, Leaf, LeafSpec, Role, Value, is_sharded, spec_of
from torchrelay.checkpoint.state.names import Kind, kind_of
from torchrelay.checkpoint.state.restore.findings import RestoreOptions
from torchrelay.checkpoint.state.restore.restoration import restoration
from torchrelay.checkpoint.state.tensor_memory import plain_tensors
from torchrelay.checkpoint.state.tree_leaves import registered_role
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.errors import BlobError, UsageError
from torchrelay.jobs.cluster import check_blob_names
from torchrelay.jobs.runtime import undisturbed
from torchrelay.records import Json

_IDENTITY = ShardIdentity("", Position(0), "blobs", MAIN_GROUP, "")
_ONE_FILE = ShardLimits(data_bytes=1 << 62, header_bytes=90_000_000, values_bytes=90_000_000)
_WITHIN = 2
"""Nesting of a value in the file: the metadata and the object of all values."""


def content_of(leaves: Sequence[Leaf]) -> ShardPart:
    """The content of a file of these leaves; raises BlobError for what cannot be stored."""
    stored = {
        leaf.name: leaf.content
        for leaf in leaves
        if leaf.alias_of is None and not isinstance(leaf.content, Value)
    }
    forms = [form_of(_type(name, tensor), tensor.shape) for name, tensor in stored.items()]
    values = {leaf.name: leaf.content.json for leaf in leaves if isinstance(leaf.content, Value)}
    rows = openings(
        [leaf.name for leaf in leaves], [leaf.blob for leaf in leaves], [leaf.role._value_ for leaf in leaves]
    )
    here = [leaf.name in stored for leaf in leaves]
    tensors = iter(tensor_rows(compress(rows, here), forms))
    sealed = [
        next(tensors) if alone else row(spec_of(leaf)) for leaf, alone in zip(leaves, here, strict=True)
    ]
    aliases = {leaf.name: Whole(leaf.alias_of) for leaf in leaves if leaf.alias_of is not None}
    entries = whole_entries(list(stored), forms, list(stored.values()))
    return _one_file(entries, rows, sealed, values, aliases)


def _type(name: str, tensor: torch.Tensor) -> str:
    if is_sharded(tensor):
        raise BlobError(
            f"{name} is a sharded tensor (DTensor), and one process writes the file: pass its "
            "full_tensor(), or ctx.full_state_dict(module)"
        )
    return logical_dtype(tensor.dtype, name).name


def _one_file(
    entries: Entries,
    rows: Sequence[str],
    sealed: Sequence[str],
    values: Mapping[str, Json],
    aliases: Mapping[str, Key],
) -> ShardPart:
    """The one part of a file; the list of leaves is joined from texts, which is much faster than dumps."""
    texts = {name: canonical_json.dumps(value, within=_WITHIN) for name, value in values.items()}
    sha256 = seal((sealed[some] for some in slices(len(sealed))), values)
    texts[LEAVES] = f'{{"leaves":[{"],".join(rows)}]],"sha256":"{sha256}"}}'.encode()
    parts = cut(_IDENTITY, entries, values, aliases, _ONE_FILE, canonical_json.object_of(texts))
    if len(parts) > 1:
        raise BlobError(f"{len(entries)} tensors are too many for one file: save fewer in each")
    return parts[0]


def write_blob_file(where: Where, part: ShardPart, *, overwrite: bool) -> None:
    """Write a file; raises UsageError if the name exists, BlobError for what cannot be stored."""
    publish(
        as_written(where, "a file of save_blobs"),
        lambda at: write_part(LocalStorage(at.parent), at.name, part),
        overwrite=overwrite,
    )


Url = Where
_CONVERTIBLE = (Kind.MODULE, Kind.TENSOR, Kind.CONTAINER, Kind.VALUE)


@undisturbed()
def save_blobs(
    url: Url,
    blobs: Mapping[str, Any],
    *,
    rename: Rename | None = None,
    dtype: Cast = None,
    overwrite: bool = False,
    include: Patterns = None,
    exclude: Patterns = None,
) -> None:
    """Save blobs into one file, which any reader of safetensors can open.

    The file appears complete and durable or not at all.

    Args:
        url: path or URL of the file.
        blobs: tensors, modules, optimizers, objects with `state_dict`, or JSON-like values, by name.
        rename: new names by old ones, such as `{"ema": "model"}`.
        dtype: type, or types by pattern, `{"model.*": torch.bfloat16}`, to which floating-point tensors are
            converted, except those of optimizers and other objects with state.
        overwrite: replace an existing file.
        include: patterns of leaves, by new names, to save; each must match. Values and objects with state are
            saved whole.
        exclude: patterns of leaves to leave out; each must match.

    Raises:
        UsageError: the name exists, is used twice or invalid.
        BlobError: a blob cannot be stored; with the path inside it.
        StorageError: the storage failed.

    Example:
        save_blobs("weights.safetensors", {"model": model}, dtype=torch.bfloat16)
    """
    content = _content(blobs, rename, dtype, selection_of(include, exclude))
    write_blob_file(url, content, overwrite=overwrite)


def estimate_bytes(
    blobs: Mapping[str, Any],
    *,
    rename: Rename | None = None,
    dtype: Cast = None,
    include: Patterns = None,
    exclude: Patterns = None,
) -> int:
    """Compute the size of the file that `save_blobs` writes with these arguments; raises as it does.

    Args:
        blobs: the blobs by name; no tensor is read.
        rename: as for `save_blobs`.
        dtype: as for `save_blobs`.
        include: as for `save_blobs`.
        exclude: as for `save_blobs`.

    Returns:
        Size in bytes.

    Example:
        estimate_bytes({"model": model}, dtype=torch.bfloat16)
    """
    frame = HeaderFrame(_content(blobs, rename, dtype, selection_of(include, exclude), meta=True))
    return frame.nbytes + frame.data_bytes


def _content(
    blobs: Mapping[str, Any], rename: Rename | None, dtype: Cast, selection: Selection, *, meta: bool = False
) -> ShardPart:
    if not isinstance(blobs, Mapping) or not blobs:
        what = "none" if blobs == {} else type(blobs).__name__
        raise UsageError(f'invalid blobs {what}: expected them by name, save_blobs(url, {{"model": model}})')
    if rename is None and type(blobs) is dict:  # another type of mapping may create values on access
        named = dict(blobs)
    else:
        named = {new: blobs[old] for new, old in renamed_all(blobs, rename).items()}
    check_blob_names(named)
    converted = checked_cast(dtype) is not None
    alone = len(set(map(id, named.values()))) == len(named)
    simple = alone and selection.everything and not converted
    if simple and (plain := plain_tensors(named.values())) is not None:
        # The content of a file that has only tensors, each a blob by itself.
        names = list(named)
        entries = whole_entries(names, plain.forms, plain.memories, kept=plain)
        firsts = {type(tensor): tensor for tensor in named.values()}
        roles = {kind: str(registered_role(tensor)) for kind, tensor in firsts.items()}
        rows = openings(names, names, map(roles.__getitem__, map(type, named.values())))
        return _one_file(entries, rows, tensor_rows(rows, plain.forms), {}, {})
    found = leaves_of(named)
    # Raise UsageError for a pattern that matches no leaf.
    names = [leaf.name for leaf in found]
    used = used_patterns(names, selection)
    for pattern in selection.patterns:
        if pattern not in used:
            raise UsageError(f"no leaf matches {pattern!r}{nearest(pattern, names)}")
    leaves = select(found, named, selection)
    if not converted:
        return content_of(leaves)
    check_types_used((leaf.name for leaf in found), dtype)
    kinds = {blob: kind_of(value) for blob, value in named.items()}
    return content_of([_converted(leaf, kinds[leaf.blob], dtype, meta=meta) for leaf in leaves])


@undisturbed()
def load_blobs(
    urls: Url | Sequence[Url],
    names: str | Sequence[str] | None = None,
    *,
    rename: Rename | None = None,
    prefix: str | None = None,
    strict: bool = True,
    device: str | torch.device | None = None,
    verify: str = "full",
) -> dict[str, Any]:
    """Load tensors and values from files of `save_blobs`, all or nothing, every byte verified.

    A module is loaded as its tensors by full name (`model.0.weight`), an object with state as the result of
    its `state_dict`. `load_into` fills existing objects instead.

    Args:
        urls: one or more paths or URLs.
        names: names to load; None: all. `model` is that tensor or value, or all below it; `*`, `?` and
            `[...]` match any text.
        rename: new names by stored ones; not with `prefix`.
        prefix: removed from the names that begin with it.
        strict: raise for a name that is missing.
        device: where tensors are made; those inside values stay on the CPU.
        verify: "headers" trusts the tensor bytes of the storage, so that damaged ones are loaded silently.

    Returns:
        Tensors and values by name; tied names give one tensor.

    Raises:
        UsageError: a file or name is given twice, two files have it, or two new names are equal.
        DamagedError, FormatError, StorageError: a file is damaged, of another format, or unreadable.

    Example:
        model.load_state_dict(load_blobs("weights.safetensors", "model", prefix="model."))
    """
    if rename is not None and prefix is not None:
        raise UsageError("rename and prefix exclude each other: give one")
    checked_device(device)
    files = _open_all(urls, verify)
    patterns = ["*"] if names is None else pattern_list(names)
    if twice := [pattern for pattern in patterns if patterns.count(pattern) > 1]:
        raise UsageError(f"{twice[0]!r} is given twice: list every name once")
    chosen = _chosen(files, patterns, strict=strict)
    new_names = without_prefix(chosen, prefix) if prefix else renamed_all(chosen, rename)
    created: dict[str, Any] = {}
    for file in files:
        created.update(read_blobs(file, [name for name, holder in chosen.items() if holder is file]))
    placed: dict[int, Any] = {}  # tied names get one tensor
    for value in created.values():
        if id(value) not in placed:
            placed[id(value)] = value.to(device) if isinstance(value, torch.Tensor) else value
    return {new: placed[id(created[old])] for new, old in new_names.items()}


def _open_all(urls: Where | Sequence[Where], verify: str) -> list[BlobFile]:
    """Open the files; raises UsageError for one that is given twice."""
    if not isinstance(urls, (str, os.PathLike, Iterable)):
        raise UsageError(f"invalid path {urls!r}: expected a file of save_blobs")
    given = [urls] if isinstance(urls, (str, os.PathLike)) else list(urls)
    if not given:
        raise UsageError("no file: name at least one for load_blobs")
    files = [open_blob_file(url, verify=verify) for url in given]
    paths = [os.path.realpath(file.path) if isinstance(file.path, Path) else file.path for file in files]
    if twice := [path for path in paths if paths.count(path) > 1]:
        raise UsageError(f"{twice[0]} is given twice: list every file once")
    return files


def _chosen(files: Sequence[BlobFile], patterns: Sequence[str], *, strict: bool) -> dict[str, BlobFile]:
    """The file of each chosen leaf; tensors inside a value come with it, unless named themselves."""
    inner = [file.inner for file in files]
    found: dict[str, BlobFile] = {}
    for pattern in patterns:
        hit = False
        for file, within in zip(files, inner, strict=True):
            for name in file.specs:
                if matches(name, pattern) and (name not in within or name == pattern):
                    hit = True
                    holder = found.setdefault(name, file)
                    if holder is not file:
                        raise UsageError(
                            f"{name!r} is in {holder.path} and {file.path}: load them one by one"
                        )
        if strict and not hit:
            known = [name for file in files for name in file.specs]
            places = " and ".join(str(file.path) for file in files)
            raise UsageError(f"no blob {pattern!r} in {places}{nearest(pattern, known)}")
    return found


def read_blobs(file: BlobFile, names: Sequence[str]) -> dict[str, Any]:
    """The content of some leaves: plain tensors, and values with the tensors inside them."""
    within = file.inner
    specs = {name: _alone(file.specs[name], name) for name in names}
    for name, tree in within.items():
        if tree in specs:
            specs.setdefault(name, _alone(file.specs[name], tree))
    plan = restoration({}, specs, file.values, RestoreOptions(strict=False, exclude=None))
    leaves = [(file.specs.key_of(read.leaf), memory_of(read.memory())) for read in plan.reads]
    file.fill_memories([key for key, _ in leaves], [memory for _, memory in leaves])
    return plan.finish()


def _alone(spec: LeafSpec, blob: str) -> LeafSpec:
    """The leaf as a blob by itself, or as a part of the value `blob`."""
    role = Role.TENSOR if spec.kind == "tensor" else Role.VALUE
    if spec.blob == blob and spec.role is role:
        return spec
    return replace(spec, blob=blob, role=role)


def _converted(leaf: Leaf, kind: Kind, dtype: Cast, *, meta: bool) -> Leaf:
    content = leaf.content
    if kind not in _CONVERTIBLE or not isinstance(content, torch.Tensor) or leaf.role is Role.VALUE:
        return leaf
    return replace(leaf, content=cast(content.to("meta") if meta else content, leaf.name, dtype))
