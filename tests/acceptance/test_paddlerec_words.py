"""What users of PaddleRec type: words that do what they say, mistakes told before anything trains."""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from config_cases import RIGHT, problems, read
from lifecycle_cases import CONFIG, run, written
from torchrun import torchrun

from torchrelay.__main__ import main
from torchrelay.checkpoint.load.checkpoint import open_checkpoint
from torchrelay.errors import UnknownEpochError, UsageError, exit_code_of
from torchrelay.jobs.config.config import load_config
from torchrelay.jobs.config.tree import ConfigError
from torchrelay.jobs.session import Solo
from torchrelay.lifecycle import ClassLoadError, StepFailedError, run_config
from torchrelay.runners.config_runs.profiles import check_keys
from torchrelay.runners.config_runs.steps import _waiting

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
    assert problems(tmp_path, text) == [
        "16:3: runner.infer1.epoch: `init_model_path` ends with @2: remove one"
    ]


SECOND = """\
- name: train2
  epochs: 1
  save_checkpoint_path: "{workspace}/./increment/"
"""


def test_two_profiles_in_one_path_are_told_before_the_first_trains(tmp_path: Path) -> None:
    """The check names the second one, where the mode has both; alone each is right."""
    text = RIGHT.replace("phase:\n- name", f"{SECOND}phase:\n- name").replace("infer1]", "train2]")
    (told,) = problems(tmp_path, text)
    assert "runner.train2.save_checkpoint_path: runner `train1` already uses this path" in told
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
            UsageError, match=r"init_model_path: .*nowhere does not exist, and no earlier runner"
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


EXTRA = """\
runner:
- name: train1
  device: cpu
  epochs: 1
  phases: [a]
  save_checkpoint_path: run
- {name: infer1, class: infer, device: cpu, phases: [c], init_model_path: run}
phase:
- {name: a, model: model.py, dataset_name: d}
- {name: c, model: model.py, dataset_name: f}
dataset:
- {name: d, batch_size: 4, data_path: data, data_converter: reader.py}
- {name: f, batch_size: 4, data_path: data, data_converter: reader.py, wdith: 3}
hyper_parameters: {width: 2}
"""


def test_two_profiles_do_not_train_in_one_given_directory(tmp_path: Path) -> None:
    """`--run-dir` with two profiles that train is refused before the first one does."""
    path = written(tmp_path, EXTRA.replace("phase:\n", "- {name: b1, epochs: 1}\nphase:\n", 1))
    with pytest.raises(UsageError, match=r"--run-dir is one directory, but train1 and b1 train"):
        run_config(load_config(path), ["train1", "b1"], run_dir=str(tmp_path / "x"))
    assert not (tmp_path / "x").exists()


def test_dead_keys_of_a_later_profile_are_told_before_the_first_trains(tmp_path: Path) -> None:
    """With `strict` no profile trains where the reader of a later one leaves a key unread."""
    with pytest.raises(ConfigError, match=r"dataset\.f\.wdith: was never read"):
        run_config(load_config(written(tmp_path, EXTRA)), strict=True)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match=r"dataset\.f\.wdith: was never read"):
        check_keys(load_config(tmp_path / "config.yaml"))
    (tmp_path / "config.yaml").write_text(EXTRA.replace(", wdith: 3", ""))
    assert run_config(load_config(tmp_path / "config.yaml"), strict=True)["train1"] == 1


def test_keys_that_the_reader_of_a_validation_reads_are_alive(tmp_path: Path) -> None:
    """`strict` makes the readers of validation datasets, too, before it calls a key of theirs dead."""
    (line,) = [line for line in CONFIG.splitlines() if line.startswith("- {name: d, ")]
    text = CONFIG.replace(line, f"{line}\n{line.replace('name: d', 'name: v, scale: 2')}")
    path = written(tmp_path, text.replace("dataset_name: d}", "dataset_name: d, validation: v}"))
    source = (tmp_path / "reader.py").read_text()
    init = "    def __init__(self, dataset):\n        self.scale = dataset.extra.get('scale', 1)\n"
    (tmp_path / "reader.py").write_text(source.replace("class Reader:\n", f"class Reader:\n{init}"))
    check_keys(load_config(path))


