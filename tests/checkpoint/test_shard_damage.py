"""Damaged shard files: whatever changed is noticed before a byte of it is used."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from given_entries import ShardEntry, write_shard

from torchrelay.checkpoint.format.canonical_json import sha256
from torchrelay.checkpoint.format.dtypes import BLOCK
from torchrelay.checkpoint.format.names import Whole
from torchrelay.checkpoint.format.position import Position
from torchrelay.checkpoint.format.shard.header import ShardIdentity, parse
from torchrelay.checkpoint.format.shard.reader import ShardExpectation, read_header
from torchrelay.checkpoint.storage.local import LocalStorage
from torchrelay.errors import DamagedError, FormatError, StorageError

FILE = "trainer_0.4.main.safetensors"
DATA = (Path(__file__).parents[1] / "golden" / FILE).read_bytes()
START = 8 + int.from_bytes(DATA[:8], "little")
EXPECT = ShardExpectation(len(DATA), START, sha256(DATA[:START]))


class Memory:
    """A storage of one file in memory."""

    def __init__(self, data):
        self.data = data

    def stat(self, path):
        return len(self.data)

    def read_range(self, path, offset, length):
        return bytes(self.data[offset : offset + length])

    def read_into(self, path, offset, destination):
        found = self.data[offset : offset + len(destination)]
        destination[: len(found)] = found
        return len(found)


def prove(data, expect=EXPECT):
    return read_header(Memory(data), FILE, expect).verify()


def test_every_single_bit_flip_is_detected():
    """Each of the file's bits, header, padding and data, is covered by a digest."""
    data = bytearray(DATA)
    assert prove(data) == len(DATA) - START
    for bit in range(len(data) * 8):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedError, match=FILE):
            prove(data)
        data[bit // 8] ^= 1 << bit % 8


def test_bit_flips_without_a_manifest_never_raise_anything_else():
    """A header without a manifest is refused as damage or another format, or fits its data."""
    data, harmless = bytearray(DATA), 0
    used = len(DATA[:START].rstrip(b" "))
    for bit in [*range(used * 8), *range(START * 8, len(data) * 8)]:
        data[bit // 8] ^= 1 << bit % 8
        try:
            prove(data, None)
            harmless += 1
        except (DamagedError, FormatError):
            pass
        data[bit // 8] ^= 1 << bit % 8
    assert harmless < used * 8 / 2, "names, values and numbers beside the data need the manifest's SHA-256"


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 100, START - 1, START, START + 1, len(DATA) - 1])
def test_every_truncation_is_detected(size):
    """A short file is damage, with and without a manifest."""
    for expect in (EXPECT, None):
        with pytest.raises(DamagedError, match=FILE):
            prove(DATA[:size], expect)


def test_longer_files_and_zeroed_sectors_are_detected():
    """Trailing bytes and lost sectors are damage."""
    for expect in (EXPECT, None):
        with pytest.raises(DamagedError):
            prove(DATA + b"\0", expect)
    for start in range(0, len(DATA), 512):
        with pytest.raises(DamagedError):
            prove(DATA[:start] + bytes(min(512, len(DATA) - start)) + DATA[start + 512 :])


def test_a_missing_file_is_damage_that_names_it(tmp_path):
    """Absence is reported by name."""
    with pytest.raises(DamagedError, match=f"{FILE} is missing"):
        read_header(LocalStorage(tmp_path), FILE)


def shard(changes=(), inner=()):
    """The golden header with changes to its JSON, and its data."""
    said = json.loads(DATA[8:START])
    metadata = json.loads(said["__metadata__"]["torchrelay"])
    for path, value in inner:
        _set(metadata, path, value)
    said["__metadata__"]["torchrelay"] = json.dumps(metadata)
    for path, value in changes:
        _set(said, path, value)
    text = json.dumps(said).encode()
    text += b" " * (-(8 + len(text)) % 4096)
    return len(text).to_bytes(8, "little") + text + DATA[START:]


def _set(tree, path, value):
    *way, last = path
    for key in way:
        tree = tree[key]
    if value is _set:
        del tree[last]
    else:
        tree[last] = value


def test_the_unchanged_header_is_accepted_when_written_otherwise():
    """The changes below are refused for what they say, not for how they are written."""
    assert prove(shard(), None) == len(DATA) - START
    assert prove(shard(inner=[(("later",), 1), (("format", "minor"), 9)]), None), "unknown keys are kept"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("model.nan", "data_offsets"), [25, 33]),
        (("model.nan", "data_offsets"), [24, 31]),
        (("model.nan", "data_offsets"), [24, 24]),
        (("model.nan", "data_offsets"), [32, 24]),
        (("model.nan", "data_offsets"), [24.0, 32]),
        (("model.nan", "data_offsets"), [24, True]),
        (("model.nan", "data_offsets"), None),
        (("model.nan", "shape"), [3]),
        (("model.nan", "shape"), [-2]),
        (("model.nan", "shape"), [1, 1, 2.0]),
        (("model.empty", "shape"), [0, 2**52, 2**52]),
        (("model.nan", "dtype"), "F64"),
        (("model.nan", "dtype"), 3),
        (("model.nan",), []),
        (("model.nan",), _set),
        (("odd %25%40\u00e9.name",), _set),
        (("more",), {"dtype": "U8", "shape": [1], "data_offsets": [68, 69]}),
        (("more",), {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}),
        (("a@b",), {"dtype": "U8", "shape": [0], "data_offsets": [68, 68]}),
    ],
)
def test_an_inconsistent_entry_is_damage(path, value):
    """Holes, overlaps, wrong shapes, types and offsets are refused before anything is read."""
    with pytest.raises(DamagedError, match=FILE.split(".", maxsplit=1)[0] if path[0] != "a@b" else "a@b"):
        prove(shard([(path, value)]), None)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("position",), [1]),
        (("position",), [1, -2]),
        (("position",), [10**9, 0]),
        (("node",), "../x"),
        (("group",), "Main"),
        (("job",), 7),
        (("try",), None),
        (("part",), 0),
        (("values",), []),
        (("pieces",), 1),
        (("pieces", "flat@flat[10:13]"), {}),
        (("pieces", "flat@flat[10:13]", "shape"), [12]),
        (("pieces", "big@[0:1,2:4]", "shape"), [4, 3]),
        (("pieces", "model.phase", "dtype"), "float32"),
        (("pieces", "model.tied", "alias_of"), "nothing"),
        (("pieces", "nobody"), {}),
        (("pieces", "flat2@flat[1:2]"), {"alias_of": "model.nan"}),
        (("digests",), "A"),
        (("digests",), "AAAA"),
        (("digests",), None),
        (("format",), 1),
    ],
)
def test_inconsistent_metadata_are_damage(path, value):
    """What the metadata say must be possible and fit the entries."""
    with pytest.raises(DamagedError):
        prove(shard(inner=[(path, value)]), None)


