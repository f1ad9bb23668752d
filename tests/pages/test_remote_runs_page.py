"""docs/remote-runs.md is true: its program and its commands run in their order, on a store in memory."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pytest
from stored_jobs import Hosts, in_memory

from torchrelay.checkpoint.tiering.upload import LONGEST_PAUSE_SECS
from torchrelay.runners.remote_runs import download, local_copies, upload
from torchrelay.runners.training.extras import remote_run
from torchrelay.tools.cli.main import main

PAGE = (Path(__file__).resolve().parents[2] / "docs/remote-runs.md").read_text()


def test_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The program trains at the URL, and each command says something of it."""
    monkeypatch.chdir(tmp_path)
    Hosts(tmp_path / "hosts", monkeypatch).on("one")
    page = PAGE.replace("s3://bucket/", "memory://remote-runs-page/")
    (program,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "train.py").write_text(program)
    runpy.run_path("train.py", run_name="__main__")
    assert capsys.readouterr().out.splitlines()[-1] == "FINISHED memory://remote-runs-page/runs/hello"
    lines = re.findall(r"^\$ torchrelay (.*?)(?: +#.*)?$", page, re.MULTILINE)
    assert len(lines) == 9
    for line in lines:
        assert main(shlex.split(line)) == 0, line
        assert re.search("hello|epoch|save", capsys.readouterr().out), line
    found = in_memory("memory://remote-runs-page/runs/hello")
    assert "status.json" in found
    assert (tmp_path / "page.html").exists()


def test_the_figures_are_those_of_the_code() -> None:
    """Intervals, bounds and the variable's name stand on the page as they are."""
    assert (upload.EVERY_SECS, LONGEST_PAUSE_SECS) == (5.0, 60.0)
    assert (remote_run.END_SECS, remote_run.FAILED_SECS) == (60.0, 8.0)
    assert (download.MOST_BYTES, upload.BYTES_PER_SEC) == (256 << 20, 256 << 10)
    assert local_copies.VARIABLE in PAGE
