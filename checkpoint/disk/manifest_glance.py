"""What a list of epochs shows of each, taken out of the manifest's text without reading its tables.

A thousand manifests are looked at in the time that a dozen take to be read. Sound because the bytes are the
committed ones (their digest is compared) and canonical: keys stand in order, and within a string a quotation
mark has a backslash before it, so that a key is found by its text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torchrelay.checkpoint.disk import manifest_disk, version
from torchrelay.checkpoint.disk.facts_disk import facts_in
from torchrelay.checkpoint.disk.fields import Fields
from torchrelay.checkpoint.disk.paths import stats_path
from torchrelay.checkpoint.disk.runs import unpack_names, unpack_numbers
from torchrelay.checkpoint.facts import Facts
from torchrelay.checkpoint.log.live import Entry
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.errors import DamagedError
from torchrelay.records import dataclass

Json = Any
LARGE_BYTES = 256 << 10
_decoder = json.JSONDecoder()


@dataclass(frozen=True)
class Glance:
    """Nodes that took part, bytes of the files of the epoch's own try, what is remembered of the run."""

    nodes: int
    own_bytes: int
    facts: Facts

    @property
    def metrics(self) -> Mapping[str, float]:
        """The reduced metrics of the epoch."""
        return self.facts.metrics


def glance(storage: Storage, entry: Entry) -> Glance:
    """Look at the manifest that a log entry names; raises DamagedError unless it is that very file."""
    data = manifest_disk.read_bytes(storage, entry)
    return _seen_in(data.decode("utf-8", "replace"), f"manifest of {entry.try_name}")


def glance_or_notes(storage: Storage, entry: Entry) -> Glance:
    """The same, for lists alone: of a large manifest only the size is compared, if its save left notes.

    What `stats.json` notes, metrics of all facts alone, is proved by nothing. Raises as `glance` does.
    """
    if entry.manifest_bytes > LARGE_BYTES and (noted := _noted(storage, entry)) is not None:
        manifest_disk.check_size(storage, entry)
        return noted
    return glance(storage, entry)


def _noted(storage: Storage, entry: Entry) -> Glance | None:
    try:
        data = storage.read_range(stats_path(entry.try_name), 0, LARGE_BYTES + 1)
        said: Any = json.loads(data) if len(data) <= LARGE_BYTES else None
        metrics = {str(name): float(value) for name, value in said["metrics"].items()}
        return Glance(len(said["nodes"]), int(said["bytes"]), Facts(metrics=metrics))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _seen_in(text: str, what: str) -> Glance:
    facts, end = _object(text, "facts", 0, what)
    stamp, end = _object(text, "format", end, what)
    version.check_stamp(stamp.values, what=what)
    shards, end = _object(text, "shards", end, what)
    world, _ = _object(text, "world", text.rfind(',"world":{'), what)
    sizes = unpack_numbers(shards.items("bytes"), what)
    sources = unpack_numbers(shards.items("try"), what)
    return Glance(
        len(unpack_names(world.items("nodes"), what)),
        sum(size for size, source in zip(sizes, sources, strict=True) if source == 0),
        facts_in(facts),
    )


def _object(text: str, key: str, start: int, what: str) -> tuple[Fields, int]:
    """The first object called so from `start` on, and where it ends."""
    opening = f',"{key}":'
    at = text.find(opening + "{", max(start, 0))
    try:
        if at < 0:
            raise ValueError("it has none")
        value, end = _decoder.raw_decode(text, at + len(opening))
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{what} is damaged: {key}: {error}") from error
    return Fields(value, what), end
