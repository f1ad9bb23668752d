"""Records: their bytes, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from log_helpers import entry

from torchrelay.checkpoint.format.canonical_json import seal
from torchrelay.checkpoint.format.position import Branch, Key, Position, Retirement, State, TagOrPin
from torchrelay.checkpoint.log.record import BaseRef, Record, decode, encode, record_json, slot_path
from torchrelay.errors import DamagedError, FormatError

JOB = "0d4f8f3e-6a55-4f6e-9a43-1f2b8a7c9d10"
GOLDEN = Path(__file__).parent.parent / "golden" / "log_record_v1.json"


def sample():
    state = State(
        entries=(
            replace(entry(2), extra={"colour": "blue"}),
            entry(3, step=1200, branch=1, needs=("e00000002-000002",)),
        ),
        branches=(Branch(0), Branch(1, 0, Position(2), {"epoch": 2, "process": "gpu07:81"})),
        current=1,
        next_branch=2,
        marks=(TagOrPin("tag", "best", Key(0, Position(2))),),
        retiring=(Retirement("e00000001-000001"), Retirement("e00000002-000002", ("optim",))),
        holder={"job": "mnist", "host": "gpu07", "pid": 81, "nonce": "ab", "restarts": [0]},
        released=False,
    )
    base = BaseRef("base-00ff.json", 1234, "ab" * 32, (Key(0, Position(1)),))
    return Record(
        7,
        4,
        "commit",
        "00112233",
        JOB,
        "cd" * 32,
        "2026-01-02T03:04:05+00:00",
        {"a": 1},
        state,
        base,
        {"new": [1]},
    )


def altered(**fields):
    return seal("record", {**record_json(sample()), **fields})


def test_round_trip_keeps_everything():
    """A record read back equals what was written, unknown keys of records and entries included."""
    assert decode(encode(sample()), slot=7, job=JOB) == sample()


@settings(deadline=None, max_examples=60)
@given(
    epochs=st.lists(st.integers(0, 10**7), unique=True, max_size=20),
    released=st.booleans(),
    payload=st.dictionaries(st.text(max_size=5).filter(str.isprintable), st.integers(-5, 5), max_size=4),
)
def test_round_trip_of_any_state(epochs, released, payload):
    """Whatever is live, reading back what was written gives it again, to the byte."""
    entries = tuple(entry(epoch) for epoch in sorted(epochs))
    state = replace(sample().state, entries=entries, released=released)
    record = replace(sample(), state=state, payload=payload)
    data = encode(record)
    assert decode(data, slot=7, job=JOB) == record
    assert encode(decode(data, slot=7, job=JOB)) == data


def test_golden_record_is_read_and_written_unchanged():
    """The frozen record of format 1 reads as on its first day, and the writer still makes those bytes."""
    data = GOLDEN.read_bytes()
    assert decode(data, slot=7, job=JOB) == sample()
    assert encode(sample()) == data


def test_record_is_plain_json():
    """Any JSON tool reads a record."""
    assert json.loads(encode(sample()))["record"]["live"][0]["try"] == "e00000002-000002"


def test_every_bit_flip_is_detected():
    """No single flipped bit of a record goes unnoticed."""
    data = encode(sample())
    for index in range(len(data)):
        for bit in range(8):
            broken = bytearray(data)
            broken[index] ^= 1 << bit
            with pytest.raises(DamagedError):
                decode(bytes(broken), slot=7, job=JOB)


def test_every_truncation_is_detected():
    """A record cut at any length is refused."""
    data = encode(sample())
    for length in range(len(data)):
        with pytest.raises(DamagedError):
            decode(data[:length], slot=7, job=JOB)


@pytest.mark.parametrize(
    "fields",
    [
        {"format": {"major": 2, "minor": 0, "features": []}},
        {"format": {"major": 1, "minor": 3, "features": ["nobody-has-this"]}},
        {"kind": "merge"},
    ],
)
def test_what_a_newer_version_wrote_is_a_format_error(fields):
    """An unknown major version, feature or kind is refused by name, not taken for damage."""
    with pytest.raises(FormatError, match="version"):
        decode(altered(**fields), slot=7, job=JOB)


def test_a_newer_minor_version_is_read():
    """A higher minor version without features is read, its unknown keys are kept."""
    record = decode(altered(format={"major": 1, "minor": 9, "features": []}, more=1), slot=7, job=JOB)
    assert record.extra["more"] == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"slot": 8},
        {"slot": True},
        {"job": "another"},
        {"generation": 7},
        {"generation": 8},
        {"generation": "4"},
        {"previous_sha256": None},
        {"branch": 5},
        {"next_branch": 1},
        {"live": [{}]},
        {"live": {}},
        {"marks": [{"kind": "star", "name": "x", "branch": 0, "epoch": 1, "step": 0}]},
        {"retiring": [{"try": "../../home", "groups": None}]},
        {"base": {"name": "base-/../x", "bytes": 1, "sha256": "", "gone": []}},
        {"released": 1},
        {"payload": None},
        {"format": None},
    ],
)
def test_what_no_writer_writes_is_damage(fields):
    """A sealed record with another slot, job, or a field of the wrong kind is refused."""
    with pytest.raises(DamagedError, match="log/"):
        decode(altered(**fields), slot=7, job=JOB)


def test_slot_path_is_twenty_digits():
    """The first slot is 0, and names sort as numbers do."""
    assert slot_path(0) == "log/00000000000000000000.json"
    assert slot_path(7) == "log/00000000000000000007.json"
