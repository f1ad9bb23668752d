"""Tensors of an epoch that are read when they are asked for, whole or in part."""

from __future__ import annotations

import pytest
import torch
from epochs import Writing, parameter, tensor, value
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.checkpoint.format.dtypes import BLOCK
from torchrelay.checkpoint.load.checkpoint import open_checkpoint
from torchrelay.checkpoint.load.tensors import read_box
from torchrelay.errors import DamagedError, UsageError

LONG = torch.arange(3 * 700_000, dtype=torch.float32).reshape(3, 700_000)
SMALL = torch.randn(100, 7, 3).to(torch.bfloat16)


@pytest.fixture
def run(tmp_path):
    """An epoch of two nodes that wrote shares of `model.long`; `own` is each one's."""
    leaves = [
        parameter("model.long", LONG),
        parameter("model.small", SMALL),
        parameter("model.tied", SMALL, alias_of="model.small"),
        parameter("model.scalar", torch.tensor(3.0)),
        value("total", 1),
    ]
    nodes = [[*leaves, tensor("own", torch.full((2,), float(rank)))] for rank in range(2)]
    with Writing(tmp_path / "checkpoints") as writing:
        writing.save(1, nodes, 2, scopes={"own": "rank"})
    return tmp_path


@pytest.mark.parametrize(
    "key", [1, -1, slice(0, 2), (slice(None), 3), (..., slice(2, 100, 7)), (2, slice(600_000, None)), ...]
)
def test_a_part_is_what_indexing_the_tensor_gives(run, key):
    """Integers, slices with steps and `...` mean what they mean for tensors."""
    assert torch.equal(open_checkpoint(run)["model.long"][key], LONG[key])


def test_nothing_is_read_before_a_part_is_asked_for(run):
    """A handle knows name, shape and dtype from the manifest alone."""
    ckpt = open_checkpoint(run)
    before = ckpt.bytes_read
    handle = ckpt["model.long"]
    assert (handle.name, handle.shape, handle.dtype, handle.nbytes) == (
        "model.long", LONG.shape, LONG.dtype, LONG.nbytes,
    )  # fmt: skip
    assert len(handle) == 3
    assert ckpt.bytes_read == before


def test_only_touched_blocks_are_read(run):
    """A few rows cost one block, a column of three long rows three: S14 for blocks of 1 MiB."""
    ckpt = open_checkpoint(run)
    handle = ckpt["model.long"]
    handle[0, :1]  # headers
    for key, blocks in (((1, slice(5, 9)), 1), ((slice(None), slice(5, 9)), 3), ((0, slice(0, 0)), 0)):
        before = ckpt.bytes_read
        assert torch.equal(handle[key], LONG[key])
        assert ckpt.bytes_read - before <= blocks * BLOCK


def test_reading_converts_and_follows_ties(run):
    """`read` gives the whole tensor, in another floating-point type where told; a tie is its first name."""
    ckpt = open_checkpoint(run)
    assert torch.equal(ckpt["model.tied"].read(dtype=torch.float32), SMALL.float())
    assert ckpt["model.scalar"][()] == ckpt["model.scalar"].read(device="cpu") == 3
    assert torch.equal(ckpt["trainer_1:own"].read(), torch.ones(2))


@pytest.mark.parametrize("key", ["a", 3, -4, (0, 0, 0), slice(None, None, -1), slice("a"), (..., ...), 1.5])
def test_what_is_no_part_is_a_usage_error(run, key):
    """One clear error that names the tensor."""
    with pytest.raises(UsageError, match=r"model\.long"):
        open_checkpoint(run)["model.long"][key]


@pytest.mark.parametrize("name", ["model.lang", "total", "own", 3])
def test_what_is_no_tensor_is_a_usage_error(run, name):
    """An unknown name, a value, and a tensor that every node has are refused."""
    with pytest.raises(UsageError):
        open_checkpoint(run)[name]


def test_damage_shows_where_it_is_read(run):
    """A flipped bit is an error for a part that touches its block, and for no other."""
    ckpt = open_checkpoint(run)
    handle = ckpt["model.long"]
    assert handle[0, 0] == 0
    (path,) = (run / "checkpoints/data").glob("*/trainer_1*.main.safetensors")
    data = bytearray(path.read_bytes())
    data[-SMALL.nbytes - 100_000] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedError, match="epoch 1"):
        handle.read()
    assert torch.equal(handle[0], LONG[0])


def test_types_by_pattern_on_load(run):
    """The first pattern that fits a name says its type; other tensors stay what they are."""
    found = open_checkpoint(run).load_tensors(
        "model", dtype={"model.l*": torch.float16, "*.scalar": torch.float64}
    )
    assert {name: one.dtype for name, one in found.items()} == {
        "model.long": torch.float16,
        "model.small": torch.bfloat16,
        "model.tied": torch.bfloat16,
        "model.scalar": torch.float64,
    }


@given(st.data())
def test_boxes_of_bytes_are_boxes_of_tensors(data):
    """Whatever the shape and the box, the bytes are those that slicing gives."""
    shape = data.draw(st.lists(st.integers(1, 6), min_size=0, max_size=4))
    content = torch.arange(torch.Size(shape).numel(), dtype=torch.int32).reshape(shape)
    box = []
    for extent in shape:
        start = data.draw(st.integers(0, extent))
        box.append((start, data.draw(st.integers(start, extent))))
    raw = content.numpy().tobytes()

    def fill(start, stop, memory):
        memory[:] = raw[start:stop]

    wanted = content[tuple(slice(*interval) for interval in box)]
    assert torch.equal(read_box(fill, shape, box, torch.int32, 4), wanted)
