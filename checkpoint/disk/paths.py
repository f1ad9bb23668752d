"""Where the files of a try lie: every path is rebuilt from parts that were checked."""

from __future__ import annotations

import re

from torchrelay.checkpoint.disk.manifest import Manifest, ShardRow
from torchrelay.checkpoint.disk.names import ShardName, check_try, shard_file_name
from torchrelay.checkpoint.position import Position

DATA = "data"
MANIFEST = "manifest.json"
STATS = "stats.json"
_STAMP = re.compile(r"e([0-9]{8})(?:s([0-9]{6,9}))?-.*", re.ASCII)


def try_directory(try_name: str) -> str:
    """The directory of a try; raises DamagedError for what is no try's name."""
    return f"{DATA}/{check_try(try_name)}"


def manifest_path(try_name: str) -> str:
    """The manifest of a try."""
    return f"{try_directory(try_name)}/{MANIFEST}"


def stats_path(try_name: str) -> str:
    """How long a try took."""
    return f"{try_directory(try_name)}/{STATS}"


def position_of(try_name: str) -> Position:
    """The position that a try was written at."""
    match = _STAMP.fullmatch(check_try(try_name))
    epoch, step = match.groups() if match else ("0", None)
    return Position(int(epoch), int(step or 0))


def shard_path(manifest: Manifest, shard: ShardRow, *, escape: str = "") -> str:
    """A shard's file; `escape` as in `names.shard_file_name`."""
    try_name = manifest.tries[shard.source]
    name = ShardName(manifest.world.names[shard.node], position_of(try_name), shard.group, shard.part)
    return f"{try_directory(try_name)}/{shard_file_name(name, escape=escape)}"


def shard_paths(manifest: Manifest, node: str) -> list[str]:
    """All files of the node that is stored under this name."""
    return [shard_path(manifest, one) for one in manifest.shards if manifest.world.names[one.node] == node]
