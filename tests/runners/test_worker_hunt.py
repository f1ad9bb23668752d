"""The hunt with signals for trainings with workers finds nothing in a sample."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from torchrun import REPOSITORY, clean_environment

HUNT = REPOSITORY / "scripts/trials/worker_hunt.py"


@pytest.mark.timeout(400)
def test_a_sample_of_the_hunt(tmp_path: Path) -> None:
    """Each signal to a plain program and its workers: left at a step, saved, and resumed to the same bits."""
    words = [sys.executable, str(HUNT), "--target", "plain", "--seed", "5", "--keep", str(tmp_path)]
    environment = clean_environment({"PYTHONPATH": str(REPOSITORY / "src")})
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
