"""What goes into a blob file, and how it is written: whole and synced, or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING

from torchrelay.checkpoint.files.blobs.reader import local_path, openings, row, seal, tensor_rows
from torchrelay.checkpoint.files.publish import temporary_beside
from torchrelay.checkpoint.format import canonical_json
from torchrelay.checkpoint.format.canonical_json import Json
from torchrelay.checkpoint.format.dtypes import logical_dtype
from torchrelay.checkpoint.format.manifest.position import Position
from torchrelay.checkpoint.format.names import Key, Whole
from torchrelay.checkpoint.format.shard.entries import Entries, form_of, whole_entries
from torchrelay.checkpoint.format.shard.fast_header import LEAVES
from torchrelay.checkpoint.format.shard.layout import HeaderFrame, Part, ShardIdentity, ShardLimits, cut
from torchrelay.checkpoint.format.shard.writer import write_part
from torchrelay.checkpoint.state.flatten import tensor_role
from torchrelay.checkpoint.state.leaf import MAIN_GROUP, Leaf, Value, is_sharded, spec_of
from torchrelay.checkpoint.state.tensor_checks import PlainTensors
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.checkpoint.storage.object_store import ObjectStorage
from torchrelay.checkpoint.storage.open import is_remote, object_at
from torchrelay.checkpoint.storage.transfers import StagedFile
from torchrelay.errors import BlobError, RelayError, StorageError, UsageError
from torchrelay.jobs.runtime import check_target
from torchrelay.records import dataclass

if TYPE_CHECKING:
    import torch


_IDENTITY = ShardIdentity("", Position(0), "blobs", MAIN_GROUP, "")
_ONE_FILE = ShardLimits(data_bytes=1 << 62, header_bytes=90_000_000, values_bytes=90_000_000)
_WITHIN = 2
"""Containers that a value lies in: the metadata and the object of all values."""


@dataclass(frozen=True)
class FileContent:
    """What a blob file is written of; `kept` is what keeps the memory of entries in place meanwhile."""

    entries: Entries
    values: Mapping[str, Json]
    values_text: bytes
    aliases: Mapping[str, Key]
    kept: PlainTensors | None = None

    def part(self) -> Part:
        """The one file, as long as this object is kept; raises BlobError for more than one can hold."""
        parts = cut(_IDENTITY, self.entries, self.values, self.aliases, _ONE_FILE, self.values_text)
        if len(parts) > 1:
            raise BlobError(f"{len(self.entries)} tensors are too many for one file: save fewer in each")
        return parts[0]


def content_of_plain(blobs: Mapping[str, torch.Tensor], plain: PlainTensors) -> FileContent:
    """The content of a file of tensors alone, each a blob by itself."""
    names = list(blobs)
    entries = whole_entries(names, plain.forms, plain.memories, in_memory=True)
    firsts = {type(tensor): tensor for tensor in blobs.values()}
    roles = {kind: str(tensor_role(tensor)) for kind, tensor in firsts.items()}
    rows = openings(names, names, map(roles.__getitem__, map(type, blobs.values())))
    sealed = tensor_rows(rows, plain.forms)
    return FileContent(entries, {}, _values_text({}, {}, rows, sealed), {}, kept=plain)


def content_of(leaves: Sequence[Leaf]) -> FileContent:
    """The content of a file of these leaves; raises BlobError for what cannot be stored."""
    stored = {
        leaf.name: leaf.content
        for leaf in leaves
        if leaf.alias_of is None and not isinstance(leaf.content, Value)
    }
    forms = [form_of(_type(name, tensor), tensor.shape) for name, tensor in stored.items()]
    values = {leaf.name: leaf.content.json for leaf in leaves if isinstance(leaf.content, Value)}
    texts = {name: canonical_json.dumps(value, within=_WITHIN) for name, value in values.items()}
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
    return FileContent(entries, values, _values_text(texts, values, rows, sealed), aliases)


def _type(name: str, tensor: torch.Tensor) -> str:
    if is_sharded(tensor):
        raise BlobError(
            f"{name} is a sharded tensor (DTensor), and one process writes the file: give "
            "full_tensor() of it, or ctx.full_state_dict(module)"
        )
    return logical_dtype(tensor.dtype, name).name


def _values_text(
    texts: Mapping[str, bytes], values: Mapping[str, Json], rows: Sequence[str], sealed: Sequence[str]
) -> bytes:
    """The canonical JSON of all values and, as one of them, of what the leaves are to their blobs.

    Put together from texts, for the checks of canonical JSON would take longer than all else.
    """
    own = f'{{"leaves":[{"],".join(rows)}]],"sha256":"{seal(sealed, values)}"}}'.encode()
    return canonical_json.object_of({**texts, LEAVES: own})


def write_blob_file(where: str | os.PathLike[str], content: FileContent, *, overwrite: bool) -> None:
    """Write a file with this content.

    Raises UsageError where the name is taken, BlobError for what cannot be stored, StorageError.
    """
    if is_remote(where):
        _write_at(str(where), content.part(), overwrite=overwrite)
        return
    path = local_path(where)
    check_target(path)
    if path.exists() and not (overwrite and path.is_file()):
        raise UsageError(_taken(path))
    part = content.part()
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


def file_bytes(content: FileContent) -> int:
    """How long the file is; the bytes of tensors are not looked at."""
    frame = HeaderFrame(content.part())
    return frame.nbytes + frame.data_bytes


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
