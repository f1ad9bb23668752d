"""Pages that name tests as their evidence name tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEFINED = {
    name
    for path in (ROOT / "tests").rglob("test_*.py")
    for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
}
NAMED = {
    page.relative_to(ROOT).as_posix(): names
    for page in (ROOT / "docs").rglob("*.md")
    if (names := set(re.findall(r"`(test_\w+)`", page.read_text())))
}


@pytest.mark.parametrize("page", sorted(NAMED))
def test_named_tests_exist(page: str) -> None:
    """A test that is renamed or deleted is renamed or deleted on the page."""
    assert not NAMED[page] - DEFINED


def test_the_page_about_trainers_has_evidence() -> None:
    """Each library has a table whose rows name their tests."""
    assert len(NAMED["docs/guides/trainers.md"]) > 8
