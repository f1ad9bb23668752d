"""docs/lifecycle.md is true: what it shows stands in the example, its table is that of the steps."""

from __future__ import annotations

import re
import shlex
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from torchrelay import lifecycle
from torchrelay.runners.config_runs.context import ENTRIES, STEPS
from torchrelay.tools.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/lifecycle.md").read_text()


def test_the_classes_on_the_page_are_those_of_the_example() -> None:
    """Model, Reader and Startup on the page stand in the example's files, which a test runs."""
    shown = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    files = "".join(path.read_text() for path in (ROOT / "examples/paddlerec_style").glob("*.py"))
    assert len(shown) == 3 and all(one in files for one in shown)


def test_the_verbs_on_the_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each command of the part on runs with a history ends with 0 and says something, in the page's order."""
    shutil.copytree(ROOT / "examples/paddlerec_style", tmp_path / "rec")
    monkeypatch.chdir(tmp_path / "rec")
    monkeypatch.delenv("TORCHRELAY_RUNS", raising=False)
    part = PAGE.partition("## With a history")[2]
    commands = re.findall(r"^\$ torchrelay (.*)$", part, re.MULTILINE)
    assert len(commands) == 6 and "\n$ torchrun " in part
    for words in commands:
        with suppress(SystemExit):
            assert main(shlex.split(words)) == 0, words
        told = capfd.readouterr()
        assert told.out and "Error" not in told.err, (words, told.err)
    assert (tmp_path / "rec/out.csv").read_text().startswith("index,click")
    assert "max_epochs raised" not in told.out and "first try" in told.out and "  4 " in told.out


def test_the_table_of_steps_is_the_order_of_steps() -> None:
    """Each step has its row with class, key and what it sets; the classes can be had from the front door."""
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)`, `(\w+)` \| .* \| (.*)\|$", PAGE, re.MULTILINE)
    assert [row[:3] for row in rows] == [(one.name, one.class_name, one.key) for one in STEPS]
    for name, kind, _, told in rows:
        sets = [one for one, (setter, _) in ENTRIES.items() if setter == name]
        assert re.findall(r"`(\w+)`", told) == sets
        assert callable(getattr(getattr(lifecycle, kind), name))
