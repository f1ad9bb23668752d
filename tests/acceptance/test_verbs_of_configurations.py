"""`torchrelay train` and `test` on a configuration alone: the verbs of programs, without one."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/paddlerec_style"


def told(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """What `torchrelay` says in a folder."""
    command = [sys.executable, "-m", "torchrelay", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)


def test_train_and_test_run_the_profiles_of_their_kind(tmp_path: Path) -> None:
    """`train` runs what trains and nothing else, `test` what infers, over what was trained."""
    folder = tmp_path / "recommending"
    shutil.copytree(EXAMPLE, folder)
    trained = told(folder, "train", "-m", "config.yaml", "-o", "runner.train1.epochs=2")
    assert trained.returncode == 0, trained.stderr
    assert not (folder / "predictions.jsonl").exists()
    tested = told(folder, "test", "-m", "config.yaml")
    assert tested.returncode == 0, tested.stderr
    assert "infer1 epoch 2" in tested.stdout + tested.stderr
    assert (folder / "predictions.jsonl").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train"], "Give a PROGRAM, or a configuration"),
        (["train", "-m", "config.yaml", "--force"], "take no options but -o"),
        (["test", "-m", "config.yaml", "-o", "mode=[train1]"], "no runner of its mode infers"),
    ],
)
def test_what_only_programs_take_is_refused(tmp_path: Path, words: list[str], said: str) -> None:
    """2 and one line; nothing is made."""
    folder = tmp_path / "recommending"
    shutil.copytree(EXAMPLE, folder)
    before = sorted(folder.iterdir())
    found = told(folder, *words)
    assert found.returncode == 2 and said in found.stderr and found.stderr.count("\n") == 1
    assert sorted(folder.iterdir()) == before
