"""scripts/test and the campaigns are as they say: what is slow is known, every campaign has its line."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

import pytest
from torchrun import REPOSITORY

CAMPAIGNS = REPOSITORY / "scripts/campaigns"
ROWS = [
    line.split() for line in (REPOSITORY / "tests/durations.txt").read_text().splitlines() if line[:1] != "#"
]


def functions(path: Path) -> set[str]:
    """The names that a file defines."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)}


def test_every_test_that_is_known_to_be_slow_exists() -> None:
    """A line about a test that is gone, or has another name, leaves its successor in the quick command."""
    for secs, name in ROWS:
        file, _, function = name.partition("[")[0].partition("::")
        assert (REPOSITORY / file).exists() and float(secs) > 0, name
        assert not function or function in functions(REPOSITORY / file), name
    assert len({name for _, name in ROWS}) == len(ROWS)


def test_what_is_slow_is_marked(request: pytest.FixtureRequest) -> None:
    """Of the tests of this session those that take long have the mark, and this one has not."""
    known = {name for _, name in ROWS}
    for item in request.session.items:
        if known & {item.nodeid, item.nodeid.partition("[")[0], item.nodeid.partition("::")[0]}:
            assert item.get_closest_marker("slow"), item.nodeid
    assert not request.node.get_closest_marker("slow")


def test_every_campaign_has_its_line_and_the_sample_exists() -> None:
    """The page has each script of the folder, and the tests that it names are there."""
    page = (CAMPAIGNS / "README.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \| .* \| (.*?) ?\|$", page, re.MULTILINE)
    scripts = {path.name for path in CAMPAIGNS.iterdir() if path.suffix != ".md"}
    assert {name for name, _ in rows} == scripts
    for name, sample in rows:
        assert os.access(CAMPAIGNS / name, os.X_OK), name
        assert all((REPOSITORY / one).exists() for one in re.findall(r"`(tests/.*?)`", sample)), sample


def test_a_sample_is_smaller_than_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a campaign lifts is what the tests bound."""
    import samples

    assert samples.sample(1, 2) == (2 if samples.WHOLE else 1)
    monkeypatch.setattr(samples, "WHOLE", not samples.WHOLE)
    assert samples.sample(1, 2) == (2 if samples.WHOLE else 1)
