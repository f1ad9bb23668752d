"""Writing one blob file: whole and synced under its name, or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from torchrelay.checkpoint.blob_file import LEAVES, local_path, seal
from torchrelay.checkpoint.disk.canonical import Json
from torchrelay.checkpoint.disk.names import Key, Whole
from torchrelay.checkpoint.disk.shard import HeaderFrame, Part, ShardEntry, ShardIdentity
from torchrelay.checkpoint.disk.shard_parts import ShardLimits, cut
from torchrelay.checkpoint.disk.shard_writer import write_part
from torchrelay.checkpoint.local_storage import LocalStorage
from torchrelay.checkpoint.position import Position
from torchrelay.checkpoint.state.leaf import MAIN_GROUP, Leaf, LeafSpec, Value, spec_of
from torchrelay.errors import BlobError, RelayError, StorageError, UsageError

_IDENTITY = ShardIdentity("", Position(0), "blobs", MAIN_GROUP, "")
_ONE_FILE = ShardLimits(data_bytes=1 << 62, header_bytes=90_000_000)


def write_blob_file(where: str | os.PathLike[str], leaves: Sequence[Leaf], *, overwrite: bool) -> None:
    """Write a file with these leaves.

    Raises UsageError where the name is taken, BlobError for what cannot be stored, StorageError.
    """
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


def file_bytes(leaves: Sequence[Leaf]) -> int:
    """How long the file of these leaves is; their content is not looked at."""
    frame = HeaderFrame(_part(leaves))
    return frame.nbytes + frame.data_bytes


def _part(leaves: Sequence[Leaf]) -> Part:
    specs = [spec_of(leaf) for leaf in leaves]
    parts = cut(_IDENTITY, _entries(leaves, specs), _values(leaves, specs), _aliases(leaves), _ONE_FILE)
    if len(parts) > 1:
        raise BlobError(f"{len(leaves)} leaves are too many for one file: save fewer in each")
    return parts[0]


def _entries(leaves: Sequence[Leaf], specs: Sequence[LeafSpec]) -> list[ShardEntry]:
    found = []
    for leaf, spec in zip(leaves, specs, strict=True):
        if not isinstance(leaf.content, Value) and leaf.alias_of is None:
            if spec.sharding is not None:
                raise BlobError(
                    f"{leaf.name} is a sharded tensor (DTensor), and one process writes the file: give "
                    "full_tensor() of it, or ctx.full_state_dict(module)"
                )
            found.append(ShardEntry(Whole(leaf.name), str(spec.dtype), spec.shape, leaf.content))
    return found


def _values(leaves: Sequence[Leaf], specs: Sequence[LeafSpec]) -> dict[str, Json]:
    found: dict[str, Json] = {
        leaf.name: leaf.content.json for leaf in leaves if isinstance(leaf.content, Value)
    }
    said = [[leaf.name, leaf.blob, str(leaf.role)] for leaf in leaves]
    return {**found, LEAVES: {"leaves": said, "sha256": seal(specs, found)}}


def _aliases(leaves: Sequence[Leaf]) -> dict[str, Key]:
    return {leaf.name: Whole(leaf.alias_of) for leaf in leaves if leaf.alias_of is not None}


@contextmanager
def _temporary(storage: LocalStorage, path: Path) -> Iterator[Path]:
    """A name beside `path` that listings hide; nothing is left of it afterwards."""
    temporary = path.with_name(f".tmp-{secrets.token_hex(8)}")
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
