"""examples/pipeline: three stages on 2 ranks, each killed once; then the last one is all there is."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torchrun import REPOSITORY, clean_environment, torchrun

from torchrelay import open_checkpoint
from torchrelay.runners.commands.command_line import main

PROGRAMS = REPOSITORY / "examples/pipeline"
pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(300)]


def test_alf_1_and_2_the_last_stage_of_a_pipeline_is_self_contained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With all upstream directories deleted a fresh process has the numbers of training, and the lineage."""
    runs = tmp_path / "runs"
    for stage in ("encoder", "expert", "agent"):
        done = torchrun(
            PROGRAMS / f"{stage}.py", str(runs), "--kill-in-epoch", "2", ranks=2, cwd=tmp_path, max_restarts=1
        )
        assert done.rc == 0, str(done)
        assert "resuming from epoch 1" in done.err + done.out
        assert ("init_from is not applied" in done.err + done.out) == (stage != "encoder")
    names = ("agent", "expert", "encoder")
    ids = [json.loads((runs / name / "run.json").read_text())["uuid"] for name in names]
    numbers = {
        name: open_checkpoint(runs / name, epoch=epoch).metrics["test/acc"]
        for name, epoch in (("agent", "last"), ("expert", "best"))
    }
    encoder = open_checkpoint(runs / "encoder", epoch="best").load_tensors("autoencoder.encoder")
    begun, ended = (
        open_checkpoint(runs / "expert", epoch=one).load_tensors("expert.encoder") for one in (0, "last")
    )
    for old, first, last in zip(encoder.values(), begun.values(), ended.values(), strict=True):
        assert torch.equal(old, first)  # taken once, and trained on
        assert not torch.equal(old, last)
    for name in ("encoder", "expert"):
        shutil.rmtree(runs / name)
    done = subprocess.run(
        [sys.executable, PROGRAMS / "evaluate.py", runs / "agent"],
        capture_output=True,
        text=True,
        timeout=100,
        env=clean_environment(),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"epoch 3: agent {numbers['agent']:.6f}, expert {numbers['expert']:.6f}\n")
    assert "decoded by the first stage: " in done.stdout
    assert main(["lineage", str(runs / "agent"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [told["run"]["uuid"], *(stage["run_id"] for stage in told["stages"])] == ids
