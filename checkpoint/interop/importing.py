"""Foreign checkpoints as an epoch: proved, selective and partial loads from then on."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrelay.checkpoint.format.canonical_json import sha256
from torchrelay.checkpoint.format.log_state import Entry
from torchrelay.checkpoint.format.manifest.position import Facts, Position
from torchrelay.checkpoint.format.manifest.schema import Manifest, ShardRow, manifest_path, try_directory
from torchrelay.checkpoint.format.shard.layout import ShardIdentity
from torchrelay.checkpoint.format.shard.writer import write_shard
from torchrelay.checkpoint.interop.content import Incoming
from torchrelay.checkpoint.interop.huggingface import read_huggingface
from torchrelay.checkpoint.interop.incoming_leaves import leaves_from
from torchrelay.checkpoint.interop.publishing import check_free
from torchrelay.checkpoint.interop.remote_publishing import (
    check_free_at,
    fetched_anywhere,
    publish_anywhere,
)
from torchrelay.checkpoint.interop.safetensors_files import read_safetensors
from torchrelay.checkpoint.interop.torch_files import read_torch_file
from torchrelay.checkpoint.log.writer import LogWriter
from torchrelay.checkpoint.save.commit import TryIdentity, compose, world_of
from torchrelay.checkpoint.save.planning.assignments import NodeClass, Plan
from torchrelay.checkpoint.save.planning.plan import plan_classes
from torchrelay.checkpoint.state.leaf import Leaf, Value, spec_of
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.checkpoint.storage.open import is_remote
from torchrelay.errors import UsageError
from torchrelay.jobs.cluster import NodePlace
from torchrelay.jobs.runtime import is_directory, local_directory
from torchrelay.records import dataclass

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
    from torchrelay.checkpoint.interop.dcp_files import read_dcp

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
