"""What nodes report of their files, as rank 0 reads it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from torchrelay.checkpoint.format.manifest.schema import ShardRow
from torchrelay.checkpoint.save.commit import NodeReport, bytes_in, secs_in, shards_in, values_in

SIZES = st.integers(1, 2**53 - 1)


@st.composite
def reports(draw: st.DrawFn) -> list[NodeReport]:
    """Of up to five nodes, none of which need have a file."""
    found = []
    for rank in range(draw(st.integers(0, 5))):
        files = draw(st.lists(st.tuples(st.sampled_from(["main", "optim"]), SIZES, SIZES), max_size=4))
        shards = [
            ShardRow(rank, group, part, size, head, f"{part:064x}")
            for part, (group, size, head) in enumerate(files, 1)
        ]
        values = draw(st.dictionaries(st.sampled_from([f"{rank}/a", f"{rank}/b"]), st.integers(), max_size=2))
        found.append(NodeReport(rank, tuple(shards), values, {"write": 0.25, "fsync": 1.5}))
    return found


@settings(max_examples=150, deadline=None)
@given(reports())
def test_a_report_says_what_its_node_knows(sent: list[NodeReport]) -> None:
    """However many files and values a node has, rank 0 reads all of them, and the node's seconds."""
    rows = [one.row() for one in sent]
    assert shards_in(rows) == tuple(shard for one in sent for shard in one.shards)
    assert values_in(rows) == {name: value for one in sent for name, value in one.values.items()}
    assert [bytes_in(row) for row in rows] == [sum(shard.nbytes for shard in one.shards) for one in sent]
    assert all(secs_in(row) == one.secs for row, one in zip(rows, sent, strict=True))
