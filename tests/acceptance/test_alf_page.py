"""Statements of docs/guides/migrate-alf.md that no other test runs, row by row."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lifecycle_cases import CONFIG, run, written
from stages import Net, filled, run_stage, values

import torchrelay
from torchrelay import Job, JobRunner, LocalSession, max_epochs, open_checkpoint
from torchrelay.__main__ import main

STILL = "hyper_parameters.optimizer.learning_rate=1e-30"


def trained_with(where: Path, width: int, **options: object) -> None:
    """A run whose archived source says a width."""
    source = where.with_name(f"source_{where.name}")
    source.mkdir(exist_ok=True)
    (source / "conf.py").write_text(f"WIDTH = {width}\n")
    run_stage(where, {"model": Net()}, epochs=1, code=source, **options)  # type: ignore[arg-type]


def test_what_lies_in_the_run_comes_before_the_directory_that_is_named(tmp_path: Path) -> None:
    """`load_upstream` reads `lineage/<alias>/` where that is there, else the directory of `upstream`."""
    trained_with(tmp_path / "low", 8)
    named = {"low": tmp_path / "low"}

    def width() -> int:
        loaded = torchrelay.load_upstream("low", tmp_path / "high", named)
        return int(loaded.code.import_module("conf").WIDTH)

    assert width() == 8 and torchrelay.load_upstream("low", tmp_path / "high", named).path == tmp_path / "low"
    trained_with(tmp_path / "high", 1, upstream=named)
    (tmp_path / "low").rename(tmp_path / "was")
    trained_with(tmp_path / "low", 5)
    assert width() == 8
    assert torchrelay.load_upstream("low", tmp_path / "high", named).path == tmp_path / "high/lineage/low"


@pytest.mark.parametrize("prefix", ["a.model.line", "a.model"])
def test_a_part_is_taken_by_two_words_of_a_configuration(tmp_path: Path, prefix: str) -> None:
    """`into:` names a part here and `prefix:` that of the upstream, with the same shape."""
    (tmp_path / "low").mkdir()
    written(tmp_path / "low")
    run(tmp_path / "low", "hyper_parameters.optimizer.learning_rate=0.05")
    upstream = f"{{low: {{run: ../low/run@last, into: {prefix}, prefix: {prefix}}}}}"
    (tmp_path / "high").mkdir()
    written(tmp_path / "high", CONFIG.replace("seed: 3", f"seed: 4\nupstream: {upstream}"))
    run(tmp_path / "high", STILL)
    low, high = (open_checkpoint(tmp_path / one / "run").load_tensors("a.model") for one in ("low", "high"))
    assert low and all(torch.equal(one, high[name]) for name, one in low.items())


def test_another_part_of_the_upstream_is_taken_by_its_prefix(tmp_path: Path) -> None:
    """`InitFrom("low", into=, prefix=)` takes one part into another; the rest stays what it was."""
    run_stage(tmp_path / "low", {"model": filled(Net(), 0)}, epochs=1)
    taken = torchrelay.InitFrom("low", into="model.encoder", prefix="model.encoder")
    options = {"upstream": {"low": tmp_path / "low"}, "init_from": [taken]}
    run_stage(tmp_path / "high", {"model": filled(Net(), 7)}, epochs=1, **options)  # type: ignore[arg-type]
    begun = values(tmp_path / "high", "model.*", 0)
    parts = {"encoder": 1.0, "head": 7.0}
    assert begun == {
        f"model.{part}.{name}": one for part, one in parts.items() for name in ("weight", "bias")
    }


def test_a_part_is_left_out_by_a_pattern(tmp_path: Path) -> None:
    """`exclude=["model.head.*"]` leaves these names out of every epoch, and a resume keeps the program's."""
    run_stage(tmp_path / "run", {"model": filled(Net(), 0)}, epochs=1, exclude=["model.head.*"])
    names = {leaf.name for leaf in open_checkpoint(tmp_path / "run").leaves if leaf.name.startswith("model")}
    assert names == {"model.encoder.weight", "model.encoder.bias"}
    model = filled(Net(), 7)
    run_stage(tmp_path / "run", {"model": model}, epochs=2, exclude=["model.head.*"])
    assert [one.flatten()[0].item() for one in model.parameters()] == [2, 2, 8, 8]


def test_an_epoch_is_one_line_with_all_that_belongs_to_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`torchrelay ckpt ls RUN` has a line per epoch; model, optimizer and buffer are in each."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    job = Job("all", blobs={"model": model, "optimizer": optimizer, "replay_buffer": torch.zeros(8)})

    @job.epoch
    def step() -> None:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    job.stop_when(max_epochs(2))
    JobRunner(job, tmp_path / "run", code=False).train(LocalSession())
    capsys.readouterr()
    assert main(["ckpt", "ls", str(tmp_path / "run")]) == 0
    lines = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert [one for one in lines if one.isdigit()] == ["0", "1", "2"]
    for epoch in range(3):
        assert {"model", "optimizer", "replay_buffer"} <= set(open_checkpoint(tmp_path / "run", epoch).blobs)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"keep_last": 2}, [4, 5]),
        ({"keep_last": 1, "keep_every": 3}, [0, 3, 5]),
        ({"keep_last": 1, "keep_best": ("val/acc", "min")}, [1, 5]),
    ],
)
def test_checkpoints_are_kept_by_number_interval_or_metric(
    tmp_path: Path, options: dict[str, object], kept: list[int]
) -> None:
    """`keep_last`, `keep_every` and `keep_best` say which epochs stay."""
    run_stage(tmp_path / "run", {"model": Net()}, epochs=5, **options)  # type: ignore[arg-type]
    manager = torchrelay.MultiNodeCheckpointManager(tmp_path / "run/checkpoints")
    assert [epoch for epoch in range(6) if manager.check_db_exists(epoch)] == kept
