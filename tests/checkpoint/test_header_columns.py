"""Headers checked as columns: nothing else is accepted, refused or understood than one by one."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping

import pytest
import torch
from given_entries import ShardEntry, entries_of
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrelay.checkpoint.files.blob_files import save_blobs
from torchrelay.checkpoint.files.blob_reader import open_blob_file
from torchrelay.checkpoint.format.names import Box, Flat, Whole
from torchrelay.checkpoint.format.position import Position
from torchrelay.checkpoint.format.shard import header as shard_header
from torchrelay.checkpoint.format.shard.header import HeaderFrame, ShardIdentity, ShardPart
from torchrelay.checkpoint.load.renaming import of_objects
from torchrelay.checkpoint.state.leaf import blob_of
from torchrelay.errors import DamagedError, FormatError

BIG = 2**53
_COUNTS = [0, 1, 2, 3, 4, 8, 12, 16, -1, True, 1.0, "1", None, [], BIG - 1, BIG // 2]


def entry(key, dtype, shape, nbytes):
    return ShardEntry(key, dtype, shape, memoryview(bytes(nbytes)))


def content():
    """A header as a writer makes it, with every form that an entry can have."""
    entries = entries_of(
        [
            entry(Whole("a.weight"), "float32", (2, 3), 24),
            entry(Whole("b.weight"), "bfloat16", (4,), 8),
            entry(Whole("c.scalar"), "int64", (), 8),
            entry(Whole("d.empty"), "float32", (0, 5), 0),
            entry(Whole("e.raw"), "complex128", (2,), 32),
            entry(Whole("f%@ü"), "uint8", (3,), 3),
            *(entry(Box(name, ((0, 2), (1, 3))), "float32", (4, 4), 16) for name in ("g.box", "g.like")),
            entry(Flat("h.flat", 2, 5), "float64", (7,), 24),
        ]
    ).ordered()
    identity = ShardIdentity("job", Position(3), "trainer_0", "main", "e00000003-abcdef")
    part = ShardPart(identity, 1, entries, {"i.tied": "a.weight"}, {"total": 3})
    blocks = sum(size > 0 for size in entries.sizes)
    header = json.loads(HeaderFrame(part).filled(bytes(range(16)) * blocks)[8:])
    inner = json.loads(header["__metadata__"]["torchrelay"])
    return header, inner, part.data_bytes


HEADER, INNER, DATA_BYTES = content()
KEYS = [key for key in HEADER if key != "__metadata__"]


def text_of(header, inner):
    entries = {key: entry for key, entry in header.items() if key != "__metadata__"}
    said = json.dumps(entries, separators=(",", ":"), ensure_ascii=False)[1:]
    text = f'{{"__metadata__":{{"torchrelay": {json.dumps(json.dumps(inner))}}},{said}'.encode()
    text = text.ljust(len(text) + -(len(text) + 8) % 4096)
    return len(text).to_bytes(8, "little") + text


def outcome(header: bytes, data_bytes: int) -> object:
    try:
        found = shard_header.parse(header, len(header) + data_bytes, what="file")
    except (DamagedError, FormatError) as error:
        return type(error), str(error)
    return list(found.entries.items()), found.aliases, forms(found.entries)


def outcome_one_by_one(header: bytes, data_bytes: int) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_header, "written_header", lambda *args: None)
        return outcome(header, data_bytes)


def forms(entries: Mapping[str, object]) -> object:
    return [(entries[key].dtype.name, entries[key].shape) for key in entries] == [
        (form.dtype, form.shape) for form in map(entries.form, entries)
    ]


def _dtype(draw, header, inner):
    header[draw(st.sampled_from(KEYS))]["dtype"] = draw(
        st.sampled_from(["F32", "I32", "F64", "U8", "F4", "nothing", 3, None, ["F32"]])
    )


def _shape(draw, header, inner):
    key = draw(st.sampled_from([*KEYS, "d.empty"]))
    header[key]["shape"] = draw(
        st.sampled_from([None, "x", 3, {}, [0, BIG // 2, 4], [0, True], [0, 1.0]])
        | st.lists(st.sampled_from(_COUNTS), max_size=4)
    )


def _offsets(draw, header, inner):
    key = draw(st.sampled_from(KEYS))
    old = header[key]["data_offsets"]
    near = [-8, -1, 0, 1, 8, 16]
    moved = [old[0] + draw(st.sampled_from(near)), old[1] + draw(st.sampled_from(near))]
    header[key]["data_offsets"] = draw(
        st.sampled_from(
            [moved, old[::-1], [*old, 3], [old[0]], None, "ab", [True, old[1]], [float(old[0]), old[1]]]
        )
    )


def _field(draw, header, inner):
    key = draw(st.sampled_from(KEYS))
    if draw(st.booleans()):
        header[key].pop(draw(st.sampled_from(["dtype", "shape", "data_offsets"])))
    else:
        header[key] = draw(st.sampled_from([None, [], "text", {}, {**header[key], "more": 1}]))


def _key(draw, header, inner):
    old = draw(st.sampled_from(KEYS))
    new = draw(st.sampled_from(["", "x", "x@", "x@[0:1]", "x@flat[0:3]", "%41", "%25", "ü", "a\n", "total"]))
    items = [(new if key == old else key, value) for key, value in header.items()]
    header.clear()
    header.update(items)


def _order(draw, header, inner):
    one, other = draw(st.sampled_from(KEYS)), draw(st.sampled_from(KEYS))
    header[one], header[other] = header[other], header[one]


def _piece(draw, header, inner):
    key = draw(st.sampled_from([*KEYS, "i.tied"]))
    inner["pieces"][key] = draw(
        st.sampled_from(
            [
                {},
                {"alias_of": "a.weight"},
                {"dtype": "float32"},
                {"dtype": "complex32"},
                {"dtype": "complex128", "shape": [2]},
                {"shape": [2, 3]},
                {"shape": [BIG, 0]},
                {"shape": [4, 4]},
                {"shape": [4, 4.0]},
                {"dtype": "float32", "shape": [4, 4]},
                {"dtype": "float64", "shape": [4, 4]},
            ]
        )
    )


def _digests(draw, header, inner):
    inner["digests"] = draw(st.sampled_from(["", "AAAA", inner["digests"][:-24], inner["digests"] * 2]))


_CHANGES = [_dtype, _shape, _offsets, _field, _key, _order, _piece, _digests]


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_columns_accept_refuse_and_understand_what_one_by_one_does(data):
    """A changed header comes to the same entries, or to the same error, on both ways."""
    header, inner = copy.deepcopy(HEADER), copy.deepcopy(INNER)
    for change in data.draw(st.lists(st.sampled_from(_CHANGES), max_size=2)):
        try:
            change(data.draw, header, inner)
        except (KeyError, TypeError, AttributeError, IndexError):
            return  # two changes of one thing
    text, size = text_of(header, inner), DATA_BYTES + data.draw(st.sampled_from([0, 0, 0, 1, -1]))
    assert outcome(text, size) == outcome_one_by_one(text, size)


@pytest.mark.parametrize(
    ("key", "field", "new"),
    [
        ("d.empty", "shape", [0, BIG // 2, 4]),
        ("d.empty", "shape", [0, True]),
        ("d.empty", "shape", [False, 5]),
        ("a.weight", "shape", [2.0, 3]),
        ("a.weight", "shape", [-2, -3]),
        ("a.weight", "data_offsets", float),
        ("a.weight", "dtype", "I32"),
        ("a.weight", "dtype", "F4"),
        ("a.weight", "more", 1),
    ],
)
def test_what_differs_only_in_type_is_refused_as_one_by_one(key, field, new):
    """1.0, True and extents beside 0 compare as what they are not; columns see that, too."""
    header = copy.deepcopy(HEADER)
    header[key][field] = [float(one) for one in header[key][field]] if new is float else new
    text = text_of(header, INNER)
    found = outcome(text, DATA_BYTES)
    assert found == outcome_one_by_one(text, DATA_BYTES)
    assert isinstance(found[0], list) == (field == "more" or new == "I32")


@pytest.mark.parametrize("new", [[4.0, 4], [4, True], [4, 5], [4, 4, 1], "[4, 4]", None])
@pytest.mark.parametrize("box", ["g.box", "g.like"])
def test_a_piece_like_another_is_looked_at_as_one_by_one(box, new):
    """What was found good of one form is taken for that very form alone, whichever of the two came first."""
    inner = copy.deepcopy(INNER)
    key = next(one for one in KEYS if one.startswith(box))
    inner["pieces"][key]["shape"] = new
    text = text_of(HEADER, inner)
    found = outcome(text, DATA_BYTES)
    assert found == outcome_one_by_one(text, DATA_BYTES)
    assert isinstance(found[0], list) == (new == [4, 5]), found


def plain_content():
    """A header in which every entry is a whole leaf under a plain name, as text."""
    entries = entries_of([entry(Whole(f"m.{n}"), "float32", (n, 3), 12 * n) for n in range(1, 9)]).ordered()
    part = ShardPart(ShardIdentity("job", Position(3), "trainer_0", "main", "e00000003-abcdef"), 1, entries)
    header = HeaderFrame(part).filled(bytes(range(16)) * len(entries))
    return header[8:].decode().rstrip(), part.data_bytes


PLAIN, PLAIN_BYTES = plain_content()


def padded(text):
    data = text.encode("utf-8", "surrogatepass")
    data = data.ljust(len(data) + -(len(data) + 8) % 4096)
    return len(data).to_bytes(8, "little") + data


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_a_header_taken_apart_as_text_is_understood_and_refused_as_the_decoded_one(data):
    """Whatever is put, taken away or changed in the text: the same entries, or the same error."""
    text = PLAIN
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(PLAIN.index('"m.1"') - 10, len(text)) | st.integers(0, len(text)))
        cut = data.draw(st.sampled_from([0, 1, 1, 2, 7]))
        pieces = ["", "0", "1", "2", ",", ":", "[", "]", "{", "}", '"', "\\", " ", "\n", "m", "-", ".0", "e0"]
        words = [
            '\\"',
            "%",
            "@",
            "ü",
            "null",
            "true",
            ',"m.1":{}',
            '"x":1,',
            "[1],",
            "\\ud800",
            "F64",
            "alias_of",
        ]
        text = text[:at] + data.draw(st.sampled_from([*pieces, *words])) + text[at + cut :]
    header, size = padded(text), PLAIN_BYTES + data.draw(st.sampled_from([0, 0, 0, 12, -1]))
    assert outcome(header, size) == outcome_one_by_one(header, size)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"m.2"', '"m.1"'),
        ('"m.2"', '"__metadata__"'),
        ('"m.2"', '"m\\u002e2"'),
        ('"m.2"', '"m%2"'),
        ("[2,3]", "[2.0,3]"),
        ("[2,3]", "[3,2,1]"),
        ("[2,3]", "[-2,-3]"),
        ("[2,3]", "[2, 3]"),
        ("[2,3]", "[" * 3000 + "]" * 3000),
        ('"dtype":"F32","shape":[2,3]', '"shape":[2,3],"dtype":"F32"'),
        ('"dtype":"F32","shape":[2,3]', '"dtype":"I32","dtype":"F32","shape":[2,3]'),
        ('"data_offsets":[12,36]', '"data_offsets":[12,36],"more":1'),
        ('"data_offsets":[12,36]', '"data_offsets":[12,0036]'),
        ('"data_offsets":[12,36]', '"data_offsets":[36,12]'),
        ('"data_offsets":[0,12]},"m.2"', '"data_offsets":[m.2"'),
        ('{"torchrelay"', '{"torchrelay":"","torchrelay"'),
        ('{"torchrelay"', '{"more":"","torchrelay"'),
    ],
)
def test_what_only_looks_like_our_text_is_decoded(old, new):
    """Keys that occur twice, escapes, numbers that are no counts: as the decoder sees them."""
    assert old in PLAIN
    header = padded(PLAIN.replace(old, new, 1))
    assert outcome(header, PLAIN_BYTES) == outcome_one_by_one(header, PLAIN_BYTES)


def test_a_plain_header_is_not_decoded(monkeypatch):
    """The quick way is taken where it can be."""
    monkeypatch.setattr(shard_header, "_decoded", None)
    assert isinstance(outcome(padded(PLAIN), PLAIN_BYTES)[0], list)


def test_the_unchanged_header_is_read_as_columns(monkeypatch):
    """Of a good header only what has a form of its own is looked at alone; the rest when it is asked for."""
    described = []
    logical = shard_header._logical
    monkeypatch.setattr(
        shard_header, "_logical", lambda key, *args: described.append(key.name) or logical(key, *args)
    )
    found = shard_header.parse(text := text_of(HEADER, INNER), len(text) + DATA_BYTES, what="file")
    assert sorted(described) == ["e.raw", "f%@ü", "g.box", "h.flat"]
    assert list(found.entries) == KEYS
    assert found.entries["a.weight"].shape == (2, 3)


NAMES = st.lists(st.sampled_from(["a", "b", "ab", "a.", "c"]), min_size=1, max_size=4).map(".".join)


@given(st.lists(NAMES, unique=True, max_size=200), st.lists(NAMES, unique=True, max_size=4))
def test_leaves_of_objects_are_the_same_however_they_are_looked_for(names, objects):
    """Few objects among many names find the leaves that asking every name for its object finds."""
    given_objects = dict.fromkeys(objects)
    expected = [name for name in names if blob_of(name, given_objects) is not None]
    assert of_objects(names, given_objects) == expected
    assert of_objects(names * 100, given_objects) == expected * 100


@pytest.mark.parametrize(
    ("place", "new"),
    [
        ("role", "parameter"),
        ("role", "nothing"),
        ("blob", "another"),
        ("name", "absent"),
        ("name", 5),
        ("role", ["tensor"]),
        ("surrogate", "\ud800"),
    ],
)
def test_a_changed_list_of_leaves_is_damage(tmp_path, place, new):
    """The seal is of what the file says of every leaf, and compared before a leaf is given out."""
    save_blobs(tmp_path / "file", {"a.weight": torch.ones(3), "b": {"n": 1}})
    data = (tmp_path / "file").read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:size])
    inner = json.loads(header["__metadata__"]["torchrelay"])
    row = inner["values"][":leaves"]["leaves"][0]
    row[{"name": 0, "blob": 1, "role": 2, "surrogate": 1}[place]] = new
    (tmp_path / "changed").write_bytes(text_of(header, inner) + data[size:])
    with pytest.raises(DamagedError, match=r"leaves|not the one that was saved|surrogate"):
        open_blob_file(tmp_path / "changed")
