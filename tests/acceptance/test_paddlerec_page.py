"""Statements of docs/guides/migrate-paddlerec.md that no other test runs, row by row."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lifecycle_cases import run, written
from torchrun import torchrun

from torchrelay import open_checkpoint, save_blobs
from torchrelay.__main__ import main
from torchrelay.lifecycle import StepFailedError


@pytest.mark.ranks
def test_cluster_train_runs_under_torchrun(tmp_path: Path) -> None:
    """`class: cluster_train` trains on the ranks that a launcher started."""
    written(tmp_path)
    words = ["run", "-m", "config.yaml", "-o", "runner.train1.class=cluster_train"]
    done = torchrun(Path("-m"), "torchrelay", *words, warm=True, ranks=2, cwd=tmp_path)
    assert done.rc == 0, done
    found = open_checkpoint(tmp_path / "run")
    assert (found.epoch, found.nodes) == (2, ("trainer_0", "trainer_1"))


@pytest.mark.parametrize("kind", ["train", "single_train"])
def test_one_process_trains_by_either_word(tmp_path: Path, kind: str) -> None:
    """`class: train` and `single_train` train in the process that reads the file."""
    assert run(tmp_path, f"runner.train1.class={kind}")["train1"] == 2


ASKING = """\
from torchrelay import lifecycle

class Runner(lifecycle.Runner):
    def run(self, context):
        phase = context.phases["a"]
        context["seen"] = (
            context["is_infer"], context["engine"], context["env"]["hyper_parameters"]["width"],
            type(phase.model).__name__, type(phase.optimizer).__name__, len(phase.loader),
            phase.scope is not None,
        )
        print("seen", *context["seen"])
        super().loop(context)
"""


def test_a_step_finds_what_paddlerec_put_into_the_context(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Engine, `is_infer`, `env`, and model, optimizer, loader and scope of a phase are in the context."""
    written(tmp_path)
    (tmp_path / "mine.py").write_text(ASKING)
    keys = [f"runner.{name}.runner_class_path=mine.py" for name in ("train1", "infer1")]
    run(tmp_path, *keys, mode=["train1", "infer1"])
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("seen")]
    assert lines == [
        "seen False single 2 Model SGD 3 True",
        "seen True single 2 Model NoneType 3 True",
    ]


@pytest.mark.parametrize(
    ("name", "older", "ours"),
    [
        ("Instance", "instance", "setup"),
        ("Network", "build_network", "build"),
        ("Startup", "startup", "start"),
        ("Runner", "run", "loop"),
        ("Terminal", "terminal", "finish"),
    ],
)
def test_a_step_is_replaced_by_either_name_of_its_method(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, older: str, ours: str
) -> None:
    """A class of `torchrelay.lifecycle` with PaddleRec's name of a method, or ours, is called once."""
    for method in (older, ours):
        (tmp_path / method).mkdir()
        written(tmp_path / method)
        (tmp_path / method / "mine.py").write_text(
            f"from torchrelay import lifecycle\nclass {name}(lifecycle.{name}):\n"
            f"    def {method}(self, context):\n"
            f"        print('called {method}')\n        super().{ours}(context)\n"
        )
        assert run(tmp_path / method, f"runner.train1.{name.lower()}_class_path=mine.py")["train1"] == 2
        assert capfd.readouterr().out.count(f"called {method}\n") == 1


TASK = """\
from torchrelay import lifecycle

class Runner(lifecycle.Runner):
    def run(self, context):
        @context.job.epoch
        def more(ctx):
            print("task of epoch", ctx.epoch)
        super().loop(context)
"""