ASKING = """\
from torchrelay import lifecycle

class Startup(lifecycle.Startup):
    def start(self, context):
        super().start(context)
        context.barrier()
        print("here", context.rank, context["world_size"], context["engine"])
        print("asked", [context.setting(*one) for one in (
            ("runner.train1.epochs",), ("runner.train1.print_interval", 7), ("hyper_parameters.width",),
            ("hyper_parameters.none", 5), ("hyper_parameters.none",), ("dataset.d.data_path",),
        )])
"""


def test_a_step_knows_its_rank_and_asks_for_any_key(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The context has rank, world size, engine and a barrier, and looks up dotted paths with a default."""
    written(tmp_path)
    (tmp_path / "mine.py").write_text(ASKING)
    run(tmp_path, "runner.train1.startup_class_path=mine.py", "runner.train1.epochs=1")
    out = capfd.readouterr().out
    assert "here 0 1 single\n" in out
    assert "asked [1, 20, 2, 5, None, 'data']\n" in out


def test_a_word_that_changes_nothing_is_told_with_the_reason(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """`optimizer.strategy: async` is taken and told; `sync`, which is what happens, is not."""
    path = written(tmp_path, CONFIG.replace("learning_rate: 0.1}", "learning_rate: 0.1, strategy: async}"))
    config = load_config(path)
    (told,) = config.without_effect()
    assert str(told).startswith(f"{path}:") and "without parameter servers" in str(told)
    assert run_config(config)["train1"] == 2
    assert str(told) in capfd.readouterr().err
    assert main(["config", "check", str(path)]) == 0
    assert str(told) in capfd.readouterr().out
    synchronous = load_config(path, ["hyper_parameters.optimizer.strategy=sync"])
    assert config.id == synchronous.id and synchronous.without_effect() == ()


@pytest.mark.parametrize(
    ("bad", "says"),
    (
        ("0.1 0.2 x", r"data/2\.txt, line 2:\n.*reader\.py.*could not convert string to float: 'x'"),
        ("0.1 0.2", r"data/2\.txt, line 2:\n.*reader\.py"),
    ),
)
def test_a_failing_reader_is_told_with_file_and_line(tmp_path: Path, bad: str, says: str) -> None:
    """The message has the file, the number of the line, and the traceback of the reader."""
    written(tmp_path)
    (tmp_path / "data/2.txt").write_text(f"0.5 0.5 0.5\n{bad}\n0.5 0.5 0.5\n")
    reader = (tmp_path / "reader.py").read_text().replace("*x, y", "x1, x2, y").replace("(x)", "([x1, x2])")
    (tmp_path / "reader.py").write_text(reader)
    with pytest.raises(StepFailedError, match=f"(?s){says}") as caught:
        run(tmp_path)
    assert caught.value.exit_code == 1


SLOTS = """\
runner:
- {name: train1, device: cpu, epochs: 1, save_checkpoint_path: run}
phase:
- {name: a, model: model.py, dataset_name: d}
dataset:
- {name: d, batch_size: 2, data_path: data, padding: 9,
   sparse_slots: "click C1", dense_slots: "wide:2 image:[2,1]"}
"""
SLOT_MODEL = """\
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(2, 1)

    def forward(self, batch):
        print("batch", {name: one.tolist() for name, one in batch.items()}, batch["image"].shape)
        return self.line(batch["wide"]).squeeze(1)

    def loss(self, outputs, batch):
        return (outputs - batch["click"].squeeze(1)).square().mean()
"""


def slots(folder: Path, *lines: str) -> Path:
    path = written(folder, SLOTS)
    (folder / "model.py").write_text(SLOT_MODEL)
    (folder / "data/1.txt").write_text("\n".join(lines))
    (folder / "data/2.txt").unlink()
    return path


LISTED = """\
from pathlib import Path
import torch

class Reader:
    def __init__(self, dataset):
        files = sorted(Path(dataset.data_path[0]).iterdir())
        self.lines = [line for one in files for line in one.read_text().splitlines()]

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, index):
        line = self.lines[index]
        *x, y = map(float, line.split())
        return torch.tensor(x), torch.tensor(y)
