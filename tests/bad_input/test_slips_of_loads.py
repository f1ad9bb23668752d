"""A user's slip around a blob file or an epoch is one error that names the thing and the remedy."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch

import torchrelay
from torchrelay.errors import FormatError, UsageError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A small file of `save_blobs`."""
    where = tmp_path / "file"
    torchrelay.save_blobs(where, {"model": torch.nn.Linear(2, 1)})
    return where


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"device": "gpu"}, r"device='gpu' cannot be used here"),
        ({"names": 3}, r"invalid 3: expected a name"),
        ({"rename": "net"}, r"invalid rename='net': expected new names by old ones"),
        ({"prefix": "modle."}, r"no name begins with prefix='modle\.'"),
    ],
)
def test_odd_arguments_of_a_load(file, options, told):
    """They are told as what they are, before anything is read."""
    with pytest.raises(UsageError, match=told):
        torchrelay.load_blobs(file, **options)


@pytest.mark.parametrize(
    ("blobs", "options", "told"),
    [
        ({"model": torch.nn.Linear(2, 1)}, {"dtype": {"modle": torch.float16}}, "no leaf matches 'modle', a"),
        ({"": 1}, {}, r"'' cannot be the name of a blob: it is empty"),
        (torch.nn.Linear(2, 1), {}, r"invalid blobs Linear: expected them by name"),
    ],
)
def test_odd_arguments_of_a_save(tmp_path, blobs, options, told):
    """A mistyped pattern of types converts nothing in silence; a module is not printed whole."""
    with pytest.raises(UsageError, match=told):
        torchrelay.save_blobs(tmp_path / "file", blobs, **options)
    assert not list(tmp_path.iterdir())


def test_a_rename_that_is_no_mapping(file):
    """Also where objects are filled."""
    with pytest.raises(UsageError, match=r"invalid rename='net': expected new names by old ones"):
        torchrelay.load_into(file, {"model": torch.nn.Linear(2, 1)}, rename="net")


def test_what_is_no_path(tmp_path):
    """A number where a path belongs."""
    for call in (torchrelay.open_checkpoint, torchrelay.load_blobs):
        with pytest.raises(UsageError, match="invalid path 3"):
            call(3)
    with pytest.raises(UsageError, match="invalid path 3"):
        torchrelay.save_blobs(3, {"n": 1})


def test_a_safetensors_file_of_another_program(tmp_path):
    """It is not called damaged, and the way in is named."""
    entry = {"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    header = json.dumps(entry, separators=(",", ":")).encode()
    where = tmp_path / "theirs.safetensors"
    where.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    with pytest.raises(FormatError, match=r"not written by save_blobs: .*import_checkpoint"):
        torchrelay.load_blobs(where)


def test_a_pickle_that_needs_its_code_is_told_without_advice_to_run_it(tmp_path):
    """What stands in the way is named; torch's text about weights_only=False is left out."""
    torch.save({"f": print}, tmp_path / "theirs.pt")
    with pytest.raises(FormatError, match=r"print; save tensors") as caught:
        torchrelay.import_checkpoint(tmp_path / "theirs.pt", tmp_path / "out", format="torch")
    assert "two options" not in str(caught.value)


def test_what_torch_did_not_write_is_said_to_be_none_of_its_files(tmp_path):
    """A text, an empty file, a cut one: nobody is told that these have code to run, nor to run it."""
    torch.save({"a": torch.ones(100)}, tmp_path / "whole.pt")
    (tmp_path / "text").write_text('"""A program."""')
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "cut").write_bytes((tmp_path / "whole.pt").read_bytes()[:900])
    (tmp_path / "odd").write_bytes(b'\x80\x02".')
    reasons = {"text": "--from", "empty": "--from", "cut": "damaged", "odd": "Unsupported operand 34$"}
    for name, reason in reasons.items():
        with pytest.raises(FormatError, match=rf"{name} is not a file of torch.save.*{reason}") as caught:
            torchrelay.import_checkpoint(tmp_path / name, tmp_path / "out", format="torch")
        assert "weights_only" not in str(caught.value)
        assert ("its code" in str(caught.value)) == (name == "odd")
