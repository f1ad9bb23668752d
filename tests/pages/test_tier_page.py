"""docs/tier.md is true: its program and commands run in their order, as they stand."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest

from torchrelay import Tier
from torchrelay.tools.cli.main import main

PAGE = (Path(__file__).resolve().parents[2] / "docs/tier.md").read_text()


def test_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run is replicated, which `ls` tells of the near directory, and the far place proves by itself."""
    (program,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    near, far, verify = [shlex.split(line)[1:] for line in re.findall(r"^\$ (.*)$", PAGE, re.MULTILINE)]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(program)
    exec(compile(program, str(tmp_path / "train.py"), "exec"), {"__name__": "train"})
    capsys.readouterr()
    assert main(near) == 0
    assert len(re.findall(r"^ *[0-3] .*replicated", capsys.readouterr().out, re.MULTILINE)) == 4
    assert main(far) == 0 and main(verify) == 0
    out = capsys.readouterr().out
    assert "replicated" not in out and "4 of 4 epochs verified" in out


def test_every_number_is_that_of_the_code() -> None:
    """The defaults that the page tells are the defaults."""
    tier = Tier("near")
    told = {"lag": 2, "patience_secs": 600, "drain_secs": 600, "uploads": 4}
    assert {name: getattr(tier, name) for name in told} == told
    assert all(f"`{one.name}`" in PAGE for one in fields(Tier) if one.name in told)