def test_a_task_of_the_job_resumes_with_the_loop(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A task that a `Runner` adds runs in the epochs that are trained, and in none again."""
    written(tmp_path)
    (tmp_path / "mine.py").write_text(TASK)
    for epochs, expected in ((2, [1, 2]), (3, [3])):
        run(tmp_path, "runner.train1.runner_class_path=mine.py", f"runner.train1.epochs={epochs}")
        lines = capfd.readouterr().out.splitlines()
        assert [line for line in lines if line.startswith("task")] == [f"task of epoch {n}" for n in expected]


@pytest.mark.parametrize("words", [(), ("runner.train1.init_prefix=theirs",)], ids=("model", "prefix"))
def test_weights_come_from_a_file_of_save_blobs(tmp_path: Path, words: tuple[str, ...]) -> None:
    """`init_model_path` takes a file of `save_blobs`, by the model's name there or by `init_prefix`."""
    written(tmp_path)
    theirs = torch.nn.ModuleDict({"line": torch.nn.Linear(2, 1)})
    save_blobs(tmp_path / "theirs.safetensors", {"theirs" if words else "a.model": theirs})
    run(tmp_path, "runner.train1.init_model_path=theirs.safetensors", *words)
    begun = open_checkpoint(tmp_path / "run", 0).load_tensors("a.model.*")
    assert {name.removeprefix("a.model."): one.tolist() for name, one in begun.items()} == {
        name: one.tolist() for name, one in theirs.state_dict().items()
    }


def test_a_schedule_counts_epochs_where_it_is_told_to(tmp_path: Path) -> None:
    """`lr_scheduler: {class: CosineAnnealingLR, T_max: 4, per: epoch}` is halfway after two epochs."""
    schedule = "{class: CosineAnnealingLR, T_max: 4, per: epoch}"
    run(tmp_path, f"hyper_parameters.optimizer={{class: sgd, learning_rate: 0.1, lr_scheduler: {schedule}}}")
    rate = open_checkpoint(tmp_path / "run").value("a.optimizer.param_groups.0.lr")
    assert float(rate) == pytest.approx(0.05)


STOPPING = """\
from torchrelay import lifecycle

class Runner(lifecycle.Runner):
    def run(self, context):
        @context.job.epoch
        def stop(ctx):
            print("epoch begins", ctx.epoch)
            if ctx.epoch == 4 and not (context.workspace / "go").exists():
                raise OSError("the machine is gone")
        super().loop(context)
"""


def test_an_interval_only_thins_what_stays(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With an interval of 5 the epoch before a crash is there, whole, and the next start goes on from it."""
    written(tmp_path)
    (tmp_path / "mine.py").write_text(STOPPING)
    words = [
        "runner.train1.runner_class_path=mine.py",
        "runner.train1.epochs=6",
        "runner.train1.save_checkpoint_interval=5",
    ]
    with pytest.raises(StepFailedError, match="the machine is gone"):
        run(tmp_path, *words)
    assert open_checkpoint(tmp_path / "run").epoch == 3
    assert main(["verify", str(tmp_path / "run"), "--epoch", "3"]) == 0
    (tmp_path / "go").touch()
    capfd.readouterr()
    run(tmp_path, *words)
    begun = [line for line in capfd.readouterr().out.splitlines() if line.startswith("epoch begins")]
    assert begun == ["epoch begins 4", "epoch begins 5", "epoch begins 6"]
    rows = run(tmp_path, mode=["infer1"])["infer1"]
    assert [row["epoch"] for row in rows] == [0, 5, 6]


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("  save_checkpoint_path: run", "  savecheckpoint_path: run", "save_checkpoint_path"),
        ("dataset_name: d}", "dataset_name: dd}", "unknown dataset `dd`"),
        ("  epochs: 2", "  epochs: many", "whole number"),
    ],
)
def test_a_mistake_has_its_file_and_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, told: str
) -> None:
    """An unknown key, a wrong type and an unknown name are told with file, line and what was meant."""
    path = written(tmp_path)
    text = path.read_text().replace(old, new, 1)
    path.write_text(text)
    line = text[: text.index(new)].count("\n") + 1
    assert main(["run", "-m", str(path)]) == 2
    said = capsys.readouterr().err
    assert told in said and f"config.yaml:{line}:" in said and not (tmp_path / "run").exists()