"""


def test_a_failing_reader_of_numbered_samples_is_told_with_its_sample_and_line(tmp_path: Path) -> None:
    """A reader with `__getitem__`: the number of the sample, and the file and line that its frames hold."""
    path = written(tmp_path)
    (tmp_path / "reader.py").write_text(LISTED)
    whole = run(tmp_path, "runner.train1.epochs=1")["train1"]
    lines = (tmp_path / "data/2.txt").read_text().splitlines()
    (tmp_path / "data/2.txt").write_text("\n".join([*lines[:2], "1 x 2", *lines[2:]]))
    with pytest.raises(
        StepFailedError, match=rf"at sample 9, in {tmp_path}.data.2\.txt, line 3:(.|\n)*float"
    ) as told:
        run_config(load_config(path, ["runner.train1.save_checkpoint_path=again"]))
    assert int(whole) == 1 and "dataset.d: the reader failed" in str(told.value)


def test_keys_that_nobody_reads_are_told_by_the_check(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """`config check --strict-config` loads the classes and ends with 2; without it nothing is imported."""
    path = written(tmp_path, CONFIG.replace("  width: 2", "  width: 2\n  dead: 1"))
    assert main(["config", "check", str(path)]) == 0
    capfd.readouterr()
    assert main(["config", "check", str(path), "--strict-config"]) == 2
    assert "hyper_parameters.dead" in capfd.readouterr().err and not (tmp_path / "run").exists()


def test_lines_of_slots_need_no_reader(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`slot:value` lines become tensors by slot; missing slots, and shorter ones, are filled with padding."""
    first = "click:1 C1:5 C1:6 wide:0.5 wide:1 image:1 image:2"
    assert run_config(load_config(slots(tmp_path, first, "", "click:0 other:x wide:2 wide:3")))["train1"] == 1
    out = capfd.readouterr().out
    assert "'click': [[1], [0]], 'C1': [[5, 6], [9, 9]], 'wide': [[0.5, 1.0], [2.0, 3.0]]" in out
    assert "'image': [[[1.0], [2.0]], [[9.0], [9.0]]]} torch.Size([2, 2, 1])" in out


@pytest.mark.parametrize(
    ("line", "says"),
    (
        ("click:1 wide:1", "line 2: wide has 1 values, expected 2"),
        ("click:x", "line 2: invalid value of 'click:x': expected a whole number"),
        ("click", "line 2: invalid 'click': expected `slot:value`"),
    ),
)
def test_a_line_of_slots_that_is_wrong_is_told(tmp_path: Path, line: str, says: str) -> None:
    """File and line are in the message, with what is wrong there."""
    path = slots(tmp_path, "click:1", line)
    with pytest.raises(StepFailedError, match=rf"dataset\.d: .*data/1\.txt, {says}"):
        run_config(load_config(path))


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ('dataset.d.data_path="$DATA/train"', "write `${env:DATA}`"),
        ('dataset.d.data_path="{workspce}/data"', "did you mean `{workspace}`"),
        ('phase.a.model="{workspce}/model.py"', "did you mean `{workspace}`"),
        ('runner.train1.save_checkpoint_path="out/$RUN"', "write `${env:RUN}`"),
    ],
)
def test_a_word_that_is_not_replaced_is_told(tmp_path: Path, override: str, says: str) -> None:
    """`$DATA` and a misspelt `{workspace}` are told by the check, with what to write."""
    with pytest.raises(ConfigError) as error:
        load_config(written(tmp_path), [override])
    assert says in str(error.value), error.value


def test_other_braces_and_dollars_of_a_path_stay(tmp_path: Path) -> None:
    """A path may have braces and dollar signs of its own."""
    path = written(tmp_path)
    settings = load_config(path, ['runner.train1.save_checkpoint_path="out/{fold}-a$b"']).settings
    assert settings.runner[0].save_checkpoint_path == str(tmp_path / "out/{fold}-a$b")


LOOP = """\
from torchrelay import lifecycle

class Runner(lifecycle.Runner):
    def run(self, context):
        phase = context.phases["a"]
        for epoch in range(context.setting("runner.train1.epochs")):
            for batch in phase.loader:
                loss = phase.model.loss(phase.trained(batch), batch)
                phase.optimizer.zero_grad()
                loss.backward()
                phase.optimizer.step()
            self.save(epoch + 1, context, True)
        context["status"] = "terminal_pass"
"""


