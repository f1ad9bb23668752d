"""Writing one blob file: whole and synced under its name, or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING

from torchrelay.checkpoint.blob_file import LEAVES, local_path, openings, row, seal, tensor_rows
from torchrelay.checkpoint.disk import canonical
from torchrelay.checkpoint.disk.canonical import Json
from torchrelay.checkpoint.disk.dtypes import logical_dtype
from torchrelay.checkpoint.disk.names import Key, Whole
from torchrelay.checkpoint.disk.shard import HeaderFrame, Part, ShardEntry, ShardIdentity
from torchrelay.checkpoint.disk.shard_parts import ShardLimits, cut
from torchrelay.checkpoint.disk.shard_writer import write_part
from torchrelay.checkpoint.local_storage import LocalStorage
from torchrelay.checkpoint.object_storage import ObjectStorage
from torchrelay.checkpoint.position import Position
from torchrelay.checkpoint.remote.staged_file import StagedFile
from torchrelay.checkpoint.state.dtensors import is_sharded
from torchrelay.checkpoint.state.leaf import MAIN_GROUP, Leaf, Value, spec_of
from torchrelay.checkpoint.storage_places import is_remote, object_at
from torchrelay.checkpoint.temporary_names import temporary_beside
from torchrelay.errors import BlobError, RelayError, StorageError, UsageError

if TYPE_CHECKING:
    import torch

_IDENTITY = ShardIdentity("", Position(0), "blobs", MAIN_GROUP, "")
_ONE_FILE = ShardLimits(data_bytes=1 << 62, header_bytes=90_000_000)
_WITHIN = 2
"""Containers that a value lies in: the metadata and the object of all values."""


def write_blob_file(where: str | os.PathLike[str], leaves: Sequence[Leaf], *, overwrite: bool) -> None:
    """Write a file with these leaves.

    Raises UsageError where the name is taken, BlobError for what cannot be stored, StorageError.
    """
    if is_remote(where):
        _write_at(str(where), _part(leaves), overwrite=overwrite)
        return
    path = local_path(where)
    if path.exists() and not (overwrite and path.is_file()):
        raise UsageError(_taken(path))
    part = _part(leaves)
    storage = LocalStorage(path.parent)
    storage.mkdir("")
    with _temporary(storage, path) as temporary:
        write_part(storage, temporary.name, part)
        _publish(temporary, path, overwrite)
    storage.sync_dir("")


def _write_at(url: str, part: Part, *, overwrite: bool) -> None:
    storage, name = object_at(url, "the blob file")
    if not overwrite and storage.stat(name) is not None:
        raise UsageError(f"{storage.url}/{name} exists already: choose another name, or overwrite=True")
    write_part(_Replacing(storage.system, storage.root, storage.url), name, part)


class _Replacing(ObjectStorage):
    """An object store in which a new object takes the place of one of its name, when it is whole."""

    def open_exclusive(self, path: str) -> StagedFile:
        """Stage an object; that its name is free, or may be taken, was looked up before."""
        return self.open_replacing(path)

    def delete(self, path: str) -> None:
        """Nothing: where writing fails, what lay there before stays."""


def file_bytes(leaves: Sequence[Leaf]) -> int:
    """How long the file of these leaves is; their content is not looked at."""
    frame = HeaderFrame(_part(leaves))
    return frame.nbytes + frame.data_bytes


def _part(leaves: Sequence[Leaf]) -> Part:
    entries = {
        leaf.name: _entry(leaf, leaf.content)
        for leaf in leaves
        if leaf.alias_of is None and not isinstance(leaf.content, Value)
    }
    values = {leaf.name: leaf.content.json for leaf in leaves if isinstance(leaf.content, Value)}
    text = _values_text(leaves, entries, values)
    parts = cut(_IDENTITY, list(entries.values()), values, _aliases(leaves), _ONE_FILE, text)
    if len(parts) > 1:
        raise BlobError(f"{len(leaves)} leaves are too many for one file: save fewer in each")
    return parts[0]


def _entry(leaf: Leaf, content: torch.Tensor) -> ShardEntry:
    if is_sharded(content):
        raise BlobError(
            f"{leaf.name} is a sharded tensor (DTensor), and one process writes the file: give "
            "full_tensor() of it, or ctx.full_state_dict(module)"
        )
    dtype = logical_dtype(content.dtype, leaf.name).name
    return ShardEntry(Whole(leaf.name), dtype, tuple(content.shape), content)


def _values_text(
    leaves: Sequence[Leaf], entries: Mapping[str, ShardEntry], values: Mapping[str, Json]
) -> bytes:
    """The canonical JSON of all values and, as one of them, of what the leaves are to their blobs.

    Put together from texts, for the checks of canonical JSON would take longer than all else.
    """
    texts = {name: canonical.dumps(value, within=_WITHIN) for name, value in values.items()}
    roles = [leaf.role._value_ for leaf in leaves]
    opened = openings([leaf.name for leaf in leaves], [leaf.blob for leaf in leaves], roles)
    sealed = seal(_rows(leaves, opened, entries), values)
    texts[LEAVES] = f'{{"leaves":[{"],".join(opened)}]],"sha256":"{sealed}"}}'.encode()
    return canonical.object_of(texts)


def _rows(leaves: Sequence[Leaf], opened: Sequence[str], entries: Mapping[str, ShardEntry]) -> list[str]:
    """The rows of all leaves, which begin as `opened` does."""
    dtypes, shapes = [one.dtype for one in entries.values()], [one.shape for one in entries.values()]
    if len(entries) == len(leaves):
        return tensor_rows(opened, dtypes, shapes)
    stored = [leaf.name in entries for leaf in leaves]
    rows = iter(tensor_rows(compress(opened, stored), dtypes, shapes))
    return [next(rows) if here else row(spec_of(leaf)) for leaf, here in zip(leaves, stored, strict=True)]


def _aliases(leaves: Sequence[Leaf]) -> dict[str, Key]:
    return {leaf.name: Whole(leaf.alias_of) for leaf in leaves if leaf.alias_of is not None}


@contextmanager
def _temporary(storage: LocalStorage, path: Path) -> Iterator[Path]:
    """A name beside `path` that listings hide; nothing is left of it afterwards."""
    temporary = temporary_beside(path)
    try:
        yield temporary
    finally:
        with suppress(RelayError):
            storage.delete(temporary.name)


def _publish(temporary: Path, path: Path, overwrite: bool) -> None:
    """Give the file its name: a link never replaces, a rename does."""
    try:
        if overwrite:
            temporary.replace(path)
        else:
            os.link(temporary, path)
    except FileExistsError:
        raise UsageError(_taken(path)) from None
    except OSError as error:
        raise StorageError(f"cannot give {path} its name: {error.strerror or error}") from error


def _taken(path: Path) -> str:
    if path.exists() and not path.is_file():
        return f"{path} is no file and is never replaced: choose another name"
    return f"{path} exists already: choose another name, or overwrite=True"
