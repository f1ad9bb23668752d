"""The page about the design is short, leads to what exists, and leaves out no folder."""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/design.md").read_text()
ROOMS = ("tools", "jobs", "checkpoint", "models", "runners", "metadata", "integrations")
FOLDERS = {
    f"{path.parent.relative_to(ROOT)}/"
    for room in ROOMS
    for path in (ROOT / room).rglob("*.py")
    if path.name != "__init__.py"
}
MOST_WORDS, LONGEST_SENTENCE = 4000, 40


def quoted() -> set[str]:
    """What stands in backquotes in the text, pictures aside."""
    return set(re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL)))


def paths() -> list[str]:
    """The paths from the root among it: of a folder below a folder of the repository, or of a file there."""
    tops = {one.name for one in ROOT.iterdir()}
    return sorted(one for one in quoted() if re.fullmatch(r"[\w./-]+", one) and one.split("/")[0] in tops)


def sentences() -> list[str]:
    """The sentences of the text; a cell, a heading and an item of a list end one, too."""
    text = re.sub(r"```.*?```|<!--.*?-->", "", PAGE, flags=re.DOTALL)
    lines = [re.sub(r"^(#+|[-*]|\d+\.) ", "\n", line) for line in text.splitlines()]
    blocks = re.split(r"\n\s*\n|\||\n(?=\n)", "\n".join(lines))
    return list(chain.from_iterable(re.split(r"[.!?][*)]*\s+", block.strip()) for block in blocks))


def test_every_folder_with_modules_is_named() -> None:
    """Whoever reads the page has heard of each folder of the product."""
    assert not FOLDERS - quoted()


def test_paths_on_the_page_exist() -> None:
    """Every path is one from the root, and is there."""
    assert len(paths()) > 50
    assert not [path for path in paths() if not (ROOT / path).exists()]


def test_names_of_modules_are_paths_from_the_root() -> None:
    """A file that is named by less than its path would not be missed when it moves."""
    assert not [one for one in quoted() if re.fullmatch(r"[\w./-]+\.py", one) and one not in paths()]


def test_the_page_stays_short() -> None:
    """It is read in one sitting: neither a catalogue of modules nor a history."""
    assert len(PAGE.split()) < MOST_WORDS


def test_sentences_stay_short() -> None:
    """A sentence says one thing."""
    assert len(sentences()) > 200
    assert not [one for one in sentences() if len(one.split()) > LONGEST_SENTENCE]


def test_contributors_are_led_to_the_page() -> None:
    """CONTRIBUTING.md has the link to it, and to its table of changes."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert "(docs/design.md)" in text and "(docs/design.md#where-to-begin-a-change)" in text
