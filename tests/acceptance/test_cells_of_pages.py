"""The pages for people from the five ancestors: they have one form, and each statement has a test."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from page_statements import PROGRAM, PURPOSE, WORDS, Page, read_page, text_of
from test_rows_of_ancestors import ROWS, shown_by

PAGES = ("caffe2", "singa", "alf", "paddlerec", "flammable")
PARTS = ("words", "purpose", "sentences", "comments")

Cells = Mapping[str, Mapping[str, list[str]]]
"""By part of the page and statement: rows of rows_*.yaml, and node ids of tests."""


def read_cells(name: str) -> Cells:
    """What shows the statements of a page."""
    cells: Cells = yaml.safe_load(Path(__file__).with_name(f"cells_{name}.yaml").read_text())
    return cells


def ids_of(shown: str) -> tuple[str, ...]:
    """The node ids that an entry means: those of a row, or itself."""
    return ROWS.get(shown, (shown,))


def wrong_with(page: Page, cells: Cells) -> list[str]:
    """Statements without an entry, entries whose statement is gone, and tests that are not there."""
    found = []
    for part in PARTS:
        said, known = getattr(page, part), cells[part]
        found += [
            f"{part}: said twice: {one}" for one in sorted({one for one in said if said.count(one) > 1})
        ]
        found += [f"{part}: no test is named for: {one}" for one in said if not known.get(one)]
        found += [f"{part}: the page no longer says: {one}" for one in known if one not in said]
        for one, shown in known.items():
            for test in (test for entry in shown for test in ids_of(entry)):
                file, _, function = test.partition("::")
                there = Path(__file__).parents[2].joinpath(file).is_file() and function in shown_by(file)
                found += [] if there else [f"{part}: there is no test {test} (of: {one})"]
    return found


@pytest.mark.parametrize("name", PAGES)
def test_each_statement_has_a_test(name: str) -> None:
    """Each row, bullet, sentence and comment names tests that are there, and no other entry is left."""
    assert wrong_with(read_page(name), read_cells(name)) == []


@pytest.mark.parametrize("name", PAGES)
def test_statements_stand_once_in_the_file(name: str) -> None:
    """A statement that stands twice would hide the tests of the first one."""
    lines = Path(__file__).with_name(f"cells_{name}.yaml").read_text().splitlines()
    statements = [line for line in lines if line.startswith("  ") and not line.startswith("  - ")]
    assert len(statements) == len(set(statements)) == sum(map(len, read_cells(name).values()))


def test_what_is_missing_is_found() -> None:
    """A new row, a changed sentence, an entry without a test and a test that is gone are told."""
    page = read_page("alf")
    cells = {part: dict(read_cells("alf")[part]) for part in PARTS}
    page.rows.append(["a new word", "here"])
    page.sentences[0] += " More."
    cells["purpose"][page.purpose[0]] = []
    cells["purpose"][page.purpose[1]] = [
        "tests/test_rules.py::test_nothing_of_this_name",
        "no/such/file.py::test_x",
    ]
    assert [one.partition(":")[2].split(":")[0].strip()[:22] for one in wrong_with(page, cells)] == [
        "no test is named for", "no test is named for", "there is no test tests", "there is no test no/su",
        "no test is named for", "the page no longer say",
    ]  # fmt: skip


@pytest.mark.parametrize("name", PAGES)
def test_the_pages_have_one_form(name: str) -> None:
    """Their program and ours, sections of its own, a list of words, and what is different, in this order."""
    page = read_page(name)
    assert page.ancestor.lower() == name
    assert (page.sections[0], *page.sections[-2:]) == (PROGRAM, WORDS, PURPOSE)
    theirs, ours, words = page.labels
    assert theirs.startswith(page.ancestor) and ours.startswith("Here")
    assert words == f"{page.ancestor}'s words, and those here:"
    assert len(page.rows) > 10 and all(len(row) == 2 for row in page.rows)
    assert len(page.purpose) >= 4 and page.sentences
    head, _, rest = text_of(name).partition(f"## {PROGRAM}\n")
    program = rest.partition("\n## ")[0]
    assert "```" not in head
    assert re.findall(r"<!-- not run: (.*?) -->\n```", text_of(name)) == [f"{page.ancestor}'s own words"] * (
        program.count("<!-- not run")
    )
    assert 0 < program.count("<!-- not run") < program.count("\n```") / 2