@pytest.mark.parametrize(
    ("changes", "inner"),
    [
        ([], [(("format", "major"), 2)]),
        ([], [(("format", "features"), ["nobody-has-this"])]),
        ([], [(("digest",), "blake3")]),
        ([], [(("block",), 4096)]),
        ([], [(("encryption",), {})]),
        ([], [(("pieces", "model.phase", "codec"), "zstd")]),
        ([], [(("pieces", "model.phase", "dtype"), "float256")]),
        ([(("model.nan", "dtype"), "F3")], []),
        ([(("__metadata__",), {"other": "x"})], []),
    ],
)
def test_what_another_version_wrote_is_a_format_error(changes, inner):
    """Unknown versions, features, codecs, types and foreign files are told apart from damage."""
    with pytest.raises(FormatError):
        prove(shard(changes, inner), None)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b'{"a":1,"a":1}',
        b"[" * 3000,
        b'{"__metadata__":{"torchrelay":"[]"}}',
        b"null",
    ],
)
def test_headers_that_are_no_headers_are_refused(header):
    """No bytes in the header's place make anything but a typed error."""
    text = header + b" " * (-(8 + len(header)) % 4096)
    with pytest.raises(StorageError):
        parse(len(text).to_bytes(8, "little") + text, 8 + len(text), what=FILE)


@pytest.mark.parametrize("length", [0, 1, 4087, 4089, 2**31, 2**63, 2**64 - 1])
def test_impossible_header_lengths_are_refused(length):
    """The length field is checked before it is used."""
    with pytest.raises(DamagedError, match="header"):
        prove(length.to_bytes(8, "little") + DATA[8:], None)


def test_damage_names_file_key_and_block(tmp_path):
    """The message leads to the block, reads beside it still work, and a range reports its own blocks."""
    storage = LocalStorage(tmp_path)
    identity = ShardIdentity("j", Position(4), "trainer_0", "main", "e00000004-7f3a9c")
    content = os.urandom(3 * BLOCK)
    entries = [ShardEntry(Whole("w"), "uint8", (3 * BLOCK,), memoryview(content))]
    report = write_shard(storage, "", identity, entries)[0]
    with (tmp_path / FILE).open("r+b") as file:
        file.seek(report.header_bytes + 2 * BLOCK + 7)
        file.write(bytes([content[2 * BLOCK + 7] ^ 1]))
    header = read_header(storage, FILE)
    out = bytearray(2 * BLOCK)
    header.read_into("w", 0, 2 * BLOCK, memoryview(out))
    assert out == content[: 2 * BLOCK]
    for start, stop in ((0, 3 * BLOCK), (2 * BLOCK, 2 * BLOCK + 1), (BLOCK + 1, 2 * BLOCK + 1)):
        with pytest.raises(
            DamagedError, match=f"{FILE}: block 2 of w, at byte {report.header_bytes + 2 * BLOCK}"
        ):
            header.read_into("w", start, stop, memoryview(bytearray(stop - start)))
    with pytest.raises(DamagedError, match="block 2 of w"):
        header.verify()
    with pytest.raises(DamagedError, match="does not hold v"):
        header.read("v")
