"""examples/pipeline: three stages from YAML on 2 ranks, each killed once; then the last is all there is."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrun import REPOSITORY, clean_environment, torchrun

from torchrelay import open_checkpoint

PROGRAMS = REPOSITORY / "tests/programs"
STAGES = ("encoder", "expert", "agent")
pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(500)]


def test_alf_1_2_7_12_14_17_a_pipeline_from_yaml_is_self_contained(
    tmp_path: Path, tell: Callable[[str], None]
) -> None:
    """Killed stages go on; the last one has the same numbers, trains on and deploys from its run alone."""
    project = shutil.copytree(REPOSITORY / "examples/pipeline", tmp_path / "project")
    (tmp_path / "marks").mkdir()
    script, marks = PROGRAMS / "pipeline_stages.py", tmp_path / "marks"
    done = torchrun(script, str(marks), warm=True, ranks=2, cwd=project, max_restarts=3, timeout_secs=300)
    assert done.rc == 0, str(done)
    runs = project / "runs"
    check_killed_and_continued(done.out + done.err, [one.name for one in marks.iterdir()], runs)
    check_fine_tuned(runs)
    check_disk(runs / "agent", tell)
    ids = [json.loads((runs / name / "run.json").read_text())["uuid"] for name in STAGES]
    numbers = evaluation(runs)
    alone = tmp_path / "alone"
    alone.mkdir()
    (runs / "agent").rename(alone / "agent")
    shutil.rmtree(project)
    command = [sys.executable, PROGRAMS / "pipeline_alone.py", alone / "agent", alone]
    told = subprocess.run(
        command, capture_output=True, text=True, timeout=150, env=clean_environment(), cwd=tmp_path
    )
    assert told.returncode == 0, told.stderr
    *said, last = told.stdout.splitlines()
    found = json.loads(last)
    evaluated, again = found["evaluated"], found["again"]
    tell(f"the last stage: acc {numbers['acc']:.6f} before, {evaluated['acc']:.6f} without its upstream")
    # Before, 2 ranks summed the halves of a batch; one process sums the whole, in another order.
    close = {name: pytest.approx(numbers[name], rel=1e-6) for name in ("acc", "loss")}
    assert evaluated == numbers | close and len(evaluated["digits"]) == 300
    assert (found["went_on"], again["epoch"]) == (7, 7) and again["loss"] != evaluated["loss"]
    assert found["deployed"] == again["digits"]
    assert "epoch 6  agent.model  same bits" in said
    tree = [line.split(", ") for line in said if ": job train, run " in line]
    assert [row[1].strip() for row in tree] == [f"run {one}" for one in reversed(ids)]
    assert [row[0].split(":")[0] for row in tree] == ["agent", "  expert", "    encoder"]


def evaluation(runs: Path) -> dict[str, Any]:
    """What the 2 ranks said of the last stage: metrics and all that was read."""
    rows = (runs / "agent.predictions.jsonl").read_text().splitlines()
    digits = [json.loads(row)["digit"] for row in rows]
    return {**json.loads((runs / "agent.metrics.jsonl").read_text()), "digits": digits}


def check_killed_and_continued(said: str, killed: list[str], runs: Path) -> None:
    """Each stage lost a rank behind a save that a signal of one rank had asked of both, and went on there."""
    assert sorted(killed) == sorted(STAGES)
    assert said.count("SIGUSR2: saved as 1+") == said.count("resuming from epoch 1+") == len(STAGES)
    assert said.count("init_from is not applied") == 2
    for name in STAGES:
        starts = [json.loads((runs / name / f"captured.{n}.json").read_text()) for n in (0, 1)]
        assert [one["world"]["processes"] for one in starts] == [2, 2]


def check_fine_tuned(runs: Path) -> None:
    """The expert began with the encoder of the first stage and changed it; the agent has the expert's."""
    encoder = open_checkpoint(runs / "encoder", "best").load_tensors("encoder.model.encoder")
    begun, ended = (
        open_checkpoint(runs / "expert", epoch).load_tensors("expert.model.encoder") for epoch in (0, "best")
    )
    for old, first, last in zip(encoder.values(), begun.values(), ended.values(), strict=True):
        assert torch.equal(old, first)
        assert not torch.equal(old, last)
    frozen = open_checkpoint(runs / "agent").load_tensors("agent.model.expert.encoder")
    assert all(map(torch.equal, frozen.values(), ended.values())) and len(frozen) == len(ended)


def check_disk(run: Path, tell: Callable[[str], None]) -> None:
    """7 checkpoints take about one frozen part and 7 small ones."""
    blobs = open_checkpoint(run)
    frozen = sum(
        one.nbytes
        for pattern in ("agent.model.expert", "upstream.expert")
        for one in blobs.load_tensors(pattern).values()
    )
    tries = sorted((run / "checkpoints/data").iterdir())
    sizes = [sum(file.stat().st_size for file in one.iterdir()) for one in tries]
    small = max(sizes[1:])
    total = sum(file.stat().st_size for file in (run / "checkpoints").rglob("*") if file.is_file())
    tell(
        f"ALF-14: {len(tries)} checkpoints take {total / 1e3:.0f} kB: the frozen part has "
        f"{frozen / 1e3:.0f} kB, each small part at most {small / 1e3:.0f} kB; whole ones would take "
        f"{len(tries) * sizes[0] / 1e3:.0f} kB"
    )
    assert len(tries) == 7 and small < frozen / 10
    assert total < 1.1 * frozen + 7 * small + 100_000  # the log, headers
