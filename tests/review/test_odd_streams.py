"""Streams that are closed, full, or of a small alphabet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchrelay import Job, JobRunner, max_epochs


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a run whose name is not ASCII."""
    job = Job("largo \u2192", blobs={"state": [0]})
    job.epoch(lambda ctx: None)
    job.stop_when(max_epochs(1))
    path = tmp_path_factory.mktemp("runs")
    JobRunner(job, path / "\u00e9t\u00e9").train()
    return path


def shell(line: str, where: Path, **environment: str) -> tuple[int, str]:
    """The exit code of a line of sh, in which $0 is Python, and what it printed."""
    done = subprocess.run(
        ["sh", "-c", line, sys.executable],
        cwd=where, env={**os.environ, **environment}, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_a_closed_stream_is_no_reason_to_fail(runs: Path) -> None:
    """Verbs end with their own exit codes where stdout or stderr was closed before they began."""
    assert shell('"$0" -m torchrelay ls . >&- 2>&-', runs) == (0, "")
    assert shell('"$0" -m torchrelay show nowhere >&- 2>&-', runs) == (2, "")


def test_a_job_trains_with_closed_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon has neither stdout nor stderr, which Python calls None; its job trains all the same."""
    job = Job("closed", blobs={"state": [0]})
    job.epoch(lambda ctx: ctx.log("loss", 1.0))
    job.stop_when(max_epochs(2))
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", None)
        patched.setattr(sys, "stderr", None)
        assert JobRunner(job, tmp_path / "run").train() == 2


def test_a_full_disk_behind_stdout_is_one_line(runs: Path) -> None:
    """What cannot be written is told once, with exit code 5, and without a traceback."""
    code, said = shell('"$0" -m torchrelay ls . > /dev/full', runs)
    assert code == 5 and said.count("\n") == 1 and "No space left" in said


def test_names_beyond_the_alphabet_of_a_stream_are_escaped(runs: Path) -> None:
    """An ASCII pipe gets escapes, and JSON that says the same."""
    code, said = shell('"$0" -m torchrelay ls .', runs, PYTHONIOENCODING="ascii")
    assert code == 0 and "\\xe9t\\xe9" in said
    code, said = shell('"$0" -m torchrelay ls . --json', runs, PYTHONIOENCODING="ascii")
    assert code == 0 and json.loads(said)["runs"][0]["job"] == "largo \u2192"
