"""docs/stages.md is true: its program runs, and so do its commands, in that order."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pytest

from torchrelay.tools.cli.main import main

PAGE = (Path(__file__).resolve().parents[2] / "docs/stages.md").read_text()


def test_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The blocks are one program that trains both runs and opens the second; each command says something."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    (tmp_path / "page.py").write_text("\n".join(blocks))
    runpy.run_path(str(tmp_path / "page.py"))
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("2 leaves of encoder (")
    assert printed[-2:] == ["[]", str(tmp_path / "runs/expert/lineage/encoder")]
    lines = re.findall(r"^\$ torchrelay (.*?)(?: +#.*)?$", PAGE, re.MULTILINE)
    assert len(lines) == 3
    for line in lines:
        assert main(shlex.split(line)) == 0, line
        assert "encoder" in capsys.readouterr().out, line


def test_the_options_are_those_of_the_page() -> None:
    """The table tells every option of InitFrom but the upstream itself, and no other."""
    from torchrelay import InitFrom

    told = re.findall(r"^- `(\w+)`: ", PAGE, re.MULTILINE)
    assert ["upstream", *told] == list(InitFrom.__dataclass_fields__)
