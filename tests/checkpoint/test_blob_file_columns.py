"""Files that are written and opened by columns are those that tensors looked at one by one make."""

from __future__ import annotations

import hashlib
import json
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from torchrelay import load_blobs, load_into, save_blobs
from torchrelay.checkpoint.files.blob_files import content_of, write_blob_file
from torchrelay.checkpoint.files.blob_reader import open_blob_file
from torchrelay.checkpoint.format.dtypes import BLOCK
from torchrelay.checkpoint.format.shard import writer
from torchrelay.checkpoint.format.shard.entries import form_of
from torchrelay.checkpoint.state import flatten
from torchrelay.errors import DamagedError

DTYPES = [torch.float32, torch.float64, torch.bool, torch.complex64, torch.complex128, torch.float8_e5m2]
SHAPES = [(), (0,), (2, 0), (3,), (5, 7), (BLOCK - 1,), (BLOCK,), (BLOCK + 1,), (4 * BLOCK + 9,)]
_NAME = st.text("ab.%@'\"\\\u00e9\U0001f600 ", min_size=1, max_size=5)


def content(number, dtype, shape):
    """So many bytes of which no block is like another."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    data = (torch.arange(nbytes) * (2 * number + 1)).to(torch.uint8) % (2 if dtype is torch.bool else 251)
    return data.view(dtype).reshape(shape) if nbytes else torch.empty(shape, dtype=dtype)


@st.composite
def plain(draw):
    """Blobs that are tensors and parameters alone, under names of every kind that blobs can have."""
    names = draw(st.lists(st.integers(0, 30), min_size=1, max_size=12, unique=True))
    found = {}
    for number in names:
        shape = draw(st.sampled_from(SHAPES))
        dtype = draw(st.sampled_from(DTYPES)) if len(shape) != 1 or shape[0] < 9 else torch.uint8
        tensor = content(number, dtype, shape)
        if dtype is torch.float32 and draw(st.booleans()):
            tensor = torch.nn.Parameter(tensor)
        odd = draw(st.sampled_from(["", "", "%", "'\"\\", "\u00e9\U0001f600 "]))
        found[f"{odd}{number}"] = tensor
    return found


@settings(max_examples=20, deadline=None)
@given(plain())
@example({f"t{number % 1999:04d}": torch.full((number % 30,), number) for number in range(0, 4000, 3)})
def test_plain_tensors_make_the_same_file_asked_together_and_one_by_one(blobs):
    """Byte for byte, whatever the types, shapes, names and sizes around blocks and segments."""
    with tempfile.TemporaryDirectory() as folder:
        together, alone = Path(folder) / "together", Path(folder) / "alone"
        save_blobs(together, blobs)
        write_blob_file(alone, content_of(flatten.leaves_of(blobs)), overwrite=False)
        assert together.read_bytes() == alone.read_bytes()
        found = load_blobs(together)
    assert found.keys() == blobs.keys()
    for name, tensor in blobs.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert _bytes(found[name]) == _bytes(tensor.detach()), name


def _bytes(tensor):
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def gathered_one_by_one(sizes):
    """What `_runs` gives, in the order of a writer that looks at one entry after the other."""
    found, begin, together = [], 0, 0
    for number, size in enumerate(sizes):
        if size >= writer.GATHER:
            found += [range(begin, number)] if begin < number else []
            found.append(range(number, number + 1))
            begin, together = number + 1, 0
            continue
        together += size
        if together >= writer.GATHER:
            found.append(range(begin, number + 1))
            begin, together = number + 1, 0
    return found + ([range(begin, len(sizes))] if begin < len(sizes) else [])


_SIZES = [0, 1, BLOCK // 3, BLOCK // 2, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(_SIZES), max_size=30))
def test_small_entries_are_gathered_as_one_after_the_other(sizes):
    """Every entry is in one run, in order; a run ends with the entry that makes it enough."""
    ends = [end for _, end in pairwise([0, *[sum(sizes[: at + 1]) for at in range(len(sizes))]])]
    assert list(writer._runs(sizes, ends)) == gathered_one_by_one(sizes)


def test_a_dictionary_that_makes_its_values_is_asked_for_them(tmp_path):
    """What is saved is what `blobs[name]` gives, also where the dictionary holds something else inside."""

    class Made(dict):
        def __getitem__(self, name):
            return torch.full((2,), float(len(name)))

    save_blobs(tmp_path / "f", Made(a=None, bb=None))
    assert {name: one.tolist() for name, one in load_blobs(tmp_path / "f").items()} == {
        "a": [1.0, 1.0],
        "bb": [2.0, 2.0],
    }


def test_who_asks_for_numbers_gets_their_own_while_somebody_asks_for_others(tmp_path):
    """What one load asked for last is remembered, but never given to another that asks meanwhile."""
    save_blobs(tmp_path / "f", {name: torch.zeros(2) for name in "abcd"})
    entries = open_blob_file(tmp_path / "f").header.entries
    between = []

    class Slow(str):
        """Asks for others while it is compared, as another thread may."""

        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other):
            if not between:
                between.append(list(entries.numbers(["d"])))
            return str.__eq__(self, other)

    assert list(entries.numbers(["b", "c"])) == [1, 2]
    assert list(entries.numbers([Slow("b"), "c"])) == [1, 2]
    assert between == [[3]]


@pytest.mark.parametrize("blobs", [["a"], ["a", "%"]])
def test_nothing_stays_of_a_shape_without_end(tmp_path, blobs):
    """A file that claims very many dimensions costs memory only while it is looked at."""
    save_blobs(tmp_path / "f", {name: torch.ones(3) for name in blobs})
    data = (tmp_path / "f").read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    text = data[8:end].rstrip().replace(b'"shape":[3]', b'"shape":[%b3]' % (b"1," * 10_000))
    text = text.ljust(len(text) + -(len(text) + 8) % 4096)
    (tmp_path / "f").write_bytes(len(text).to_bytes(8, "little") + text + data[end:])
    before = form_of.cache_info()
    with pytest.raises(DamagedError, match="not the one that was saved"):
        open_blob_file(tmp_path / "f")
    assert form_of.cache_info().currsize == before.currsize


def forged(path, change):
    """Give a file another list of leaves, and the seal that belongs to the list it had."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    inner = json.loads(header["__metadata__"]["torchrelay"])
    said = inner["values"][":leaves"]
    rows = change([list(row) for row in said["leaves"]])
    own = {name: value for name, value in inner["values"].items() if name != ":leaves"}
    said.update(leaves=rows, sha256=_seal(rows, own))
    header["__metadata__"]["torchrelay"] = json.dumps(inner, separators=(",", ":"))
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(len(text) + -(len(text) + 8) % 4096)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])


