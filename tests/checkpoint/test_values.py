"""Typed values."""

from __future__ import annotations

import enum
import json
import math
import struct
import time
from collections import Counter, OrderedDict, namedtuple
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.checkpoint.format import canonical_json
from torchrelay.checkpoint.format.value_decoding import references
from torchrelay.checkpoint.format.values import decode, encode
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
    return decode(canonical_json.loads(canonical_json.dumps(encode(value, "x")), what="x"))


@given(VALUES)
def test_every_typed_value_comes_back_through_canonical_json(value):
    """The value, its types and the order of dicts survive."""
    found = round_trip(value)
    assert type(found) is type(value)
    assert found == value
    if isinstance(value, dict):
        assert list(found) == list(value)


NUMPY_SCALARS = [
    *(numpy.dtype(code).type(1) for code in "?bBhHiIlLqQefdgFDG"),
    *(numpy.str_(text) for text in ("", "a", "a\0", "\ud800", "\U0001f3c3")),
    *(numpy.bytes_(text) for text in (b"", b"a\0\xff")),
    *(numpy.datetime64(*text) for text in (("NaT",), ("2020-02-29T01", "25us"))),
    numpy.timedelta64(3, "D"),
    numpy.float32("nan"),
]
ARRAYS = [
    numpy.empty((0,), "f4"),
    numpy.empty((2, 0, 3), "U5"),
    numpy.array(3.0),
    numpy.array("ab"),
    numpy.array(["a\0b", "c"]),
    numpy.array([b"x", b""]),
    numpy.arange(6).reshape(2, 3).T,
    numpy.arange(6)[::-2],
    numpy.zeros(3, ">f8"),
    numpy.zeros(2, numpy.longlong),
    numpy.array(["2020", "NaT"], "M8[Y]"),
]


@pytest.mark.parametrize("value", [*NUMPY_SCALARS, *ARRAYS], ids=lambda value: f"{value.dtype} {value!r}")
def test_numpy_comes_back_of_the_same_type(value):
    """Scalars and arrays of all kinds, empty ones too, keep type, element type, shape and bytes."""
    found = round_trip({"a": [value]})["a"][0]
    assert type(found) is type(value)
    assert (found.dtype.str, found.dtype.char, found.shape) == (
        value.dtype.str,
        value.dtype.char,
        value.shape,
    )
    assert found.tobytes() == value.tobytes()
    if isinstance(value, str | bytes):
        assert value.__class__.__mro__[1].__eq__(found, value) and len(found) == len(value)


def test_nan_keys_stay_apart():
    """Two NaNs are two keys of a dict and two items of a set, as before."""
    other = float("nan")
    assert [*round_trip({math.nan: 1, other: 2, 1: 3}).values()] == [1, 2, 3]
    assert len(round_trip({math.nan, other, (math.nan,)})) == 3


def test_numbers_that_no_tensor_holds_stay_in_json(monkeypatch):
    """A long list with an integer of more than 64 bits, or of several types, is written item by item."""
    monkeypatch.setattr("torchrelay.checkpoint.format.values.ARRAY_LIMIT", 0)
    for value in ([1, 2**63], [1, 2.0], [True, 1], [None], []):
        assert decode(encode(value, "x", memory=pytest.fail)) == value


def test_two_million_numbers_are_quick():
    """A list of two million integers is encoded within 0.3 s of processor time, as JSON or as a tensor."""
    value = {"order": list(range(2_000_000))}
    for memory in (None, lambda path, tensor: path):
        spent = []
        for _ in range(3):
            begun = time.process_time()
            encode(value, "x", memory=memory)
            spent.append(time.process_time() - begun)
        assert min(spent) < 0.3


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


def test_the_encoding_of_large_values_is_frozen(monkeypatch):
    """Arrays and numbers with tensors of their own are written as committed, and read back equal."""
    monkeypatch.syspath_prepend(str(GOLDEN))
    from make_tables import LARGE, large_rows

    committed = json.loads((GOLDEN / "large_values.json").read_text())
    assert large_rows() == committed

    for name, row in committed.items():

        def tensor(leaf, tensors=row["tensors"]):
            dtype, shape, data = tensors[leaf]
            element = getattr(torch, dtype.removeprefix("torch."))
            return torch.frombuffer(bytearray.fromhex(data), dtype=element).reshape(shape)

        found = decode(row["value"], tensor=tensor)
        assert type(found) is type(LARGE[name])
        assert numpy.array_equal(found, LARGE[name], equal_nan=True) and repr(found) == repr(LARGE[name])
        assert references(row["value"]) == ["x"]
        with pytest.raises(FormatError, match="newer"):
            decode(row["value"])


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
        (numpy.array([object()]), "scheduler is a numpy.ndarray of object"),
        (numpy.zeros(1, [("a", "f4")]), "scheduler is a numpy.ndarray of .*'a'"),
        (numpy.zeros(1, [("a", "f4")])[0], "scheduler is a numpy.void"),
        (numpy.ma.array([1]), "scheduler is a numpy.ma.*MaskedArray"),
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
    canonical_json.loads(canonical_json.dumps(wrapped), what="x")


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
