"""ALF's statements where the stages are configurations: `upstream` in YAML."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from lifecycle_cases import CONFIG, run, written

from torchrelay import open_checkpoint
from torchrelay.lifecycle import StepFailedError
from torchrelay.tools.cli.main import main

STILL = "hyper_parameters.optimizer.learning_rate=1e-30"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """What the newest epoch has of the model."""
    return open_checkpoint(folder / "run").load_tensors("a.model")


def stage(folder: Path, upstream: str) -> Path:
    """A project that is built on the run of another one."""
    folder.mkdir()
    written(folder, CONFIG.replace("seed: 3", f"seed: 4\nupstream: {upstream}"))
    return folder


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """A project, trained."""
    (tmp_path / "first").mkdir()
    written(tmp_path / "first")
    run(tmp_path / "first", "hyper_parameters.optimizer.learning_rate=0.05")
    return tmp_path / "first"


def test_alf_1_3_7_a_configured_stage_takes_weights_once_and_keeps_what_it_is_built_on(
    first: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """ALF-1, 3, 7: weights come when the run begins; with the upstream gone it goes on and tells of it."""
    second = stage(first.parent / "second", "{teacher: {run: ../first/run@last, into: a.model}}")
    known = weights(first)
    run(second, STILL)
    assert all(torch.equal(one, known[name]) for name, one in weights(second).items())
    shutil.rmtree(first)
    run(second, STILL, "runner.train1.epochs=3")
    assert all(torch.equal(one, known[name]) for name, one in weights(second).items())
    capsys.readouterr()
    assert main(["runs", "lineage", str(second / "run"), "--json"]) == 0
    told = capsys.readouterr().out
    assert "teacher" in told and "learning_rate=0.05" in told
    resolved = (second / "run/lineage/teacher/config/resolved.yaml").read_text()
    assert "learning_rate: 0.05" in resolved and json.loads(told)


def test_alf_8_what_does_not_fit_is_refused_by_name(first: Path) -> None:
    """ALF-8: an upstream with other widths ends the start with the leaves that differ; nothing is trained."""
    second = stage(first.parent / "second", "{teacher: {run: ../first/run, into: a.model}}")
    with pytest.raises(StepFailedError, match=r"line\.weight is float32\[1, 3\] here") as refused:
        run(second, "hyper_parameters.width=3")
    assert "teacher" in str(refused.value)
    assert not list((second / "run/checkpoints/data").glob("e*"))