def _seal(rows, values):
    """The seal of a file of float32 tensors of three elements and of values, if these rows were right."""
    sealed = [
        [*row, "value", None, [], None] if row[0] in values else [*row, "tensor", "float32", [3], None]
        for row in rows or ()
        if isinstance(row, list) and row and isinstance(row[0], str)
    ]
    return hashlib.sha256(json.dumps([sealed, values], separators=(",", ":")).encode()).hexdigest()


FORGERIES = {
    "no list": lambda rows: None,
    "a number": lambda rows: 0,
    "texts": lambda rows: ["abc", "bcd"],
    "short rows": lambda rows: [row[:2] for row in rows],
    "long rows": lambda rows: [[*row, "more"] for row in rows],
    "one short row": lambda rows: [rows[0][:2], *rows[1:]],
    "an empty row": lambda rows: [[], *rows],
    "a leaf twice": lambda rows: [*rows, rows[0]],
    "a leaf that is a list": lambda rows: [[["a"], "a", "tensor"], *rows[1:]],
    "a leaf that is not there": lambda rows: [*rows, ["zz", "zz", "tensor"]],
    "an unknown role": lambda rows: [[*rows[0][:2], "king"], *rows[1:]],
    "a blob that is a list": lambda rows: [[rows[0][0], ["a"], "tensor"], *rows[1:]],
    "a blob that is a number": lambda rows: [[rows[0][0], 1, "tensor"], *rows[1:]],
    "a value of a blob that is a list": lambda rows: [
        [row[0], ["a"], row[2]] if row[0] == "v" else row for row in rows
    ],
    "a tensor inside a value left out": lambda rows: [row for row in rows if row[0] != "v.k.0"],
}


@pytest.mark.parametrize(
    ("case", "with_value"),
    [(case, True) for case in FORGERIES] + [(case, False) for case in FORGERIES if "value" not in case],
)
def test_a_forged_list_of_leaves_is_damage(tmp_path, case, with_value):
    """Whoever can change the list can seal it anew; what then makes no sense is refused by name."""
    blobs = {"a": torch.ones(3), "b": torch.zeros(3)}
    save_blobs(tmp_path / "f", {**blobs, "v": {"k": [torch.ones(3)]}} if with_value else blobs)
    forged(tmp_path / "f", lambda rows: rows)
    assert load_blobs(tmp_path / "f").keys() >= {"a", "b"}  # the seal is made as the file's own
    forged(tmp_path / "f", FORGERIES[case])
    for load in (
        lambda: load_blobs(tmp_path / "f"),
        lambda: load_into(tmp_path / "f", {"a": torch.ones(3)}, strict=False),
    ):
        with pytest.raises(DamagedError, match=r"leaves|was saved|has no tensor"):
            load()