def test_an_own_loop_saves_epochs(tmp_path: Path) -> None:
    """`self.save(epoch, context)` commits epochs of the run, with its optimizer; infer finds them."""
    written(tmp_path)
    (tmp_path / "mine.py").write_text(LOOP)
    words = ("runner.train1.runner_class_path=mine.py",)
    rows = run(tmp_path, *words, mode=["train1", "infer1"])["infer1"]
    assert [row["epoch"] for row in rows] == [1, 2] and rows[1]["loss"] < rows[0]["loss"]
    blobs = open_checkpoint(tmp_path / "run").blobs
    assert {"a.model", "a.optimizer", "a.loader"} <= set(blobs)
    run(tmp_path, "runner.train1.save_checkpoint_path=other")
    assert torch.equal(weights(tmp_path / "run", 2), weights(tmp_path / "other", 2))
    with pytest.raises(StepFailedError, match=r"already has epoch 2, so epoch 1 cannot be saved"):
        run(tmp_path, *words)
    (tmp_path / "mine.py").write_text(LOOP.replace("epoch + 1", "1"))
    with pytest.raises(StepFailedError, match=r"already has epoch 1, so epoch 1 cannot be saved") as again:
        run(tmp_path, *words, "runner.train1.save_checkpoint_path=third")
    assert exit_code_of(again.value) == 2


@pytest.mark.parametrize("verb", ["train", "run"])
def test_an_own_loop_saves_where_nothing_is_committed_yet(tmp_path: Path, verb: str) -> None:
    """`torchrelay train -m` makes the run before; a first save that fails leaves a directory to begin in."""
    path = written(tmp_path)
    (tmp_path / "mine.py").write_text(LOOP)
    words = [verb, "-m", str(path), "-o", "runner.train1.runner_class_path=mine.py", "-o", "mode=[train1]"]
    if verb == "run":
        (tmp_path / "run/checkpoints").mkdir(parents=True)
    with suppress(SystemExit):
        main(words)
    (log,) = tmp_path.rglob("checkpoints/log")
    assert open_checkpoint(log.parent.parent).epochs == (1, 2)


