"""The list of leaves of a blob file, understood as text: the same leaves and errors as when it is decoded."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from torchrelay import load_blobs, load_into, save_blobs
from torchrelay.checkpoint.files.blob_reader import open_blob_file
from torchrelay.checkpoint.format.shard import entries, header
from torchrelay.checkpoint.format.shard.entries import LEAVES, WrittenRows
from torchrelay.errors import DamagedError, RelayError

NAMES = ["m.2", "m.10", "m.1", "other,x", "a b"]
"""Not in the order in which the file has them."""


def plain_file() -> bytes:
    """A file of nothing but tensors that are blobs by themselves."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        save_blobs(
            path, {name: torch.full((number + 1,), float(number)) for number, name in enumerate(NAMES)}
        )
        return path.read_bytes()


PLAIN = plain_file()
HEADER_BYTES = 8 + int.from_bytes(PLAIN[:8], "little")
TEXT = PLAIN[8:HEADER_BYTES].decode().rstrip()
ROWS = range(TEXT.index('[[\\"'), TEXT.index("]]") + 2)


def with_header(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    data = data.ljust(len(data) + -(len(data) + 8) % 4096)
    return len(data).to_bytes(8, "little") + data + PLAIN[HEADER_BYTES:]


def opened(path: Path) -> object:
    """What a file tells of its leaves, or why it is refused."""
    try:
        file = open_blob_file(path)
        return [file.specs[name] for name in file.specs], list(file.values), dict(file.header.entries)
    except RelayError as error:
        return type(error), str(error)


def opened_decoded(path: Path) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(header, "written_header", lambda *args: None)
        patch.setattr(header, "metadata_with_rows", lambda text: None)
        return opened(path)


def listed(path: Path) -> bool:
    return isinstance(open_blob_file(path).header.values[LEAVES]["leaves"], WrittenRows)


def test_a_plain_list_is_not_decoded(tmp_path, monkeypatch):
    """The quick way is taken where it can be: leaves in their own order, whatever the order of the file."""
    (tmp_path / "file").write_bytes(PLAIN)
    expected = opened_decoded(tmp_path / "file")
    monkeypatch.setattr(header, "_decoded", None)
    assert listed(tmp_path / "file")
    assert opened(tmp_path / "file") == expected
    assert list(load_blobs(tmp_path / "file")) == NAMES


@pytest.mark.parametrize(
    "blobs",
    [
        {"b": torch.nn.Parameter(torch.ones(2)), "a": torch.nn.Parameter(torch.ones(3))},
        {"b": torch.nn.Parameter(torch.ones(2)), "a": torch.ones(3)},
        {"b": torch.ones(2), "n": {"epoch": 3}},
        {"b": {"inner": torch.ones(2)}, "a": torch.ones(2)},
        {"b": torch.ones(2), "%": torch.ones(3)},
        {"b": torch.ones(2), '"': torch.ones(3), "\\": torch.ones(3)},
        {"b": torch.ones(2), "ü": torch.ones(3)},
        {"b": torch.ones(0), "a": torch.ones(3)},
        {"m": torch.nn.Linear(2, 2), "a": torch.ones(3)},
        {"n": {":leaves": {"leaves": [["a", "a", "tensor"]], "sha256": ""}}, "a": torch.ones(3)},
        {"-": {":leaves": {"leaves": [["a", "a", "tensor"]], "sha256": ""}}, "a": torch.ones(3)},
    ],
    ids=[
        "parameters",
        "mixed",
        "value",
        "inside",
        "odd",
        "quotes",
        "letters",
        "empty",
        "module",
        "like",
        "before",
    ],
)
def test_every_kind_of_list_is_understood_alike(tmp_path, blobs):
    """Parameters, values, tensors inside of values, names that need escapes, values that look like a list."""
    save_blobs(tmp_path / "file", blobs)
    found = opened(tmp_path / "file")
    assert found == opened_decoded(tmp_path / "file")
    assert isinstance(found[0], list), found


def test_a_tied_tensor_is_understood_alike(tmp_path):
    """An alias has a row and no entry."""
    shared = torch.ones(2)
    save_blobs(tmp_path / "file", {"a": shared, "b": shared})
    assert opened(tmp_path / "file") == opened_decoded(tmp_path / "file")


CHANGES = [
    "",
    "m",
    "1",
    ",",
    "[",
    "]",
    "],[",
    '"',
    '\\"',
    '\\",\\"',
    '\\"],[\\"',
    '"},"',
    "\\",
    "\\\\",
    " ",
    "\n",
]
WORDS = [
    "tensor",
    "parameter",
    "nothing",
    "value",
    "ü",
    "\ud800",
    '[\\"m.1\\",\\"m.1\\",\\"tensor\\"],',
    "null",
]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_changed_list_is_understood_and_refused_as_the_decoded_one(data):
    """Whatever is put, taken away or changed in or near the list: the same leaves, or the same error."""
    text = TEXT
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(ROWS.start - 30, ROWS.stop + 20) | st.integers(0, len(text)))
        cut = data.draw(st.sampled_from([0, 1, 1, 2, 5, 30]))
        text = text[:at] + data.draw(st.sampled_from([*CHANGES, *WORDS])) + text[at + cut :]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(entries, "_AT_ONCE", data.draw(st.sampled_from([1, 30, 100, 1 << 16])))
        path = Path(folder) / "file"
        path.write_bytes(with_header(text))
        assert opened(path) == opened_decoded(path)


