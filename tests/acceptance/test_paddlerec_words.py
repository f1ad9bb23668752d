"""What users of PaddleRec type: where weights come from, mistakes told before anything trains."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from config_cases import RIGHT, problems, read
from lifecycle_cases import CONFIG, run, written

from torchrelay.checkpoint.reader import open_checkpoint
from torchrelay.errors import UnknownEpochError, UsageError
from torchrelay.jobs.config.reading import load_config

INFER = ("mode=[infer1]", "runner.infer1.metrics_path=null")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two epochs, the better of which is the second one."""
    folder = tmp_path_factory.mktemp("trained")
    run(folder, "+runner.train1.keep_best={metric: loss, mode: min}")
    return folder


def weights(where: Path, epoch: int | str) -> torch.Tensor:
    return open_checkpoint(where, epoch).load_tensors("a.model.line.weight")["a.model.line.weight"]


@pytest.mark.parametrize(
    ("form", "epoch"),
    [("run", 2), ("run@1", 1), ("run@best", 2), ("run@latest", 2), ("run/1", 1), ("run/0", 0)],
)
def test_one_epoch_is_named_behind_its_run(trained: Path, tmp_path: Path, form: str, epoch: int) -> None:
    """`init_model_path` takes RUN@7, RUN@best and RUN/7, to start from and to infer with."""
    run(tmp_path, f"runner.train1.init_model_path={trained}/{form}", "runner.train1.epochs=1")
    assert torch.equal(weights(tmp_path / "run", 0), weights(trained / "run", epoch))
    rows = run(tmp_path, *INFER, f"runner.infer1.init_model_path={trained}/{form}")["infer1"]
    assert [row["epoch"] for row in rows] == ([0, 1, 2] if form == "run" else [epoch])


def test_a_name_that_is_there_is_meant_as_it_is(trained: Path, tmp_path: Path) -> None:
    """A directory whose own name ends with `@1` is a run, and not an epoch of another one."""
    shutil.copytree(trained / "run", tmp_path / "run@1")
    run(tmp_path, f"runner.train1.init_model_path={tmp_path}/run@1", "runner.train1.epochs=1")
    assert torch.equal(weights(tmp_path / "run", 0), weights(trained / "run", 2))


def test_an_empty_path_and_empty_names_of_variables_mean_nothing(tmp_path: Path) -> None:
    """An unchanged file of PaddleRec 1.8.5 runs: empty init path, empty varnames; the id is the same."""
    empty = CONFIG.replace(
        "  phases: [a]\n  save_checkpoint_path: run\n",
        '  phases: [a]\n  save_checkpoint_path: run\n  init_model_path: ""\n'
        "  save_inference_feed_varnames: []\n  save_inference_fetch_varnames: []\n",
    )
    assert empty != CONFIG
    assert run(tmp_path / "with", text=empty)["train1"] == 2
    config = load_config(tmp_path / "with/config.yaml")
    assert config.settings.runner[0].init_model_path is None
    plain = load_config(written(tmp_path / "plain"))
    assert config.id == plain.id and "varnames" not in config.resolved_text()


def test_an_epoch_is_said_once(tmp_path: Path) -> None:
    """`RUN@2` beside `epoch` is told by the check."""
    text = RIGHT.replace('init_model_path: "increment"', 'init_model_path: "increment@2"\n  epoch: 1')
    assert problems(tmp_path, text) == ["16:3: runner.infer1.epoch: `init_model_path` ends with @2: keep one"]


SECOND = """\
- name: train2
  epochs: 1
  save_checkpoint_path: "{workspace}/./increment/"
"""


def test_two_profiles_in_one_path_are_told_before_the_first_trains(tmp_path: Path) -> None:
    """The check names the second one, where the mode has both; alone each is right."""
    text = RIGHT.replace("phase:\n- name", f"{SECOND}phase:\n- name").replace("infer1]", "train2]")
    (told,) = problems(tmp_path, text)
    assert "runner.train2.save_checkpoint_path: the run of runner `train1` lies there" in told
    assert problems(tmp_path, text.replace("[train1, train2]", "[train2]")) == []


def test_epochs_that_nobody_can_find_are_told_before_the_first_trains(tmp_path: Path) -> None:
    """An infer profile without init_model_path needs one profile of the mode that trains."""
    text = RIGHT.replace("phase:\n- name", f"{SECOND}phase:\n- name").replace("./increment/", "other")
    text = text.replace('  init_model_path: "increment"\n', "")
    assert problems(tmp_path, text) == [], "train1 alone is in the mode"
    (told,) = problems(tmp_path, text.replace("[train1, infer1]", "[train1, train2, infer1]"))
    assert "runner.infer1: `init_model_path` missing, and 2 runners train" in told


def test_weights_that_are_nowhere_are_told_before_anything_is_made(tmp_path: Path) -> None:
    """A path that is not there, and that no profile before writes, ends the start with no directory left."""
    for words in (
        ("runner.train1.init_model_path=nowhere@2",),
        ("mode=[train1,infer1]", "runner.infer1.init_model_path=nowhere"),
    ):
        with pytest.raises(
            UsageError, match=r"init_model_path: .*nowhere is not there, and no runner before"
        ):
            run(tmp_path, *words)
    assert not (tmp_path / "run").exists()


def test_an_epoch_that_is_not_there_is_told_before_anything_is_made(trained: Path, tmp_path: Path) -> None:
    """`RUN@9` of a run with two epochs ends the start, names what there is, and leaves no directory."""
    with pytest.raises(UnknownEpochError, match=r"init_model_path: .*no epoch 9 in .*epochs 0 to 2"):
        run(tmp_path, f"runner.train1.init_model_path={trained}/run@9")
    assert not (tmp_path / "run").exists()


def test_keys_used_by_name_count_as_read(tmp_path: Path) -> None:
    """A key that another one uses through `${...}` is not told as never read; its neighbour is."""
    text = RIGHT.replace(
        "tags: [x, y]", 'tags: ["${hyper_parameters.lr}"]\n  size: "${hyper_parameters.own}"'
    )
    text = text.replace("  lr: 0.1\n", "  lr: 0.1\n  own: {a: 1, b: [2]}\n")
    config = read(tmp_path, text)
    assert [one.path for one in config.unused([config.settings.hyper_parameters.extra])] == [
        "hyper_parameters.sparse_feature_number"
    ]
