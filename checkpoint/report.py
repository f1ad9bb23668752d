"""What a node reports of its part of a save, as it travels to rank 0.

A row of few texts: ten thousand of them cost rank 0 little to decode, and the garbage collector nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchrelay.checkpoint.format.manifest.schema import ShardRow, table
from torchrelay.records import dataclass

Json = Any
Row = list[Json]
"""A report as it travels: see `NodeReport.row`."""


@dataclass(frozen=True)
class NodeReport:
    """The files that a node wrote, its values that go into the manifest, and its seconds by phase."""

    rank: int
    shards: tuple[ShardRow, ...]
    values: Mapping[str, Json]
    secs: Mapping[str, float]

    def row(self) -> Row:
        """The report as JSON: see `shards_in` and `secs_in` for the texts."""
        shards = "\n".join(
            f"{one.group} {one.part} {one.nbytes} {one.header_bytes} {one.header_sha256}"
            for one in self.shards
        )
        secs = " ".join(f"{phase}={spent:.6f}" for phase, spent in self.secs.items())
        return [self.rank, shards, dict(self.values) or None, secs]


def shards_in(rows: Sequence[Row]) -> tuple[ShardRow, ...]:
    """All files that the rows of reports tell of."""
    words = " ".join([shards for _, shards, _, _ in rows]).split()
    ranks = [rank for rank, shards, _, _ in rows for _ in shards.splitlines()]
    groups, parts, sizes, headers, digests = (words[at::5] for at in range(5))
    numbers = (map(int, column) for column in (parts, sizes, headers))
    return table(ShardRow, zip(ranks, groups, *numbers, digests, [0] * len(ranks), strict=True))


def bytes_in(row: Row) -> int:
    """The bytes of all files of one node."""
    return sum(int(line.split()[2]) for line in row[1].splitlines())


def values_in(rows: Sequence[Row]) -> dict[str, Json]:
    """All values that go into the manifest, by leaf name."""
    return {name: value for _, _, values, _ in rows if values for name, value in values.items()}


def secs_in(row: Row) -> dict[str, float]:
    """The seconds by phase of one node."""
    pairs = (one.split("=") for one in row[3].split())
    return {phase: float(spent) for phase, spent in pairs}
