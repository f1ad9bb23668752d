"""Names of nodes and blobs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrelay.errors import UsageError
from torchrelay.jobs.cluster import check_blob_name, check_blob_names, check_node_name

PARTS = st.lists(st.sampled_from("ab"), min_size=1, max_size=4).map(".".join)


@pytest.mark.parametrize("name", ["trainer_0", "trainer:0", "A", "0", "a.b-c_d:e", "a" * 63])
def test_good_node_names(name):
    """Letters, digits, dots, underscores, colons and dashes make a node name."""
    assert check_node_name(name) == name


@pytest.mark.parametrize("name", ["model", "a/b/c", "ä ö", "%41", "x" * 1024, "trainer_0/total"])
def test_good_blob_names(name):
    """Blob names may hold slashes, spaces and any script."""
    assert check_blob_name(name) == name


@pytest.mark.parametrize(
    ("name", "why"),
    [
        *((f"a{c}b", "addresses") for c in ":*?[]@"),
        ("", "empty"),
        ("x" * 1025, "1025 bytes"),
        ("a\x00", "control"),
        ("a\x7f", "control"),
        ("\ud800", "surrogate"),
        (3, "int"),
        (None, "NoneType"),
    ],
)
def test_bad_blob_names_are_refused_with_the_reason(name, why):
    """Characters of addresses, control characters, emptiness and length are refused by name."""
    with pytest.raises(UsageError, match=why):
        check_blob_name(name)


@given(st.lists(PARTS, max_size=6))
@settings(deadline=None, max_examples=200)
def test_names_are_refused_exactly_when_one_is_a_dotted_prefix_of_another(names):
    """The rule agrees with its definition on any list of dotted names."""
    mixing = any(a != b and b.startswith(a + ".") for a in names for b in names)
    if mixing:
        with pytest.raises(UsageError, match="dotted prefix"):
            check_blob_names(names)
    else:
        check_blob_names(names)


def test_a_common_beginning_without_a_dot_is_fine():
    """`model` and `model_ema` do not mix."""
    check_blob_names(["model", "model_ema", "mod"])
