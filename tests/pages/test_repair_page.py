"""docs/repair.md is true: its commands run in their order, on a run that is damaged on the way."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import torch
from epochs import Writing, parameter
from torchrun import clean_environment
from warm import PLACE, server, warmed

from torchrelay.metadata.run_directory import RunDirectory

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/repair.md").read_text()


def make(folder: Path) -> Path:
    run = RunDirectory(folder / "runs/digits")
    run.create("digits", None, 1)
    run.write_status("FINISHED", epoch=3)
    with Writing(run.checkpoints, "digits") as writing:
        for epoch in range(4):
            writing.save(epoch, [parameter("w", torch.arange(6.0))])
    return run.path


def test_the_commands_run(tmp_path: Path) -> None:
    """Whole at first; damage is explained, quarantined, passed over; what a crash left goes when told."""
    run = make(tmp_path)
    lines = [shlex.split(line) for line in re.findall(r"^\$ (.*)$", PAGE, re.MULTILINE)]
    assert len(lines) == 8 and all(line[0] == "torchrelay" for line in lines)

    def told(number: int, code: int = 0) -> str:
        done = subprocess.run(
            warmed(["-m", *lines[number]]), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, timeout=100, check=False, env=clean_environment({PLACE: server()}),
        )  # fmt: skip
        assert done.returncode == code, done.stdout
        return done.stdout

    assert "4 of 4 epochs verified" in told(0) and "1 of 1 epoch verified" in told(1)
    (shard,) = (run / "checkpoints/data").glob("e00000003-*/*.safetensors")
    data = bytearray(shard.read_bytes())
    data[200] ^= 1
    shard.write_bytes(data)
    assert "resume from epoch 2 of branch 0, after 1 newer" in told(2)
    assert "epoch 3 (branch 0)  damaged: data/" in told(3)
    assert "epoch 3,branch=0 is quarantined" in told(4, 5)
    (run / "checkpoints/log/HINT").unlink()
    (run / "checkpoints/data/e00000009-0bad00").mkdir()
    assert "to repair  hint" in told(5) and "repaired  hint" in told(6)
    assert "deleted  orphan" in told(7) and "nothing to repair" in told(7)


def test_the_words_of_why_are_all_explained() -> None:
    """Every standing that the code can tell has its row, and no row is made up."""
    code = (ROOT / "checkpoint/inspect/anomalies.py").read_text()
    told = set(re.findall(r'return "([a-z ]+)", ', code)) | {"damaged", "unknown"}
    section = PAGE.split("## Why was an epoch not used?")[1].split("\n## ")[0]
    rows = re.findall(r"^- (`.*?`): ", section, re.MULTILINE)
    explained = {word for row in rows for word in re.findall(r"`([^`]+)`", row)}
    assert explained == told - {"gone"}
