"""docs/launch-torchx.md is true: its command prints what it shows, its options are those there are."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from torchrelay.tools.cli.main import main
from torchrelay.tools.launch import torchx as target

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/launch-torchx.md").read_text()
COMPONENT = "torchrelay/tools/launch/torchx_component.py"


def test_the_command_prints_what_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The dry run, but for the places of this machine, prints the text below it."""
    ((line, told),) = re.findall(r"^```\n\$ torchrelay (.*)\n((?:.*\n)*?)```", PAGE, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert main(shlex.split(line)) == 0
    out = capsys.readouterr().out.replace(str(tmp_path), "/src").replace(sys.executable, "python")
    assert re.sub(rf"\S*/{COMPONENT}", f"/venv/{COMPONENT}", out) == told


def test_the_options_are_those_of_the_page() -> None:
    """Every key of --set is told, none is made up; the component lies where the page says."""
    table = PAGE.split("| key | meaning |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE)
    assert {key for row in rows for key in re.findall(r"`(\w+)`", row)} == set(target._READ)
    assert f"path/to/{COMPONENT}:job" in PAGE and (ROOT / "src" / COMPONENT).is_file()
