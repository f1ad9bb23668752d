"""docs/launch.md is true: its commands are understood, and its codes are those of the program."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from torchrelay.tools.cli.main import main
from torchrelay.tools.launch.outcome import TABLE

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "launch.md").read_text()


def test_the_commands_of_the_page_are_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of them makes its files, which name the command; that files are what is started others test."""
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "config.yaml"):
        Path(name).touch()
    lines = re.findall(r"^\$ torchrelay launch (.*)$", PAGE, re.MULTILINE)
    assert len(lines) >= 4
    for line in lines:
        assert main(["launch", "--dry-run", *shlex.split(line)]) == 0, line
        assert shlex.split(line)[-1] in capsys.readouterr().out


def test_the_guide_has_every_code_that_a_launch_ends_with() -> None:
    """No code is missing in the list that the page links to, and none is made up."""
    assert "(guide.md#how-a-program-ends)" in PAGE
    listed = re.findall(r"^- (\d+): ", (DOCS / "guide.md").read_text(), re.MULTILINE)
    assert [int(code) for code in listed] == sorted(TABLE)
