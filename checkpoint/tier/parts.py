"""`data/<try>/sent.<run>-<rank>.json` at the far place: which files of a try one place has sent, complete.

Rank 0 waits for one of each other place before it proves an epoch, then deletes them. A file's size alone
tells nothing: where space is reserved first it is there before the bytes are. These files belong to one start
(`run`), so that nobody believes those of an earlier one.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from torchrelay.checkpoint.format.canonical_json import seal, sealed_bytes, unseal
from torchrelay.checkpoint.format.manifest.schema import try_directory
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.errors import DamagedError, RelayError
from torchrelay.records import dataclass


@dataclass(frozen=True)
class Part:
    """What one place tells of an epoch: the paths that it has sent, or the damage that keeps it from that."""

    paths: tuple[str, ...] = ()
    damage: str | None = None


def part_path(try_name: str, run: str, leader: int) -> str:
    """Where the leader of a place tells what it has sent."""
    return f"{try_directory(try_name)}/sent.{run}-{leader}.json"


def write_part(far: Storage, path: str, part: Part) -> None:
    """Tell, when all files are durable there. Raises StorageError."""
    far.replace(path, seal("sent", {"paths": list(part.paths), "damage": part.damage}))


def read_part(far: Storage, path: str) -> Part | None:
    """What was told; None where nothing was yet. Raises StorageError."""
    try:
        data = sealed_bytes(far, path)
        told: Mapping[str, object] = unseal("sent", data, path)
    except (FileNotFoundError, DamagedError):  # half of it, where a store does not replace in one step
        return None
    paths, damage = told.get("paths"), told.get("damage")
    names = tuple(str(one) for one in paths) if isinstance(paths, list) else ()
    return Part(names, None if damage is None else str(damage))


def delete_parts(far: Storage, try_name: str, run: str, leaders: tuple[int, ...]) -> None:
    """Nobody waits for them any more; what cannot go now goes with the try."""
    for leader in leaders:
        with suppress(RelayError):
            far.delete(part_path(try_name, run, leader))
