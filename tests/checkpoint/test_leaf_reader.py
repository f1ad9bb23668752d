"""Verified bytes of leaves, from whatever layout they are stored in."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from epochs import Writing, buffer, parameter, places, tensor, value
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrelay.checkpoint.format.dtypes import memory_of
from torchrelay.checkpoint.format.position import Position
from torchrelay.checkpoint.load.reads.leaf_reader import LeafRead, LeafReader
from torchrelay.checkpoint.storage.open import CountingStorage
from torchrelay.errors import DamagedError, UsageError

DTYPES = [torch.float32, torch.bfloat16, torch.complex128, torch.bool, torch.uint8, torch.float64]


def reader_of(run, epoch=1):
    storage = CountingStorage(run.storage)
    return LeafReader(storage, run.manifests[Position(epoch)]), storage


def read(reader, name, like, node=None):
    out = torch.empty_like(like, memory_format=torch.contiguous_format)
    reader.read_into(name, memory_of(out), node)
    return out


def same(a, b):
    return (
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        if a.dim()
        else torch.equal(a, b)
    )


@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.sampled_from([0, 1, 7, 1000, 300_000, 900_001])),
        min_size=1,
        max_size=5,
    ),
    st.integers(1, 5),
)
def test_what_was_split_comes_back_bit_for_bit(forms, nodes):
    """Whatever dtypes, sizes and numbers of nodes: the pieces are the leaf again."""
    made = [torch.randint(0, 2, (count,)).to(dtype) for dtype, count in forms]
    with tempfile.TemporaryDirectory() as root, Writing(Path(root)) as run:
        run.save(1, [parameter(f"m.{i}", one) for i, one in enumerate(made)], nodes)
        reader, _ = reader_of(run)
        out = [torch.empty_like(one) for one in made]
        reader.read_many(LeafRead(f"m.{i}", memory_of(one)) for i, one in enumerate(out))
        assert all(same(a, b) for a, b in zip(out, made, strict=True))


def test_0d_tensors_transposed_ones_and_values_come_back(tmp_path):
    """Shapes and layouts in memory are no matter of the disk."""
    step, square = torch.tensor(3.0), torch.randn(40, 30).t()
    with Writing(tmp_path) as run:
        run.save(
            1,
            [parameter("o.step", step), parameter("o.square", square), value("n", {"a": (1, float("inf"))})],
            2,
        )
        reader, _ = reader_of(run)
        assert same(read(reader, "o.step", step), step)
        assert torch.equal(read(reader, "o.square", square), square)
        assert reader.value("n") == {"a": (1, float("inf"))}


def test_each_node_and_each_host_has_its_own(tmp_path):
    """`rank` leaves are read by node, `host` leaves by any node of the host."""
    by_node = [
        [value("mine", rank), tensor("noise", torch.full((3,), rank)), value("ours", rank // 2)]
        for rank in range(4)
    ]
    scopes = {"mine": "rank", "noise": "rank", "ours": "host"}
    with Writing(tmp_path) as run:
        run.save(1, by_node, scopes=scopes, world=places(4, per_host=2))
        reader, _ = reader_of(run)
        for rank in range(4):
            node = f"trainer_{rank}"
            assert reader.value("mine", node) == rank
            assert reader.value("ours", node) == rank // 2
            assert read(reader, "noise", torch.zeros(3, dtype=torch.int64), node).tolist() == [rank] * 3
        with pytest.raises(UsageError, match="use trainer_0:mine"):
            reader.value("mine")
        with pytest.raises(UsageError, match="no 'mine' of its own"):
            reader.value("mine", "trainer_9")


def test_nodes_may_have_different_leaves_of_one_name(tmp_path):
    """Per-node tensors of different shapes are rows of their own; a node says which is meant."""
    by_node = [[tensor("buf", torch.ones(rank + 1)), parameter("m.w", torch.ones(5))] for rank in range(3)]
    with Writing(tmp_path) as run:
        run.save(1, by_node, scopes={"buf": "rank"}, world=places(3))
        reader, _ = reader_of(run)
        for rank in range(3):
            assert reader.spec("buf", f"trainer_{rank}").shape == (rank + 1,)
            assert read(reader, "buf", torch.zeros(rank + 1), f"trainer_{rank}").sum() == rank + 1
        with pytest.raises(UsageError, match="differs in kind or form between nodes: use trainer_0:buf"):
            reader.spec("buf")


def test_only_the_files_and_bytes_that_are_needed_are_read(tmp_path):
    """Neighbouring small leaves come in one read; other groups and nodes are not touched."""
    with Writing(tmp_path) as run:
        run.save(1, [buffer(f"m.{i:03d}", torch.full((100,), float(i))) for i in range(50)], 2)
        reader, storage = reader_of(run)
        out = [torch.empty(100) for _ in range(50)]
        reader.read_many(LeafRead(f"m.{i:03d}", memory_of(one)) for i, one in enumerate(out))
        assert [float(one[0]) for one in out] == [float(i) for i in range(50)]
        headers = sum(row.header_bytes for row in run.manifests[Position(1)].shards)
        assert storage.bytes_read == 50 * 400 + headers
        assert storage.reads == 2


def test_wrong_requests_name_the_leaf(tmp_path):
    """Unknown names get suggestions; values, tensors and sizes are not confused."""
    with Writing(tmp_path) as run:
        run.save(1, [parameter("m.weight", torch.ones(4)), value("n", 1)])
        reader, _ = reader_of(run)
        for ask, why in [
            (lambda: reader.spec("m.wieght"), "did you mean 'm.weight'"),
            (lambda: reader.read_into("m.weight", memoryview(bytearray(8))), "16 bytes"),
            (lambda: reader.read_into("n", memoryview(bytearray(8))), "value"),
            (lambda: reader.value("m.weight"), "is a tensor"),
        ]:
            with pytest.raises(UsageError, match=why):
                ask()


def test_damage_is_noticed_on_arrival_and_only_when_seen_twice(tmp_path):
    """A flipped bit in a block stops the read; one that is gone at the second look does not."""
    content = torch.zeros(500_000)
    with Writing(tmp_path) as run:
        entry = run.save(1, [parameter("m.w", content)])
        (path,) = (tmp_path / "data" / entry.attempt_name).glob("*.safetensors")
        reader, _ = reader_of(run)
        good = path.read_bytes()

        class Once(CountingStorage):
            fired = 0

            def open_read(self, name):
                handle = super().open_read(name)
                read = handle.read_into

                def flipping(offset, destination, *, once=False):
                    count = read(offset, destination, once=once)
                    if not self.fired:
                        destination[0] ^= 1
                        self.fired = 1
                    return count

                handle.read_into = flipping
                return handle

        once = Once(run.storage)
        assert torch.equal(read(LeafReader(once, run.manifests[Position(1)]), "m.w", content), content)
        assert once.fired
        path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        with pytest.raises(DamagedError, match=r"trainer_0\.1\.main.*m\.w"):
            read(reader, "m.w", content)
