"""An epoch whose files lie in the near directories of several hosts: who sends what, and what is missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torchrelay.checkpoint.format.log_state import Entry
from torchrelay.checkpoint.format.manifest import codec
from torchrelay.checkpoint.format.manifest.schema import Manifest, ShardRow, shard_path
from torchrelay.checkpoint.format.shard.reader import ShardExpectation, read_header
from torchrelay.checkpoint.load.verify import seen_twice
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.checkpoint.tier.parts import Part
from torchrelay.checkpoint.tier.sending import Sending
from torchrelay.errors import DamagedError, StorageError
from torchrelay.records import dataclass


class LostPartError(DamagedError):
    """An epoch cannot be completed: files of it are damaged where they lie, or nobody has them."""


@dataclass(frozen=True)
class Others:
    """The leaders of the other places; `run` names this start in the files by which they tell (`parts`)."""

    run: str
    leaders: tuple[int, ...]


def send_among(
    sending: Sending,
    entry: Entry,
    kept: frozenset[str],
    gather: Callable[[], Mapping[int, Part] | None],
    ask_again: Callable[[], None],
) -> bool:
    """Send this place's files of an epoch, and wait until the others have sent theirs; the whole is proved.

    `gather` waits for what the others tell, by leader; with None the epoch is not wanted any more: False.
    `ask_again` has them look whether what they sent is there, where the whole is not proved.
    Raises LostPartError for an epoch that nobody can complete, and what `Sending.send` raises.
    """
    manifest = codec.read(sending.near, entry)
    sending.make_directories(manifest)
    sending.send_manifest(entry)
    mine = present(sending.near, manifest)
    sending.send_shards(manifest, mine, kept)
    sending.send_stats(entry.try_name)
    sending.sync_directories(manifest)
    parts = gather()
    if parts is None:
        return False
    for leader in sorted(parts):
        if (damage := parts[leader].damage) is not None:
            raise LostPartError(f"{damage} (near rank {leader})")
    sent = {shard_path(manifest, row) for row in mine}.union(*(part.paths for part in parts.values()))
    rest = [row for row in manifest.shards if shard_path(manifest, row) not in sent]
    if lost := [row for row in rest if not sending.has_kept(manifest, row, kept)]:
        raise LostPartError(
            f"{len(lost)} of its files are in no near directory of this start, "
            f"{shard_path(manifest, lost[0])} for one: its host is not here, or its disk was lost"
        )
    try:
        sending.prove(entry, manifest)
    except StorageError:
        ask_again()
        raise
    return True


def present(near: Storage, manifest: Manifest) -> list[ShardRow]:
    """The files of an epoch that lie in this near directory. Raises StorageError."""
    return [row for row in manifest.shards if near.stat(shard_path(manifest, row)) is not None]


def damage_of(near: Storage, entry: Entry) -> str | None:
    """What is wrong with the manifest and the files that this near directory has, every byte read twice."""
    try:
        manifest = seen_twice(lambda: codec.read(near, entry))
    except DamagedError as error:
        return str(error)
    return damage_in(near, manifest)


def damage_in(
    near: Storage, manifest: Manifest, *, share: tuple[int, int] = (0, 1), headers_only: bool = False
) -> str | None:
    """What is wrong with the files of an epoch that this near directory has; None where they are right.

    `share`: every so many'th file (second number), from this one on (first).
    """
    for row in present(near, manifest)[share[0] :: share[1]]:
        try:
            seen_twice(lambda row=row: _look_at(near, manifest, row, headers_only))  # type: ignore[misc]
        except DamagedError as error:
            return str(error)
    return None


def _look_at(near: Storage, manifest: Manifest, row: ShardRow, headers_only: bool) -> None:
    expected = ShardExpectation(row.nbytes, row.header_bytes, row.header_sha256)
    header = read_header(near, shard_path(manifest, row), expected)
    if not headers_only:
        header.verify()
