"""Tensor keys and shard file names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.checkpoint.format.names import (
    Box,
    Flat,
    ShardName,
    Whole,
    check_attempt,
    format_key,
    parse_key,
    parse_shard_file_name,
    shard_file_name,
)
from torchrelay.checkpoint.format.position import Position
from torchrelay.errors import BlobError, DamagedError, UsageError

GOLDEN = Path(__file__).parents[1] / "golden"
NAMES = st.text(st.characters(exclude_categories=("Cs",)), min_size=1)
INTERVALS = st.tuples(st.integers(0, 2**50), st.integers(0, 2**50)).map(lambda pair: (min(pair), max(pair)))
KEYS = st.one_of(
    NAMES.map(Whole),
    st.builds(Box, NAMES, st.lists(INTERVALS, min_size=1, max_size=4).map(tuple)),
    st.builds(lambda name, interval: Flat(name, *interval), NAMES, INTERVALS),
)


@given(KEYS)
def test_every_key_comes_back_from_its_text(key):
    """No two keys share a text, and no text has a control character."""
    text = format_key(key)
    assert parse_key(text) == key
    assert text.isprintable() or all(ord(c) >= 0x20 for c in text)
    assert text != "__metadata__"


def test_key_forms_are_frozen(monkeypatch):
    """Today's keys are the committed ones."""
    monkeypatch.syspath_prepend(str(GOLDEN))
    from make_tables import KEYS as frozen

    committed = json.loads((GOLDEN / "keys.json").read_text())
    assert [format_key(key) for key in frozen] == list(committed)
    assert [parse_key(text) for text in committed] == frozen


@pytest.mark.parametrize(
    "text",
    ["", "@flat[0:1]", "a@", "a@[", "a@[]", "a@[1:0]", "a@[01:2]", "a@flat[0:1,1:2]", "a@[0:1]b", "a%", "a%4",
     "a%41", "a%e9", "a%C3", "a\nb", "a@b", "a@[-1:2]", "__metadata__", "a@[0:99999999999999999999]"],
)  # fmt: skip
def test_only_the_canonical_text_of_a_key_is_read(text):
    """Anything that format_key would not write is damage."""
    with pytest.raises(DamagedError):
        parse_key(text)


@pytest.mark.parametrize(
    "key", [Whole(""), Whole("\ud800"), Box("a", ()), Flat("a", 3, 1), Box("a", ((-1, 2),))]
)
def test_impossible_keys_are_refused_at_the_user(key):
    """A name or an interval that cannot be is a BlobError."""
    with pytest.raises(BlobError):
        format_key(key)


@given(
    st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,62}", fullmatch=True),
    st.integers(0, 99999999),
    st.integers(0, 10**6),
    st.from_regex(r"[a-z][a-z_]{0,9}", fullmatch=True),
    st.integers(1, 999),
)
def test_shard_file_names_come_back(node, epoch, step, group, part):
    """Dots in node names, steps, parts and escaped characters are told apart."""
    name = ShardName(node, Position(epoch, step), group, part)
    text = shard_file_name(name)
    assert "/" not in text
    assert parse_shard_file_name(text) == parse_shard_file_name(text.replace(":", "%3A")) == name


def test_shard_file_names_read_as_in_the_format():
    """The names that the format's page shows."""
    assert shard_file_name(ShardName("trainer_0", Position(4), "optim")) == "trainer_0.4.optim.safetensors"
    name = ShardName("a:1", Position(3, 1200), "main", 2)
    assert shard_file_name(name) == "a:1.3+1200.main.2.safetensors"
    assert parse_shard_file_name("a%3A1.3+1200.main.2.safetensors") == name


@pytest.mark.parametrize("node", ["", "..", ".a", "a/b", "a b", "a\n", "x" * 64, "\u00e9"])
def test_bad_node_names_never_reach_a_path(node):
    """Slashes, dots first, spaces, length and other letters are refused."""
    with pytest.raises(UsageError, match="node name"):
        shard_file_name(ShardName(node, Position(1), "main"))


@pytest.mark.parametrize(
    "text", ["a.1.main", "a.1.Main.safetensors", "a.1.main.1.safetensors", "../a.1.main.safetensors",
             "a.01.main.safetensors", "%2E%2E.1.main.safetensors", "a.1.main.02.safetensors"],
)  # fmt: skip
def test_other_file_names_are_no_shards(text):
    """Only names that could have been written are read."""
    with pytest.raises(DamagedError):
        parse_shard_file_name(text)


def test_tries_are_checked():
    """A try's name is its position and a nonce."""
    assert check_attempt(Position(3, 1200).directory("7f3a9c")) == "e00000003s001200-7f3a9c"
    for text in ("e4-7f3a9c", "..", "e00000004-", "e00000004-7f3a9c/x"):
        with pytest.raises(DamagedError):
            check_attempt(text)
