"""The README is true: its programs run as they stand, and do what their comments say."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import first_run
import pytest
from torchrun import clean_environment
from warm import PLACE, server, warmed

from torchrelay.tools.cli.main import main

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


LOOP, JOB, ELSEWHERE = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
"""The programs of the page, verbatim."""
QUICK_LOOP = LOOP.replace("time.sleep(0.5)", "time.sleep(0.05)")


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
    return folder, run(folder, JOB)


@pytest.fixture(scope="module")
def looped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the README's own loop has run once."""
    folder = tmp_path_factory.mktemp("looped")
    assert "\nFINISHED 20\n" in f"\n{run(folder, QUICK_LOOP)}"
    return folder


def test_the_first_sixty_lines_have_what_a_stranger_needs() -> None:
    """They say how to install, how to begin, and what it costs; the page is short."""
    lines = README.splitlines()
    first = "\n".join(lines[:60])
    for wanted in ("pip install", "torchrelay.Run(", "resuming from epoch", "## What it costs", "**Disk**"):
        assert wanted in first, wanted
    assert len(lines) <= 180
    assert len(README.split()) <= 1250


def test_links_and_paths_exist() -> None:
    """Files, pictures, headings and scripts that the page names are there."""
    for target in re.findall(r"\]\(([^)]+)\)", README):
        path, _, anchor = target.partition("#")
        assert not path or (ROOT / path).exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", (ROOT / (path or "README.md")).read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", one).lower().replace(" ", "-") for one in headings}, (
                target
            )
    for script in re.findall(r"`(scripts/[\w-]+)", README):
        assert os.access(ROOT / script, os.X_OK), script


def test_the_job_is_fifteen_lines() -> None:
    """The job of the README has at most fifteen lines of code."""
    lines = [line for line in JOB.splitlines() if line.strip()]
    assert len(lines) <= 16, "torch's own import is not counted"


def test_six_lines_of_the_own_loop_belong_to_torchrelay() -> None:
    """As the page says."""
    assert "Six lines belong to torchrelay" in README
    ours = [line for line in LOOP.splitlines() if re.search(r"\b(torchrelay|run)\.|import torchrelay", line)]
    assert len(ours) == 6


def test_the_own_loop_trains_then_is_finished(looped: Path) -> None:
    """The loop of the README is saved epoch by epoch, and started again it has nothing to do."""
    again = run(looped, QUICK_LOOP)
    assert "FINISHED 20\n" in again and "done" not in again
    assert cli(looped, "ls", "runs/mine").count("ok") == 21


def test_the_own_loop_is_killed_and_resumes(tmp_path: Path) -> None:
    """After SIGKILL the same command prints what the page shows: from which epoch it resumes, and its end."""
    program, shown = first_run.own_loop()
    assert program == LOOP
    environment = clean_environment({"TORCHRELAY_LOG_EVERY_N_SECS": "0"})
    assert first_run.killed(sys.executable, tmp_path, QUICK_LOOP, environment) == first_run.KILLED_AFTER
    assert 8 <= first_run.resumed(sys.executable, tmp_path, shown, environment) < 20


def test_the_lines_that_install_take_the_address_of_a_clone() -> None:
    """scripts/release-check runs these lines; only the address is another."""
    lines = first_run.install_lines("file://localhost/a/clone").splitlines()
    assert lines[0].startswith("URL=file://localhost/a/clone ")
    assert lines[1].startswith('pip install "torchrelay[inspect] @ git+$URL"')


def test_the_job_trains_then_is_finished_then_rewinds(trained: tuple[Path, str]) -> None:
    """The job runs five epochs; again it says that it is finished; told to, it rewinds to epoch 2."""
    folder, first = trained
    assert [f"epoch {epoch}/5 done" in first for epoch in range(1, 7)] == [True] * 5 + [False]
    again = run(folder, JOB)
    assert "finished" in again
    assert "epoch 1/5" not in again
    rewound = run(folder, JOB.replace(".train()", ".train(resume_from_epoch=2)"))
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
        run(folder, JOB.replace(".train()", ".train(resume_from_epoch=2)"))
    code = (
        "import torch, torchrelay\n"
        "old, new = (torchrelay.open_checkpoint('runs/hello', epoch=e).load_tensors('model.*')"
        " for e in ('5,branch=0', 5))\n"
        "assert old.keys() == new.keys() and len(old) == 2\n"
        "assert all(torch.equal(old[name], new[name]) for name in old)"
    )
    run(folder, code)


def test_blobs_are_loaded_elsewhere(looped: Path) -> None:
    """The last program loads the model without the training program, from another process."""
    check = "\nassert set(weights) == {'model.weight', 'model.bias'}\n"
    check += "assert torch.equal(weights['model.weight'], model.weight)\n"
    run(looped, ELSEWHERE + check)


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
    looped: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each command that the page shows says something about the run; scripts can be executed."""
    for script in re.findall(r"^\$ (scripts/\w+)", README, re.MULTILINE):
        assert os.access(ROOT / script, os.X_OK), script
    monkeypatch.chdir(looped)
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
