"""Who reads which bytes of what all nodes need: every byte once, alike in all processes."""

from __future__ import annotations

import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from epochs import Writing, parameter
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrelay import CheckpointManager, JobRunner, MultiNodeCheckpointManager
from torchrelay import Job as RelayJob
from torchrelay.checkpoint.format.dtypes import BLOCK
from torchrelay.checkpoint.format.names import Flat, parse_key
from torchrelay.checkpoint.format.position import Position
from torchrelay.checkpoint.load.reads.shared_reads import (
    PIECE,
    common_rows,
    in_turn,
    readers_of,
    shares,
    to_ranges,
)
from torchrelay.errors import UsageError
from torchrelay.jobs.cluster import NodePlace

SIZES = st.sampled_from([1, 3, 1000, BLOCK, BLOCK + 5, 2 * PIECE + 17, 3 * BLOCK // 2])


@settings(max_examples=20, deadline=None)
@given(st.lists(SIZES, min_size=1, max_size=8), st.integers(1, 4), st.integers(1, 5))
def test_every_byte_is_in_exactly_one_share(sizes: list[int], nodes: int, hosts: int) -> None:
    """Parts cover each leaf once, begin with blocks, travel in pieces; shares are runs and nearly alike."""
    with tempfile.TemporaryDirectory() as root, Writing(Path(root)) as run:
        leaves = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
        run.save(1, [parameter(f"m.{index}", leaf) for index, leaf in enumerate(leaves)], nodes)
        manifest = run.manifests[Position(1)]
    rows = [row for row, leaf in enumerate(manifest.leaves) if leaf.name.startswith("m.")]
    readers = tuple(range(0, 3 * hosts, 3))
    drawn = shares(manifest, rows, readers)
    assert tuple(drawn) == readers
    parts = sorted(
        (part for batches in drawn.values() for batch in batches for part in batch),
        key=lambda part: (part.row, part.at),
    )
    for row in rows:
        at = 0
        for part in (part for part in parts if part.row == row):
            key = parse_key(part.key)
            assert part.at == at and part.nbytes > 0 and part.start % BLOCK == 0
            assert part.at == part.start + (key.start if isinstance(key, Flat) else 0)
            at += part.nbytes
        assert at == manifest.leaves[row].nbytes
    read = {reader: sum(p.nbytes for b in batches for p in b) for reader, batches in drawn.items()}
    assert all(abs(nbytes - sum(sizes) / hosts) <= PIECE for nbytes in read.values())
    assert all(sum(p.nbytes for p in b) <= PIECE for batches in drawn.values() for b in batches)
    turns = list(in_turn(drawn))
    for reader, batches in drawn.items():
        assert tuple(batch for who, batch in turns if who == reader) == batches


@given(st.sets(st.integers(0, 200)))
def test_rows_are_told_as_ranges(rows: set[int]) -> None:
    """Nothing is lost or added, and no two ranges touch."""
    ranges = to_ranges(rows)
    assert {row for first, end in ranges for row in range(first, end)} == rows
    assert all(a[1] < b[0] for a, b in pairwise(ranges))


def test_only_what_all_processes_take_is_shared(tmp_path: Path) -> None:
    """Rows that one lacks are left out, one that offers nothing ends it, and little is not worth it."""
    with Writing(tmp_path) as run:
        run.save(1, [parameter(f"m.{index}", torch.zeros(9 << 20, dtype=torch.uint8)) for index in range(3)])
        manifest = run.manifests[Position(1)]
    rows = tuple(row for row, leaf in enumerate(manifest.leaves) if leaf.nbytes == 9 << 20)
    assert common_rows([to_ranges(rows), to_ranges(rows)], manifest) == rows
    assert common_rows([to_ranges(rows), to_ranges(rows[1:])], manifest) == rows[1:]
    assert common_rows([to_ranges(rows), None], manifest) == ()
    assert common_rows([to_ranges(rows[:1]), to_ranges(rows[1:])], manifest) == ()
    small = [row for row in range(len(manifest.leaves)) if row not in rows]
    assert common_rows([to_ranges(small)], manifest) == ()


def test_one_process_of_each_host_reads() -> None:
    """The lowest one, hosts told apart by their names or by the launcher's numbers."""
    places = [
        NodePlace(f"n{rank}", rank, 6, host=host, host_index=index, process=rank)
        for rank, (host, index) in enumerate([("a", 0), ("b", 0), ("a", 0), ("b", 0), ("b", 1), ("b", 1)])
    ]
    assert readers_of(places) == (0, 1, 4)


def test_a_setting_that_cannot_be_is_refused(tmp_path: Path) -> None:
    """By name; and it belongs to the manager where there is one."""
    with pytest.raises(UsageError, match="share_reads"):
        CheckpointManager(tmp_path, "trainer_0", share_reads=1)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="share_reads needs a run directory"):
        JobRunner(RelayJob(), MultiNodeCheckpointManager(tmp_path), share_reads=True)
