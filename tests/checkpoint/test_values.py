"""Typed values."""

from __future__ import annotations

import enum
import json
import math
import struct
from collections import Counter, OrderedDict, namedtuple
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.checkpoint.disk import canonical
from torchrelay.checkpoint.disk.values import decode, encode
from torchrelay.errors import BlobError, DamagedError, FormatError

GOLDEN = Path(__file__).parents[1] / "golden"

ATOMS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters())
    | st.binary()
)
KEYS = st.integers() | st.text(st.characters()) | st.tuples(st.text(), st.integers())
VALUES = st.recursive(
    ATOMS | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.sets(KEYS, max_size=3)
        | st.frozensets(KEYS, max_size=3)
        | st.dictionaries(KEYS | st.sampled_from(["$", "v"]), inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(KEYS, st.integers(), max_size=3).map(Counter)
    ),
    max_leaves=12,
)


def round_trip(value):
    return decode(canonical.loads(canonical.dumps(encode(value, "x")), what="x"))


@given(VALUES)
def test_every_typed_value_comes_back_through_canonical_json(value):
    """The value, its types and the order of dicts survive."""
    found = round_trip(value)
    assert type(found) is type(value)
    assert found == value
    if isinstance(value, dict):
        assert list(found) == list(value)


def test_floats_keep_their_bits():
    """Minus zero, infinities and NaN payloads are the same bits."""
    for bits in (0x8000000000000000, 0x7FF8000000000000, 0x7FF8000000000ABC, 0xFFF0000000000000, 1):
        value = struct.unpack(">d", bits.to_bytes(8, "big"))[0]
        assert struct.pack(">d", round_trip([value])[0]) == bits.to_bytes(8, "big")
    assert math.isnan(round_trip(complex(math.nan, -0.0)).real)


def test_the_encoding_is_frozen(monkeypatch):
    """Today's encoder writes the committed JSON, and the decoder reads it back."""
    monkeypatch.syspath_prepend(str(GOLDEN))
    from make_tables import VALUES as frozen

    committed = json.loads((GOLDEN / "values.json").read_text())
    assert {name: encode(value, name) for name, value in frozen.items()} == committed
    for name, value in frozen.items():
        found = decode(committed[name])
        assert type(found) is type(value)
        assert numpy.array_equal(found, value) if name == "ndarray" else found == value


def test_a_dict_that_looks_like_a_tag_survives():
    """A user's own dict with the tag key is not taken for a tagged value."""
    for value in ({"$": 1}, {"$": "tuple", "v": [1]}, {"a": {"$": {"$": "x"}}}):
        assert round_trip(value) == value


def _cycle():
    inner: dict = {}
    inner["a"] = [inner]
    return inner


def _deep():
    value: list = []
    for _ in range(40):
        value = [value]
    return value


Pair = namedtuple("Pair", "a b")
Colour = enum.IntEnum("Colour", "RED")


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [0, 1, 2, {"b": object()}]}, r"scheduler\.a\[3\]\.b is a builtins\.object"),
        ({"f": lambda: 0}, r"scheduler\.f is a builtins\.function"),
        ({(1, 2): {3: Pair(1, 2)}}, r"scheduler\[\(1, 2\)\]\[3\] is a .*Pair"),
        ([Colour.RED], r"scheduler\[0\] is a .*Colour"),
        ({"t": torch.ones(1)}, r"scheduler\.t is a torch\.Tensor"),
        ({Pair: 1}, r"the key .* of scheduler"),
        (numpy.array([object()]), "scheduler is a numpy.ndarray"),
        (numpy.zeros(1 << 18), "scheduler is a numpy array of 2097152 bytes"),
        (_cycle(), r"scheduler\.a\[0\] contains itself"),
        (_deep(), "nested deeper than 32 levels"),
    ],
)
def test_what_cannot_be_stored_is_refused_with_its_path(value, path):
    """The message has the path inside the object."""
    with pytest.raises(BlobError, match=path):
        encode(value, "scheduler")


def test_one_object_twice_is_no_cycle():
    """A list that occurs in two places is stored in both."""
    shared = [1]
    assert round_trip([shared, shared]) == [[1], [1]]


def test_the_deepest_value_is_still_readable():
    """What encode accepts is within the depth that canonical JSON reads, with room around it."""
    value: object = numpy.float32(1)
    for _ in range(32):
        value = {2: value}
    wrapped = {"a": [{"b": [[encode(value, "x")]]}]}
    canonical.loads(canonical.dumps(wrapped), what="x")


def test_tensors_inside_go_to_the_callback():
    """The callback gets path and tensor; its answer stands in the tree and is handed back."""
    leaves = {}

    def keep(path, tensor):
        leaves[path] = tensor
        return path

    value = {"state": [torch.arange(3), {"ema": torch.nn.Parameter(torch.ones(2))}], "n": 1}
    tree = encode(value, "obj", tensor=keep)
    assert sorted(leaves) == ["obj.state[0]", "obj.state[1].ema"]
    found = decode(tree, tensor=leaves.__getitem__)
    assert found["state"][0] is value["state"][0]
    assert found["n"] == 1
    with pytest.raises(FormatError, match="tensor"):
        decode(tree)


@pytest.mark.parametrize(
    "json_value",
    [
        {"$": "int", "v": "x"},
        {"$": "int"},
        {"$": "bytes", "v": "%"},
        {"$": "dict", "v": [[1, 2], [1, 3]]},
        {"$": "dict", "v": [[[], 2]]},
        {"$": "numpy", "v": ["|O", ""]},
        {"$": "torch.dtype", "v": "load"},
        {"$": "torch.device", "v": "nowhere:9"},
        {"$": "float", "v": "1"},
    ],
)
def test_malformed_tagged_values_are_damage(json_value):
    """Content that no value has is DamagedError, never another exception."""
    with pytest.raises(DamagedError):
        decode(json_value)


def test_an_unknown_kind_is_refused_with_the_remedy():
    """A kind of a newer version is a FormatError."""
    with pytest.raises(FormatError, match="newer"):
        decode([{"$": "decimal", "v": "1"}])