def test_a_rank_that_saves_alone_says_whom_it_waits_for(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the others do not come to `self.save`, a line says so long before the wait is over."""
    monkeypatch.setattr("torchrelay.runners.config_runs.steps._WAIT_SECS", 0.01)
    with _waiting(3, Solo()):
        said, end = "", time.monotonic() + 20
        while not said and time.monotonic() < end:
            said = capfd.readouterr().err
    assert "rank 0 waits in self.save(3): all ranks must call it" in said


def test_a_look_at_the_data_in_an_earlier_step_costs_no_samples(tmp_path: Path) -> None:
    """A step that takes a batch before the training leaves every epoch whole."""
    written(tmp_path)
    look = "for batch in context.phases['a'].loader:\n            break\n        super().loop(context)"
    (tmp_path / "mine.py").write_text(
        f"from torchrelay import lifecycle\n\nclass Runner(lifecycle.Runner):\n"
        f"    def loop(self, context):\n        {look}\n"
    )
    run(tmp_path, "runner.train1.runner_class_path=mine.py", "runner.train1.epochs=1")
    run(tmp_path, "runner.train1.save_checkpoint_path=other", "runner.train1.epochs=1")
    assert torch.equal(weights(tmp_path / "run", 1), weights(tmp_path / "other", 1))


@pytest.mark.parametrize("form", ["exp@2", "runs/7"])
def test_a_run_may_be_called_like_an_epoch_of_another(tmp_path: Path, form: str) -> None:
    """What an earlier profile of the mode writes is meant as a whole, whatever its name looks like."""
    words = (f"runner.train1.save_checkpoint_path={form}", f"runner.infer1.init_model_path={form}")
    found = run(tmp_path, *words, mode=["train1", "infer1"])
    assert [row["epoch"] for row in found["infer1"]][-1] == 2


def test_what_a_configuration_keeps_out_of_saves_stays_as_the_program_makes_it(tmp_path: Path) -> None:
    """With `exclude` the run is evaluated by the same file; a line names what no epoch has."""
    exclude = "+runner.train1.checkpoint.exclude=[a.model.line.bias, a.optimizer]"
    with pytest.warns(UserWarning, match=r"a\.model\.line\.bias stay as the program made them"):
        rows = run(tmp_path, exclude, mode=["train1", "infer1"])["infer1"]
    assert len(rows) > 0
    other = torch.nn.ModuleDict({"line": torch.nn.Linear(2, 1)})
    with pytest.warns(UserWarning, match=r"b\.model\.line\.bias stay"):
        open_checkpoint(tmp_path / "run").load_saved({"b.model": other}, rename={"a.model": "b.model"})
    assert torch.equal(other["line"].weight, weights(tmp_path / "run", "last"))  # type: ignore[arg-type]


def test_an_own_loop_saves_in_an_asynchronous_configuration(tmp_path: Path) -> None:
    """Each `self.save` is over when it returns, also where the configuration writes behind the training."""
    written(tmp_path)
    (tmp_path / "mine.py").write_text(LOOP)
    words = ("runner.train1.runner_class_path=mine.py", "+runner.train1.checkpoint.asynchronous=true")
    assert [row["epoch"] for row in run(tmp_path, *words, mode=["train1", "infer1"])["infer1"]] == [1, 2]


@pytest.mark.ranks
def test_ranks_that_would_save_different_epochs_are_refused(tmp_path: Path) -> None:
    """`self.save` of two numbers at once saves neither, and says so on all ranks."""
    written(tmp_path)
    (tmp_path / "mine.py").write_text(LOOP.replace("epoch + 1", "epoch + 1 + context.rank"))
    words = ("-m", "config.yaml", "-o", "runner.train1.runner_class_path=mine.py")
    done = torchrun(
        Path("-m"), "torchrelay", "run", *words, warm=True, ranks=2, cwd=tmp_path, timeout_secs=100
    )
    assert done.rc != 0 and "would save different epochs, 1 on rank 0 and 2 on rank 1" in str(done)
    assert not list((tmp_path / "run/checkpoints").glob("data/*/*.safetensors"))


def test_an_infer_profile_saves_no_epoch(tmp_path: Path) -> None:
    """`self.save` where nothing is trained is refused."""
    written(tmp_path)
    (tmp_path / "mine.py").write_text(
        LOOP.replace("phase = context", "self.save(1, context)\n        phase = context")
    )
    words = ("runner.infer1.runner_class_path=mine.py",)
    with pytest.raises(StepFailedError, match=r"runner\.infer1 infers, so it has no run to save an epoch in"):
        run(tmp_path, *words, mode=["train1", "infer1"])


@pytest.mark.parametrize(
    ("old", "new", "says"),
    (
        ("epochs: 10", "epochs 10", "7:3: no `key: value`: put a colon and a space after the key"),
        ("epochs: 10", "epochs:10", "7:3: no `key: value`"),
        (
            'path: "increment"\n  print',
            'path: "increment\n  print',
            "line 9 has a quote without its other one",
        ),
        ('"{workspace}/data"', '"{workspace}/data', "line 25 has a quote without its other one"),
        ("phase:\n- name: phase1", "phase:\n  name: phase1", "not a mapping: begin each item with `- `"),
    ),
)
def test_a_slip_of_the_pen_is_told_where_it_is(tmp_path: Path, old: str, new: str, says: str) -> None:
    """A missing colon, an open quote, a name in braces: line, column and remedy are those of the slip."""
    assert old in RIGHT
    told = problems(tmp_path, RIGHT.replace(old, new, 1))
    assert any(says in one for one in told), told


TWO_MODELS = """\
mode: [train1, infer1]
runner:
- {name: train1, epochs: 1, phases: [p, q], save_checkpoint_path: run}
- {name: infer1, class: infer, phases: [r], init_model_path: run@1}
phase:
- {name: p, model: "model.py:P"}
- {name: q, model: "model.py:Q"}
- {name: r, model: "model.py:R"}
dataset:
- {name: d, batch_size: 1}
"""


def test_a_model_that_nobody_trained_is_told_by_the_check(tmp_path: Path) -> None:
    """An infer profile with a model of another class than all that its profile trains is told beforehand."""
    (told,) = problems(tmp_path, TWO_MODELS)
    assert "runner.infer1.phases: the model of phase `r` is not that of a phase of `train1`" in told
    for old, new in (
        ('"model.py:R"', '"model.py:Q"'),
        ("[p, q]", "[p]"),
        ("[r]", "[q]"),
        ("run@1}", "elsewhere}"),
        ("run@1}", "run, init_prefix: p.model}"),
    ):
        assert problems(tmp_path, TWO_MODELS.replace(old, new)) == []


def test_a_module_that_python_does_not_find_is_told_with_the_other_form(tmp_path: Path) -> None:
    """`module:Class` of a file in the workspace says that `module.py:Class` is its form."""
    with pytest.raises(ClassLoadError, match=r"for a file write nowhere_here\.py:Startup"):
        run(tmp_path, "runner.train1.startup_class_path=nowhere_here:Startup")
