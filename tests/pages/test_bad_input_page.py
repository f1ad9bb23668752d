"""tests/bad_input/README.md names every kind of bad input, and only tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "tests/bad_input/README.md").read_text()
ROWS = {"A": 28, "B": 11, "C": 8, "D": 12, "E": 15, "F": 8, "G": 6, "H": 14, "I": 8, "J": 7}
"""How many kinds there are of each sort."""
LINES = [line[2:].split(": ", 1) for line in PAGE.splitlines() if re.match(r"- [A-J]\d", line)]


def rows_of(cell: str) -> list[str]:
    """`E7, E9 to E11 sizes` names E7, E9, E10 and E11."""
    found: list[str] = []
    for first, last in re.findall(r"\b([A-J]\d+)(?: to ([A-J]\d+))?(?=,| |$)", cell):
        until = int((last or first)[1:])
        found += [f"{first[0]}{number}" for number in range(int(first[1:]), until + 1)]
    return found


def test_every_row_is_there_once() -> None:
    """Each kind of bad input is listed exactly once."""
    told = [row for line in LINES for row in rows_of(line[0])]
    assert sorted(told) == sorted(f"{sort}{n}" for sort, count in ROWS.items() for n in range(1, count + 1))


def test_every_named_test_exists() -> None:
    """A row names tests that can be run, or says why there is none."""
    for line in LINES:
        named = re.findall(r"`(tests/[a-z_/0-9]+\.py)::(test_[a-z_0-9]+)`", line[-1])
        assert named or line[-1].lower().endswith("no test"), line
        for file, name in named:
            tree = ast.parse((ROOT / file).read_text())
            assert name in {one.name for one in tree.body if isinstance(one, ast.FunctionDef)}, (file, name)
