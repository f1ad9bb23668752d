"""docs/launch-torchx.md is true: its command prints what it says, its options are those there are."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from torchrelay.tools.cli.main import main
from torchrelay.tools.launch import torchx as target

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/launch-torchx.md").read_text()
COMPONENT = "torchrelay/tools/launch/torchx_component.py"


def test_the_command_prints_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The dry run prints what it would run: torchx, the default scheduler and the component."""
    (line,) = re.findall(r"^```console\n\$ torchrelay (.*)\n```", PAGE, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert main(shlex.split(line)) == 0
    out = capsys.readouterr().out
    assert "-m torchx.cli.main run -s local_cwd " in out and f"/{COMPONENT}:job" in out


def test_the_options_are_those_of_the_page() -> None:
    """Every key of --set is told, none is made up; the component lies where the page says."""
    rows = re.findall(r"^- (`.*?`): ", PAGE.split("## Options\n")[1], re.MULTILINE)
    assert {key for row in rows for key in re.findall(r"`(\w+)`", row)} == set(target._READ)
    assert f"path/to/{COMPONENT}:job" in PAGE and (ROOT / "src" / COMPONENT).is_file()
