"""Configuration text: what is read means one thing, everything else is refused with its place."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrelay.errors import UsageError
from torchrelay.jobs.config.yaml_reader import LIMIT_BYTES, YamlError, read_yaml, read_yaml_file

TEXT = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Zl", "Zp")), max_size=12)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT
)
TREES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=150)
@given(st.dictionaries(TEXT, TREES, max_size=5), st.booleans())
def test_what_is_written_plainly_is_read(tree: dict[str, Any], flow: bool) -> None:
    """Of strings in quotes, numbers, truth values, lists and mappings nothing changes on the way."""
    quoted = yaml.dump(tree, Dumper=_Quoting, default_flow_style=flow, allow_unicode=True)
    assert read_yaml(quoted.encode(), "c.yaml").value == tree


class _Quoting(yaml.SafeDumper):
    """Writes every string in quotes."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Quoting.add_representer(
    str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"')
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("-0", 0),
        ("+12", 12),
        ("on", "on"),
        ("no", "no"),
        ("yes", "yes"),
        ("1:30", "1:30"),
        ("12:34:56", "12:34:56"),
        ("2026-01-02", "2026-01-02"),
        ("TRUE", True),
        ("~", None),
        ("", None),
        ("'010'", "010"),
        ("v1_0", "v1_0"),
        ("1.2.3", "1.2.3"),
    ],
)
def test_words_are_those_of_yaml_1_2(text: str, value: Any) -> None:
    """Whatever YAML 1.1 made of them."""
    found = read_yaml(f"a: {text}\n".encode(), "c.yaml").value["a"]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("a: 1\nb: 2\na: 3\n", "3:1", "first in line 1"),
        ("a: &x 1\nb: 2\n", "1:4", "anchors"),
        ("a: 1\nb: [2, *x]\n", "2:8", "aliases"),
        ("a: {<<: {b: 1}}\n", "1:5", "merge"),
        ("a: !!python/object/apply:os.system [x]\n", "1:4", "tags"),
        ("a: !own 1\n", "1:4", "tags"),
        ("a: 010\n", "1:4", "quote it"),
        ("a: 0x1F\n", "1:4", "quote it"),
        ("a: 1_000\n", "1:4", "quote it"),
        ("a: [1, .nan]\n", "1:8", "quote it"),
        ("a: -.inf\n", "1:4", "quote it"),
        ("a: 1e999\n", "1:4", "float"),
        ("a: " + "9" * 5000, "1:4", "5000 characters"),
        ("a:\n\t- 1\n", "2:1", "token"),
        ("a: [1, 2\n", "2:1", ""),
        ("a: 'x\n", "1:4", "not closed"),
        ("a: 1\n---\nb: 2\n", "2:1", "second document"),
        ("? [a, b]\n: 1\n", "1:3", "expected a word"),
        ("[1, 2]\n", "1:1", "mapping"),
        ("# nothing\n", "1:1", "mapping"),
        ("", "1:1", "mapping"),
        ("null\n", "1:1", "mapping"),
        ("a: \x00\n", "1:4", "is not allowed in YAML"),
        ("a: \x07\n", "1:4", "is not allowed in YAML"),
    ],
)
def test_what_is_refused_is_told_with_its_place(text: str, place: str, words: str) -> None:
    """One line: file, line, column, reason."""
    with pytest.raises(YamlError) as caught:
        read_yaml(text.encode(), "c.yaml")
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"c.yaml:{place}: ") and words in line and len(line) < 200


def test_all_is_told_at_once() -> None:
    """Twelve slips give twelve lines in the order of the text."""
    text = "".join(f"key{number}: 0{number}\n" for number in range(1, 13))
    with pytest.raises(YamlError) as caught:
        read_yaml(text.encode(), "c.yaml")
    assert [one.place.line for one in caught.value.problems] == list(range(1, 13))


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [" + "x," * 9 + "]\n" + "".join(f"b{n}: &b{n} [" + "*a," * 9 + "]\n" for n in range(9)),
        "a: &a\n  k: 1\n" + "".join(f"m{n}: &m{n}\n  <<: [*a, *a]\n" for n in range(9)),
        "a: &a [*a]\n",
        "a: " + "[" * 10_000,
        "{a: " * 10_000,
        "a:\n" + "".join(" " * n + "- \n" for n in range(500)),
        "".join(f"k{n}: 1\n" for n in range(20_000)),
        "a: " + "x" * LIMIT_BYTES,
        "a: '" + "x\n" * 100_000,
    ],
)
def test_bombs_are_refused_quickly(text: str) -> None:
    """Whatever would grow, or nest, ends at its limit."""
    began = time.process_time()
    with pytest.raises(YamlError):
        read_yaml(text.encode(), "c.yaml")
    assert time.process_time() - began < 5


@pytest.mark.parametrize("data", [b"a: \xff\n", "a: 1\n".encode("utf-16"), b"a: caf\xe9\n", b"\xed\xa0\x80"])
def test_other_encodings_are_refused(data: bytes) -> None:
    """With the byte at which it shows."""
    with pytest.raises(YamlError, match="is not valid UTF-8"):
        read_yaml(data, "c.yaml")


def test_places_of_values_and_keys() -> None:
    """What a schema needs to say where a value is wrong."""
    document = read_yaml(b"a:\n  b: [1, {c: 2}]\n", "c.yaml")
    at = {where: (place.line, place.column) for where, place in document.values.items()}
    assert at[("a", "b", 1, "c")] == (2, 14) and at[("a", "b", 0)] == (2, 7)
    assert (document.keys[("a", "b")].line, document.keys[("a", "b")].column) == (2, 3)


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    """A pipe is not waited for, a directory, device or missing file is named."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "c.yaml").write_text("a: 1\n")
    assert read_yaml_file(tmp_path / "c.yaml").value == {"a": 1}
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "none", "/dev/zero"):
        with pytest.raises(UsageError, match=str(path)):
            read_yaml_file(path)