ONE, OTHER = ('[\\"m.2\\",\\"m.2\\",\\"tensor\\"]', '[\\"m.10\\",\\"m.10\\",\\"tensor\\"]')


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (f"{ONE},{OTHER}", f"{OTHER},{ONE}"),
        (OTHER, ONE),
        (f"{ONE},", ""),
        (f"{ONE},", f"{ONE},{ONE},"),
        (ONE, '[\\"m.2\\",\\"m.10\\",\\"tensor\\"]'),
        (ONE, '[\\"m.3\\",\\"m.3\\",\\"tensor\\"]'),
        (ONE, '[\\"m.2\\",\\"m.2\\",\\"parameter\\"]'),
        (ONE, '[\\"m.2\\",\\"m.2\\"]'),
        (ONE, '[\\"m.2\\",\\"m.2\\",\\"tensor\\",\\"tensor\\"]'),
        ('\\"tensor\\"', '\\"nothing\\"'),
        ('\\"tensor\\"', '\\"buffer\\"'),
        ("m.2", "m.3"),
    ],
)
def test_no_other_list_passes(tmp_path, old, new):
    """Rows in another order, lost, twice, of other blobs, names or roles, or of other lengths are damage."""
    assert old in TEXT[ROWS.start : ROWS.stop]
    rows = TEXT[ROWS.start : ROWS.stop].replace(old, new)
    (tmp_path / "file").write_bytes(with_header(TEXT[: ROWS.start] + rows + TEXT[ROWS.stop :]))
    with pytest.raises(DamagedError, match=r"leaves|not the one that was saved"):
        open_blob_file(tmp_path / "file")
    assert opened(tmp_path / "file") == opened_decoded(tmp_path / "file")


def test_rows_that_lie_elsewhere_are_not_the_list_of_the_file(tmp_path):
    """A list that is empty stays empty, whatever looks like it before it: the file is refused as damaged."""
    rows = TEXT[ROWS.start : ROWS.stop]
    before = TEXT[: ROWS.start].rindex('\\"values\\"')
    decoy = f'\\"like\\":{{\\":leaves\\":{{\\"leaves\\":{rows},\\"sha256\\":\\"\\"}}}},'
    text = TEXT[:before] + decoy + TEXT[before : ROWS.start] + "[]" + TEXT[ROWS.stop :]
    (tmp_path / "file").write_bytes(with_header(text))
    with pytest.raises(DamagedError, match="not the one that was saved"):
        open_blob_file(tmp_path / "file")
    assert opened(tmp_path / "file") == opened_decoded(tmp_path / "file")


def test_damage_names_its_tensor_where_the_orders_differ(tmp_path):
    """A block is compared with the digest of its own tensor, whose name the error says."""
    for number, name in enumerate(NAMES):
        data = bytearray(PLAIN)
        (tmp_path / "file").write_bytes(data)
        data[open_blob_file(tmp_path / "file").header.entries[name].start] ^= 1
        (tmp_path / "file").write_bytes(data)
        into = {name: torch.zeros(number + 1) for number, name in enumerate(NAMES)}
        with pytest.raises(DamagedError, match=rf"block 0 of {name}, at"):
            load_into(tmp_path / "file", into)
        assert not any(tensor.any() for tensor in into.values()), number


@given(st.text("ab,", max_size=40), st.integers(1, 12), st.integers(0, 3), st.integers(0, 3))
@example("aaaaaaaaaaaa,b", 1, 0, 0)
def test_windows_lose_nothing_but_separators(text, size, before, behind):
    """Put together again they are the text."""
    data = "," * before + text + "," * behind
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entries, "_AT_ONCE", size)
        found = list(entries._windows(data, before, before + len(text), ","))
    assert ",".join(found) == text
