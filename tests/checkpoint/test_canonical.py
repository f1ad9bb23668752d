"""Canonical JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrelay.checkpoint.format import canonical_json
from torchrelay.errors import DamagedError, UsageError

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(1 - 2**53, 2**53 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=("Cs",))),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(JSON)
def test_canonical_json_comes_back_and_is_written_the_same_again(value):
    """What was written is read as the same value, and the value has only one text."""
    data = canonical_json.dumps(value)
    found = canonical_json.loads(data, what="x")
    assert repr(found) == repr(value) or found == value
    assert canonical_json.dumps(found) == data


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"\xff",
        b"[NaN]",
        b"[-Infinity]",
        b"[1e999]",
        b"[9007199254740992]",
        b"[-9007199254740992]",
        b"[" + b"1" * 100_000 + b"]",
        b'{"a":1,"a":1}',
        b"[" * 200 + b"]" * 200,
        b"[" * 100_000 + b"]" * 100_000,
        b"[1] 2",
        b'["\\ud800"]',
        b'{"a\\uDFFF":1}',
    ],
)
def test_what_canonical_json_cannot_hold_is_damage_that_names_the_file(text):
    """Duplicate keys, huge numbers, constants, deep nesting and no JSON are refused by name."""
    with pytest.raises(DamagedError, match=r"log/7\.json"):
        canonical_json.loads(text, what="log/7.json")


def test_size_and_depth_are_bounded_as_asked():
    """The limits are the caller's."""
    assert canonical_json.loads(b"[[1]]", what="x", depth=2) == [[1]]
    with pytest.raises(DamagedError, match="deeper than 1"):
        canonical_json.loads(b"[[1]]", what="x", depth=1)
    with pytest.raises(DamagedError, match="limit of 2"):
        canonical_json.loads(b"[1]", what="x", limit_bytes=2)


@pytest.mark.parametrize(
    "value", [2**53, float("nan"), {1: 2}, {0: 1}, {None: 1}, "\ud800", {"a": object()}, [b"x"]]
)
def test_what_could_not_be_read_back_is_never_written(value):
    """Writing refuses what reading would refuse."""
    with pytest.raises(UsageError):
        canonical_json.dumps(value)
    cycle: list = []
    cycle.append(cycle)
    with pytest.raises(UsageError):
        canonical_json.dumps(cycle)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 3), st.integers(1, 20))
def test_long_content_is_written_as_short_content_is(depth: int, factor: int) -> None:
    """What is written in several steps, so that other threads run between them, has the same bytes."""
    rows: Any = [{"b": [i, None, "ä"], "a": (i, f"x{i}")} for i in range(60 * factor)]
    value: Any = {"rows": rows, **{f"k{i}": {"n": i} for i in reversed(range(60 * factor))}}
    for _ in range(depth):
        value = [value, {"one": (value, True)}]
    plain = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert canonical_json.dumps(value) == plain.encode()
