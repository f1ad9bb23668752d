"""docs/tracking.md is true: its programs and commands run in their order, as they stand."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from torchrun import clean_environment
from warm import PLACE, server, warmed

from torchrelay.metadata.sinks.trackers import _BUILT_IN, GROUP
from torchrelay.runners.monitoring.text import ProgressState, stamped

PAGE = (Path(__file__).resolve().parents[2] / "docs/tracking.md").read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
LINES = re.findall(r"^\$ (.*)$", PAGE, re.MULTILINE)


def run(folder: Path, line: str) -> str:
    """Run a command of the page; returns what it printed."""
    name, *words = shlex.split(line)
    program = [*(["-m", "torchrelay"] if name == "torchrelay" else []), *words]
    done = subprocess.run(
        warmed(program), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=100,
        check=False, env=clean_environment({PLACE: server()}),
    )  # fmt: skip
    assert done.returncode == 0, f"{line}\n{done.stdout}"
    return done.stdout


def test_the_page_runs(tmp_path: Path) -> None:
    """The job is tracked, a user's own sink is told, points come by step, and top shows the runs."""
    pytest.importorskip("tensorboard", reason="pip install tensorboard")
    assert len(PROGRAMS) == 3 and len(LINES) == 5
    for name, program in zip(("train.py", "steps.py", "own.py"), PROGRAMS, strict=True):
        (tmp_path / name).write_text(program)
    assert "epoch 5/5 done | train/loss" in run(tmp_path, LINES[0])
    assert list((tmp_path / "runs/tracked/trackers/tensorboard").glob("events.*"))
    assert (tmp_path / "runs/tracked/trackers/metrics.csv").read_text().count("\n") == 6
    run(tmp_path, LINES[1])
    points = (tmp_path / "runs/steps/trackers/metrics.steps.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in points] == list(range(25, 301, 25))
    assert "epochs [1, 2, 3] last {'square': 9.0}" in run(tmp_path, LINES[2])
    out = run(tmp_path, LINES[3])
    assert re.search(r"^own +finished +3", out, re.MULTILINE) and re.search(
        r"^tracked +fin", out, re.MULTILINE
    )
    assert json.loads(run(tmp_path, LINES[4]))["runs"][0]["state"] == "FINISHED"


def test_the_lines_of_the_page_are_the_form() -> None:
    """The example line is what is printed; every built-in tracker and the entry point are told."""
    current = ProgressState(3, None, 1200, 3900, 9000, {"train/loss": 0.1234}, 41.0, 753.0, "ckpt e2 ok 4.1s")
    shown = stamped(current.line, level="I", who="r0/16", when=1795212444)
    assert shown in PAGE
    table = PAGE.split("| tracker |")[1].split("\n\n")[0]
    assert all(f"`{name}`" in table for name in _BUILT_IN)
    assert f'entry-points."{GROUP}"' in PAGE
