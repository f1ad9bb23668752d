"""The list of planted bugs is up to date, and planting one makes its tests fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from seeded_bugs import bugs
from seeding import ROOT, plant, try_out

BUGS = list(bugs())
QUICK = ("the log is not synced before an append returns", "the last of two equal JSON keys wins")


def test_every_bug_can_be_planted() -> None:
    """Its code stands once where it is said to stand, what replaces it compiles, and its tests exist."""
    assert len(BUGS) >= 25 and len({bug.name for bug in BUGS}) == len(BUGS)
    for bug in BUGS:
        code = (ROOT / bug.path).read_text()
        assert code.count(bug.old) == 1, bug.name
        if bug.path.endswith(".py"):
            compile(code.replace(bug.old, bug.new), bug.name, "exec")
        assert bug.old != bug.new
        assert all((ROOT / test).exists() for test in bug.tests if "/" in test), bug.name


@pytest.mark.slow
@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug.name in QUICK], ids=lambda bug: bug.name)
def test_a_planted_bug_is_noticed(bug, tell: Callable[[str], None]) -> None:
    """In a copy of the repository; `scripts/seeded-bugs` tries all of them."""
    verdict = try_out(bug)
    tell(f"planted: {bug.name}: noticed by {verdict.by}")
    assert verdict.caught, verdict.output


def test_code_that_is_not_there_is_told(tmp_path) -> None:
    """A bug that does not fit the code any more is an error, not a bug that nobody notices."""
    path = tmp_path / BUGS[0].path
    path.parent.mkdir(parents=True)
    path.write_text("something else")
    with pytest.raises(ValueError, match="stands 0 times"):
        plant(BUGS[0], tmp_path)
