"""The page that compares: its rows are what the cases give today."""

from __future__ import annotations

from pathlib import Path

import pytest
from side_by_side import outcome
from side_cases import CASES
from warm import PLACE, server, warmed

PAGE = (Path(__file__).resolve().parents[2] / "docs/comparison.md").read_text()
QUICK = ("second", "bit", "hole", "pickle")
"""Cases of one process; `scripts/side-by-side` runs all."""


def test_every_case_has_its_row() -> None:
    """No case is left out of the page, whatever it shows."""
    assert [case.what for case in CASES] == [
        row.split("|")[1].strip() for row in PAGE.splitlines() if row.startswith("| ") and "---" not in row
    ][1:]


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case.name in QUICK], ids=lambda case: case.name)
def test_a_row_is_true(case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides, run anew, say what the page says."""
    monkeypatch.setenv(PLACE, server())
    dcp, ours = (outcome(case, engine, warmed([])) for engine in ("dcp", "ours"))
    row = f"| {case.what} | {dcp} | {ours} |"
    assert row in PAGE.splitlines()
