"""docs/code.md is true: what it shows of JobRunner, its commands and its program run as they stand."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from source_trees import fill

import torchrelay
from torchrelay import Job, JobRunner, LocalSession, max_epochs
from torchrelay.tools.cli.main import main

PAGE = (Path(__file__).resolve().parents[2] / "docs/code.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
NET = "import torch\n\ndef Net():\n    return torch.nn.Linear(2, 1)\n"


def job(epochs: int = 1) -> Job:
    """One model, as the page's program loads it."""
    made = Job("page", blobs={"model": torch.nn.Linear(2, 1)})
    made.epoch(lambda ctx: ctx.log("val/acc", ctx.epoch))
    made.stop_when(max_epochs(epochs))
    return made


def test_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each way to name the source is taken; each command says something; the program loads archived code."""
    for name in ("lib", "app"):
        fill(tmp_path / name, {"model.py": NET, "more.py": "x = 1\n"})
    monkeypatch.chdir(tmp_path / "app")
    monkeypatch.delenv("TORCHRELAY_RUNS", raising=False)
    ways, program = BLOCKS
    names: dict[str, Any] = {"job": job(), "JobRunner": JobRunner, "torchrelay": torchrelay}
    assert len(ways.splitlines()) == 4
    exec(ways, names)

    with LocalSession() as session:
        for epochs in (1, 2, 3):  # three starts of one run
            fill(tmp_path / "app", {"more.py": f"x = {epochs}\n"})
            JobRunner(job(epochs), "runs/a", code=["."]).train(session)
        JobRunner(job(), "runs/b", code=["."]).train(session)
    capsys.readouterr()
    commands = re.findall(r"^\$ torchrelay (.*)$", PAGE, re.MULTILINE)
    assert len(commands) == 6
    for words in commands:
        assert main(shlex.split(words)) == 0, words
        assert capsys.readouterr().out, words
    assert (tmp_path / "app/past/more.py").read_text() == "x = 3\n"
    exec(program, names)
    assert isinstance(names["model"], torch.nn.Linear)
