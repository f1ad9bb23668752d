"""SNG-15: trained on several ranks, exported, and answered where neither torch nor the script is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torchrun import REPOSITORY, Job, clean_environment

from torchrelay import open_checkpoint

pytest.importorskip("onnxruntime", reason="needs onnxruntime: pip install -e '.[onnx]'")

ELSEWHERE = """
import json, sys
sys.modules["torch"] = sys.modules["torchrelay"] = None     # importing them fails
import numpy, onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1])
x = numpy.linspace(-1, 1, 20, dtype=numpy.float32).reshape(4, 5)
print(json.dumps(session.run(["output"], {"x": x})[0].tolist()))
"""


@pytest.mark.ranks
def test_sng_15_sharded_over_two_ranks_and_answered_without_torch(tmp_path: Path) -> None:
    """The file that two ranks made while they trained gives what the saved weights give here."""
    program = REPOSITORY / "tests/programs/exported.py"
    with Job(program, str(tmp_path / "run"), warm=True, ranks=2, cwd=tmp_path) as job:
        ended = job.wait(timeout_secs=240)
    assert ended.rc == 0, str(ended)
    file = tmp_path / "run/exports/model-epoch-2.onnx"
    command = [sys.executable, "-I", "-c", ELSEWHERE, str(file)]
    told = subprocess.run(
        command,
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    model = nn.ModuleDict({"up": nn.Linear(5, 7), "norm": nn.LayerNorm(7), "down": nn.Linear(7, 3)})
    open_checkpoint(tmp_path / "run", 2).load({"model": model})
    x = torch.linspace(-1, 1, 20).reshape(4, 5)
    wanted = model["down"](torch.relu(model["norm"](model["up"](x)))).detach()
    torch.testing.assert_close(torch.tensor(json.loads(told.stdout)), wanted, rtol=1e-4, atol=1e-5)
