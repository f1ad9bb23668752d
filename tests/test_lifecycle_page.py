"""docs/lifecycle.md is true: what it shows stands in the example, its table is that of the steps."""

from __future__ import annotations

import re
from pathlib import Path

from torchrelay import lifecycle
from torchrelay.runners.lifecycle.context import StepContext
from torchrelay.runners.lifecycle.order import STEPS

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/lifecycle.md").read_text()


def test_the_classes_on_the_page_are_those_of_the_example() -> None:
    """Model, Reader and Startup on the page stand in the example's files, which a test runs."""
    shown = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    files = "".join(path.read_text() for path in (ROOT / "examples/paddlerec_style").glob("*.py"))
    assert len(shown) == 4 and all(one in files for one in shown[:3])


def test_the_table_of_steps_is_the_order_of_steps() -> None:
    """Each step has its row with class, key and what it sets; the classes can be had from the front door."""
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)`, `(\w+)` \| .* \| (.*)\|$", PAGE, re.MULTILINE)
    assert [row[:3] for row in rows] == [(one.name, one.class_name, one.key) for one in STEPS]
    for name, kind, _, told in rows:
        sets = [one for one, slot in vars(StepContext).items() if getattr(slot, "setter", None) == name]
        assert re.findall(r"`(\w+)`", told) == sets
        assert callable(getattr(getattr(lifecycle, kind), name))
