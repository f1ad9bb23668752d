"""Windows of accumulated gradients: a run that was cut inside of one ends in the bits of one that was not."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from samples import sample
from torchrun import REPOSITORY, clean_environment, torchrun

from torchrelay import LocalSession

PROGRAM = REPOSITORY / "tests/programs/windows.py"
KINDS = ("ddp", "ddp-quiet", "views", "views-quiet", "fsdp", "fsdp-quiet", "fsdp-mixed-quiet")
pytestmark = [pytest.mark.slow, pytest.mark.ranks, pytest.mark.timeout(300)]


def test_runs_that_are_cut_anywhere_end_in_the_same_bits() -> None:
    """A few cuts of the window hunt: SIGTERM, SIGUSR2 and SIGKILL at any step, on 1 and 2 ranks."""
    hunt, count = REPOSITORY / "scripts/trials/window_hunt.py", sample(4, 8)
    done = subprocess.run(
        [sys.executable, hunt, "--count", str(count), "--seed", "195"],
        env=clean_environment(), capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{count} cuts in" in done.stdout and "0 ended wrong" in done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of every kind on 2 ranks."""
    folder = tmp_path_factory.mktemp("windows")
    done = torchrun(PROGRAM, str(folder), warm=True, ranks=2, cwd=folder, timeout_secs=200)
    assert done.rc == 0, str(done)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_wrapped_modules_come_back(folder: Path, kind: str) -> None:
    """DDP with and without `no_sync`, with buckets as views; FSDP2 that reduces always, or at ends alone."""
    for rank in (0, 1):
        whole, cut, resumed = json.loads((folder / f"rank{rank}.json").read_text())[kind]
        assert [whole[0], cut[0], resumed[0]] == ["FINISHED", "PREEMPTED", "FINISHED"]
        assert cut[1] != whole[1] and resumed[1] == whole[1]


@pytest.mark.parametrize(("kind", "lost"), [("ddp", False), ("ddp-quiet", True)])
def test_an_open_window_on_another_number_of_ranks(folder: Path, kind: str, lost: bool) -> None:
    """Gradients that all ranks have alike are for any number of them; others are left out, in one line."""
    with warnings.catch_warnings(record=True) as met:
        warnings.simplefilter("always")
        status, _ = program().train(folder / kind / "left", kind, LocalSession())
    said = [str(one.message) for one in met if "gradients differ" in str(one.message)]
    assert status == "FINISHED"
    assert len(said) == int(lost) and all("accumulate=n" in one for one in said)


def program() -> Any:
    spec = importlib.util.spec_from_file_location("windows_program", PROGRAM)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
