"""The blobs of an epoch as a table, column by column out of its manifest, without an object for each leaf.

For people who look: the bytes are proved by their digest, what they say is not checked as a load checks it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import field
from functools import cached_property
from heapq import nlargest
from typing import Any, NamedTuple

from torchrelay.checkpoint.disk import manifest_disk, version
from torchrelay.checkpoint.disk.facts_disk import facts_in
from torchrelay.checkpoint.disk.fields import Fields
from torchrelay.checkpoint.disk.manifest_disk import Columns
from torchrelay.checkpoint.disk.paths import manifest_path
from torchrelay.checkpoint.disk.runs import unpack_names
from torchrelay.checkpoint.facts import Facts
from torchrelay.checkpoint.log.live import Entry
from torchrelay.checkpoint.storage.base import Storage
from torchrelay.errors import DamagedError
from torchrelay.jobs.runtime import undisturbed
from torchrelay.records import dataclass

Json = Any


class BlobLine(NamedTuple):
    """A blob or leaf: `shape` is None for what is no single tensor, `bytes` are those of one node.

    `sources` are the numbers of the tries in which its bytes lie, 0 for the epoch's own.
    """

    name: str
    kind: str
    scope: str
    dtypes: tuple[str, ...]
    shape: tuple[int, ...] | None
    leaves: int
    bytes: int
    sources: tuple[int, ...]


@dataclass(frozen=True)
class EpochTable:
    """What a manifest says of an epoch; the columns of its leaves lie behind."""

    facts: Facts
    nodes: tuple[str, ...]
    hosts: tuple[str, ...]
    blobs: Mapping[str, tuple[str, str]]
    """Name to kind and scope."""
    _leaves: Columns = field(repr=False)

    @cached_property
    def leaves(self) -> Sequence[str]:
        """The names of all leaves, aliases too."""
        return tuple(dict.fromkeys(self._names))

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Blob to its bytes on one node: a leaf that several nodes have counts once, an alias not at all."""
        return self._summed(self._leaves.words("blob"))

    @cached_property
    def leaf_sizes(self) -> Mapping[str, int]:
        """Leaf to its bytes on one node."""
        return self._summed(self._names)

    def blob_lines(self, names: Collection[str]) -> Iterator[BlobLine]:
        """These blobs, in the manifest's order."""
        rows = self._rows(self._leaves.words("blob"), names)
        for name, (kind, scope) in self.blobs.items():
            if name in names:
                yield self._line(name, kind, scope, rows.get(name, ()), self.sizes.get(name, 0))

    def leaf_lines(self, names: Collection[str]) -> Iterator[BlobLine]:
        """These leaves, in the manifest's order."""
        kinds, scopes = self._leaves.words("kind"), self._leaves.words("scope")
        for name, rows in self._rows(self._names, names).items():
            yield self._line(name, kinds[rows[0]], scopes[rows[0]], rows, self.leaf_sizes.get(name, 0))

    def _line(self, name: str, kind: str, scope: str, rows: Sequence[int], nbytes: int) -> BlobLine:
        single = rows and self._names[rows[0]] == name and kind == "tensor"
        dtypes, sources = self._dtypes, self._sources
        return BlobLine(
            name,
            kind,
            scope,
            tuple(sorted({dtypes[row] for row in rows} - {""})),
            tuple(self._shapes[rows[0]]) if single else None,
            len({self._names[row] for row in rows}),
            nbytes,
            tuple(sorted({sources[row] for row in rows})),
        )

    def _rows(self, column: Sequence[str], names: Collection[str]) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for row, name in enumerate(column):
            if name in names:
                found.setdefault(name, []).append(row)
        return found

    def _summed(self, column: Sequence[str]) -> Mapping[str, int]:
        sizes: dict[str, int] = defaultdict(int)
        aliases = {row for row, _ in self._leaves.fields.items("alias_of")}
        seen: set[str] = set()
        rows = zip(column, self._names, self._leaves.numbers("bytes"), strict=True)
        for row, (unit, leaf, nbytes) in enumerate(rows):
            if leaf not in seen and row not in aliases:
                sizes[unit] += nbytes
                seen.add(leaf)
        return sizes

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return self._leaves.names("name")

    @cached_property
    def _dtypes(self) -> tuple[str, ...]:
        return self._leaves.words("dtype")

    @cached_property
    def _sources(self) -> tuple[int, ...]:
        return self._leaves.numbers("try")

    @cached_property
    def _shapes(self) -> tuple[Json, ...]:
        return self._leaves.each("shape")


def largest(sizes: Mapping[str, int], names: Sequence[str], count: int) -> set[str]:
    """So many of these names, those with the most bytes."""
    return set(names if len(names) <= count else nlargest(count, names, key=lambda one: sizes.get(one, 0)))


def read_table(storage: Storage, entry: Entry) -> EpochTable:
    """Read what a log entry names; raises DamagedError unless the manifest is that very file."""
    data, what = manifest_disk.read_bytes(storage, entry), manifest_path(entry.try_name)
    try:
        with undisturbed():
            return _table(Fields(json.loads(data), what), what)
    except (ValueError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise DamagedError(f"{what} is damaged: {error}") from error


def _table(fields: Fields, what: str) -> EpochTable:
    version.check_stamp(fields.values.get("format"), what=what)
    words = fields.texts("words")
    blobs, world = Columns(fields.fields("blobs"), words), fields.fields("world")
    rows = zip(blobs.names("name"), blobs.words("kind"), blobs.words("scope"), strict=True)
    return EpochTable(
        facts_in(fields.fields("facts")),
        unpack_names(world.items("nodes"), what),
        unpack_names(world.items("hosts"), what),
        {name: (kind, scope) for name, kind, scope in rows},
        Columns(fields.fields("leaves"), words),
    )
