"""docs/guide.md is true: its programs and commands run in their order, as they stand."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from torchrun import clean_environment
from warm import PLACE, server, warmed

import torchrelay.errors

PAGE = (Path(__file__).resolve().parents[2] / "docs/guide.md").read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
LINES = re.findall(r"^\$ (.*)$", PAGE, re.MULTILINE)
COMMANDS = {
    "python": warmed([]),
    "torchrun": warmed(["-m", "torch.distributed.run"]),
    "torchrelay": warmed(["-m", "torchrelay"]),
}


def run(folder: Path, line: str, code: int = 0) -> str:
    """Run a command of the page, which ends with `code`; returns what it printed."""
    name, *words = shlex.split(line, comments=True)
    done = subprocess.run(
        [*COMMANDS[name], *words], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=100, check=False, env=clean_environment({PLACE: server()}),
    )  # fmt: skip
    assert done.returncode == code, f"{line}\n{done.stdout}"
    return done.stdout


@pytest.mark.ranks
def test_the_page_runs(tmp_path: Path) -> None:
    """The job trains on two ranks, is finished, rewinds; its best epoch is used elsewhere and verified."""
    programs, lines = PROGRAMS[:2], LINES[:5]
    assert len(PROGRAMS) == 3 and len(LINES) == 7
    (tmp_path / "train.py").write_text(programs[0])
    assert "epoch 4" in run(tmp_path, lines[0])
    assert "nothing to do" in run(tmp_path, lines[1])
    assert "rewinding to epoch 2" in (said := run(tmp_path, lines[2])) and "accuracy" in said
    (tmp_path / "elsewhere.py").write_text(programs[1])
    assert "'loader', 'model', 'optimizer', 'rng', 'scheduler']" in run(tmp_path, "python elsewhere.py")
    assert "abandoned" in run(tmp_path, lines[3])
    run(tmp_path, lines[4])


def test_a_program_of_the_page_leaves_and_goes_on(tmp_path: Path) -> None:
    """Within its time limit it leaves with 75; the same command goes on inside of the epoch and ends it."""
    (tmp_path / "long.py").write_text(PROGRAMS[2])
    left = run(tmp_path, LINES[5], 75)
    assert "continues after step 0" in left and "preempted (the time limit of 4 s)" in left
    step = re.search(r"from epoch 0\+(\d+)", left)
    assert step is not None
    assert (
        f"continues after step {step[1]}\n" in (said := run(tmp_path, LINES[6]))
        and "epoch 1 step 200/200 done" in said
    )


def test_the_exit_codes_are_those_of_the_errors() -> None:
    """Every code that the page explains is one that an error has, or success, or an interrupt."""
    explained = {
        int(code)
        for code in re.findall(r"^- (\d{1,3}): ", PAGE.split("## How a program ends")[1], re.MULTILINE)
    }
    family = {
        error.exit_code for error in vars(torchrelay.errors).values() if isinstance(error, type)
    }  # fmt: skip
    assert explained == family | {0, 130}
