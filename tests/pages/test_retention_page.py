"""The page about what is kept says what happens."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pytest

from torchrelay.tools.cli.main import main

PAGE = (Path(__file__).resolve().parents[2] / "docs/retention.md").read_text()


def tries(run: Path) -> list[int]:
    return sorted(int(one.name[1:9]) for one in (run / "checkpoints/data").iterdir())


def test_the_page_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its program leaves the epochs that it names, and its commands work, one after the other."""
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "kept.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    runpy.run_path("kept.py", run_name="__main__")
    named = re.search(r"leaves epochs ([\d, and]+)\.", PAGE)
    assert named and tries(tmp_path / "runs/kept") == [int(one) for one in re.findall(r"\d+", named[1])]
    commands = re.findall(r"^\$ torchrelay ([^#\n]*)", PAGE, re.MULTILINE)
    assert len(commands) == 7
    for command in commands:
        assert main(shlex.split(command)) == 0, command
    assert tries(tmp_path / "runs/kept") == [3, 12]
