"""docs/onnx.md is true: its programs run, and so does its command, in that order."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from torchrelay.tools.cli.main import main

PAGE = (Path(__file__).resolve().parents[2] / "docs/onnx.md").read_text()
pytest.importorskip("onnxruntime", reason="needs onnxruntime: pip install -e '.[onnx]'")


def test_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first two blocks are programs, the third is the module that the command names."""
    import runpy

    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "net.py").write_text(blocks.pop())
    assert len(blocks) == 2
    for number, block in enumerate(blocks):
        (tmp_path / f"page{number}.py").write_text(block)
        runpy.run_path(str(tmp_path / f"page{number}.py"))
    assert "TensorSpec(name='input', shape=('batch', 4), dtype='float32')" in capsys.readouterr().out
    made = {one.name for one in (tmp_path / "runs/hello/exports").iterdir()}
    assert made == {"model-epoch-2.onnx", "model-best.onnx", "model.json"}
    (line,) = re.findall(r"^\$ torchrelay (.*)$", PAGE, re.MULTILINE)
    assert main(shlex.split(line)) == 0
    sys.modules.pop("net", None)
    assert "input float32[batch, 4] -> output float32[batch, 2]" in capsys.readouterr().out
    assert (tmp_path / "best.onnx").exists()
