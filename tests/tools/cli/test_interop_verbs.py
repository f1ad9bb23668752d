"""`torchrelay export` and `import` as commands: their help, and mistakes of their users."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from epochs import Writing, buffer, parameter
from safetensors.torch import load_file
from torchrun import clean_environment
from warm import PLACE, server, warmed

from torchrelay.errors import UsageError
from torchrelay.tools.cli.main import main


def test_help_needs_no_torch() -> None:
    """The verbs' help is printed without importing torch."""
    for verb in ("export", "import"):
        code = (
            "import sys; from torchrelay.tools.cli.main import main\n"
            f"try: main(['ckpt', {verb!r}, '--help'])\n"
            "except SystemExit: print('torch' in sys.modules)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True
        )
        assert done.stdout.splitlines()[-1] == "False"


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    """An unknown type, a source that is not there, DCP without trust: exit code 2, no traceback."""
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp/.metadata").write_bytes(b"x")
    for words in (
        ["ckpt", "export", ".", "--to", "hf", "-o", "x", "--dtype", "nonsense"],
        ["ckpt", "import", "absent", "--from", "torch", "-o", "x"],
        ["ckpt", "import", "dcp", "--from", "dcp", "-o", "x"],
    ):
        done = subprocess.run(
            warmed(["-m", "torchrelay", *words]), cwd=tmp_path, capture_output=True, text=True, timeout=100,
            check=False, env=clean_environment({PLACE: server()}),
        )  # fmt: skip
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1


def test_a_node_is_named_where_tensors_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--nodes` takes one node's value and the line says of what; without it the export is refused."""
    nodes = [[parameter("ema.w", torch.ones(3)), buffer("ema.mean", torch.ones(3) * rank)] for rank in (0, 1)]
    with Writing(tmp_path / "run/checkpoints") as writing:
        writing.save(1, nodes, 2, scopes={"ema.mean": "rank"})
    words = ["ckpt", "export", f"{tmp_path}/run@1", "--to", "safetensors", "--blobs", "ema", "-o"]
    assert main([*words, f"{tmp_path}/a"]) == UsageError.exit_code
    assert "nodes='trainer_0'" in capsys.readouterr().err
    assert main([*words, f"{tmp_path}/b", "--nodes", "trainer_1"]) == 0
    shown = capsys.readouterr()
    assert "2 tensors" in shown.out and "of trainer_1: ema.mean (1 in all)" in shown.err
    assert load_file(tmp_path / "b")["ema.mean"].tolist() == [1.0, 1.0, 1.0]
    assert main([*words, f"{tmp_path}/c", "--node", "trainer_0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["nodes"] == {"ema.mean": "trainer_0"}
