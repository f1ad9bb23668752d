"""The page about the design names every module, and only modules that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/design.md").read_text()
ROOMS = ("tools", "jobs", "checkpoint", "models", "runners", "metadata")
MODULES = {
    path.stem
    for room in ROOMS
    for path in (ROOT / room).rglob("*.py")
    if path.stem != "__init__" and not path.stem.startswith("command_line_")
}


def test_every_module_is_named() -> None:
    """Whoever reads the page has heard of every module; a file per command is told in one word."""
    named = set(re.findall(r"`(?:[\w/]+/)?(\w+)(?:\.\w+)?`", PAGE))
    assert not MODULES - named


def test_the_table_of_the_checkpoint_room_names_files_that_exist() -> None:
    """Every file in the first column lies at the top of the room, and each of them stands there once."""
    table = PAGE.split("| file | idea |\n", 1)[1].split("\n\n", 1)[0]
    named = [name for row in table.splitlines()[1:] for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(named) == sorted(p.stem for p in (ROOT / "checkpoint").glob("*.py") if p.stem != "__init__")


def test_paths_on_the_page_exist() -> None:
    """Every path below a folder of the repository, or of a room, is there."""
    tops = {one.name for where in (ROOT, ROOT / "checkpoint") for one in where.iterdir() if one.is_dir()}
    paths = [one for one in re.findall(r"`([a-z]\w*/[\w/.-]*)`", PAGE) if one.split("/")[0] in tops]
    assert len(paths) > 10
    for path in paths:
        there = [ROOT / path, ROOT / "checkpoint" / path]
        assert any(one.exists() or one.with_suffix(".py").exists() for one in there), path
