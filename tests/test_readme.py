"""The README is true: its programs run as they stand, and do what their comments say."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from torchrun import clean_environment
from warm import PLACE, server, warmed

from torchrelay.tools.cli.main import main

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def program(number: int) -> str:
    """One of the python programs of the page, verbatim."""
    return re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)[number]


def run(folder: Path, code: str, *arguments: str) -> str:
    """Run a program in a folder as a user would; everything it prints."""
    script = folder / "program.py"
    script.write_text(code)
    done = subprocess.run(
        warmed([str(script), *arguments]),
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=100, check=False,
        env=clean_environment({PLACE: server(), "TORCHRELAY_LOG_EVERY_N_SECS": "0"}),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def cli(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        warmed(["-m", "torchrelay", *arguments]), cwd=folder, capture_output=True, text=True,
        timeout=100, check=True, env=clean_environment({PLACE: server()}),
    )  # fmt: skip
    return done.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder in which the README's job has run once, and what it printed."""
    folder = tmp_path_factory.mktemp("readme")
    return folder, run(folder, program(0))


def test_the_job_is_fifteen_lines() -> None:
    """The job of the README has at most fifteen lines of code."""
    lines = [line for line in program(0).splitlines() if line.strip()]
    assert len(lines) <= 16, "torch's own import is not counted"


def test_the_own_loop_trains_then_is_finished(tmp_path: Path) -> None:
    """The loop of the README is saved epoch by epoch, and started again it has nothing to do."""
    for _ in range(2):
        assert run(tmp_path, program(1)).rstrip().endswith("FINISHED 5")
    assert cli(tmp_path, "ls", "runs/mine").count("ok") == 6


def test_the_job_trains_then_is_finished_then_rewinds(trained: tuple[Path, str]) -> None:
    """The job runs five epochs; again it says that it is finished; told to, it rewinds to epoch 2."""
    folder, first = trained
    assert [f"epoch {epoch}/5 done" in first for epoch in range(1, 7)] == [True] * 5 + [False]
    again = run(folder, program(0))
    assert "finished" in again
    assert "epoch 1/5" not in again
    rewound = run(folder, program(0).replace(".train()", ".train(resume_from_epoch=2)"))
    assert "rewinding to epoch 2" in rewound
    assert [f"epoch {epoch}/5 done" in rewound for epoch in range(1, 6)] == [False, False, True, True, True]
    listed = cli(folder, "ls", "runs/hello")
    assert listed.count("abandoned") == 3
    assert "9 of 9 epochs verified" in cli(folder, "verify", "runs/hello")
    assert "FINISHED" in cli(folder, "show", "runs/hello")
    assert "epoch 5" in cli(folder, "ckpt", "show", "runs/hello@best"), "the page names @best"


def test_the_rewound_run_ends_in_the_same_weights(trained: tuple[Path, str]) -> None:
    """After the rewind the last epoch of the new branch equals that of the abandoned one, bit for bit."""
    folder, _ = trained
    if "abandoned" not in cli(folder, "ls", "runs/hello"):
        run(folder, program(0).replace(".train()", ".train(resume_from_epoch=2)"))
    code = (
        "import torch, torchrelay\n"
        "old, new = (torchrelay.open_checkpoint('runs/hello', epoch=e).load_tensors('model.*')"
        " for e in ('5,branch=0', 5))\n"
        "assert old.keys() == new.keys() and len(old) == 2\n"
        "assert all(torch.equal(old[name], new[name]) for name in old)"
    )
    run(folder, code)


def test_blobs_are_loaded_elsewhere(trained: tuple[Path, str]) -> None:
    """The second program loads the model without the job, from another process."""
    folder, _ = trained
    check = "\nassert set(weights) == {'model.weight', 'model.bias'}\n"
    check += "assert torch.equal(weights['model.weight'], model.weight)\n"
    run(folder, program(2) + check)


def test_any_safetensors_reader_opens_a_shard(trained: tuple[Path, str]) -> None:
    """The weights of the newest epoch can be read with safetensors alone."""
    folder, _ = trained
    code = (
        "import glob; from safetensors import safe_open\n"
        "shard = sorted(glob.glob('runs/hello/checkpoints/data/e00000005-*/*.main.safetensors'))[0]\n"
        "assert tuple(safe_open(shard, 'pt').get_tensor('model.weight').shape) == (1, 10)"
    )
    run(folder, code)


def test_the_commands_do_something(
    trained: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each command that the page shows says something about the run; scripts can be executed."""
    for script in re.findall(r"^\$ (scripts/\w+)", README, re.MULTILINE):
        assert os.access(ROOT / script, os.X_OK), script
    monkeypatch.chdir(trained[0])
    lines = re.findall(r"^\$ torchrelay ([^#\n]*)", README, re.MULTILINE)
    assert len(lines) == 6
    for line in lines:
        assert main(shlex.split(line)) == 0, line
        assert capsys.readouterr().out, line


def test_the_named_versions_are_the_tested_ones() -> None:
    """The page says the torch version that the tests are pinned to."""
    pinned = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned
    assert f"torch {pinned[1]} on CPU" in README
