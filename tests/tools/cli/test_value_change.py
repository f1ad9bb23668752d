"""How changed values are told: of a dict what changed, of anything else both."""

from __future__ import annotations

from typing import Any

import pytest

from torchrelay.checkpoint.format.values import encode
from torchrelay.tools.cli.checkpoints.diff import value_change


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (0.1, 0.25, "0.1 -> 0.25"),
        ({"T_max": 8, "last_epoch": 1}, {"T_max": 8, "last_epoch": 3}, "last_epoch 1 -> 3"),
        ({1: "a"}, {2: "a"}, "1 'a' -> none, 2 none -> 'a'"),
        (
            {str(n): 0 for n in range(9)},
            {str(n): 1 for n in range(9)},
            "0 0 -> 1, 1 0 -> 1, 2 0 -> 1, 6 more",
        ),
        ([1], "x" * 99, f"[1] -> 'x{'x' * 35}..."),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, "the order of entries"),
    ],
)
def test_what_changed_is_told(before: Any, after: Any, said: str) -> None:
    """Entries that are alike are not told, long values are cut."""
    assert value_change(encode(before, "b"), encode(after, "b")) == said


def test_what_takes_a_library_stays_as_it_is_stored() -> None:
    """A torch.dtype in a value is not made, for that would import torch."""
    assert "float32" in value_change({"$": "torch.dtype", "v": "float32"}, 1)
