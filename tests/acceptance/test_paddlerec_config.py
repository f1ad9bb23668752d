"""PaddleRec's numbered statements on configurations (PDR-1, 5 to 8, 11, 16), and ALF-16."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from config_cases import RIGHT, problems, read, written

from torchrelay.__main__ import main
from torchrelay.jobs.config.section_types import ClassPath, EpochChoice
from torchrelay.jobs.config.tree import ConfigError

COMMAND = [sys.executable, "-m", "torchrelay", "config"]

MISTAKES = """\
workspace: "."
mode: [train1, infr1]
runner:
- name: train1
  class: trian
  epochs: ten
  epcohs: 3
  save_checkpoint_interval: 0
  phases: [phase2]
  startup_class_path: "{workspace}/nowhere.py"
  network_class_path: package.module.Network
- name: train1
  epochs: 1
phase:
- name: phase1
  model: "{workspace}/model.py"
  dataset_name: dd
dataset:
- name: d
  data_path: "${env:NO_SUCH_VARIABLE}"
hyper_parameters:
  lr: 0.1
  lr: 0.2
"""
PLACES = [  # line, column, what the message has
    (2, 16, "unknown runner `infr1`"),
    (5, 10, "unknown word 'trian'; did you mean `train`?"),
    (6, 11, "expected a whole number from 1, not the text 'ten'"),
    (7, 3, "unknown key; did you mean `epochs`?"),
    (8, 29, "expected a whole number from 1 (-1: not set), not the number 0"),
    (9, 12, "unknown phase `phase2`; did you mean `phase1`?"),
    (10, 23, "file "),
    (11, 23, "write package.module:Network"),
    (12, 9, "another runner is called `train1`, in line 4"),
    (17, 17, "unknown dataset `dd`"),
    (19, 3, "`batch_size` missing"),
    (20, 15, "the environment has no NO_SUCH_VARIABLE"),
    (23, 3, "'lr' is given twice in one mapping, first in line 22"),
]


def command(folder: Path, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run `torchrelay config` in a folder."""
    done = subprocess.run(
        [*COMMAND, *words], cwd=folder, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def test_pdr_1_every_key_name_is_accepted_and_missing_ones_have_defaults(tmp_path):
    """PDR-1 (schema): all sections with the ancestor's names; optional keys have documented defaults."""
    settings = read(tmp_path).settings
    train, infer = settings.runners_of_mode()
    assert (train.kind, train.device, train.epochs) == ("single_train", "cpu", 10)
    assert train.save_checkpoint_interval == 2
    assert not train.infers and infer.infers
    assert (infer.device, infer.print_interval, infer.worker_num) == ("auto", 20, 1)
    assert settings.phase[0].dataset_name == settings.dataset[0].name == "d"
    assert settings.hyper_parameters.optimizer.learning_rate == 0.001
    assert settings.dataset[0].extra["tags"] == ["x", "y"]


ANCESTOR = """\
workspace: "."
mode: runner1
debug: false
runner:
- name: runner1
  class: local_cluster_train
  device: gpu
  selected_gpus: "0,1"
  fleet_mode: collective
  worker_num: 2
  distribute_strategy: sync
  epochs: 2
  init_model_path: ""
  save_checkpoint_interval: -1
  save_inference_interval: -1
  save_inference_path: inference
  save_step_interval: 100
  save_step_path: step
  print_interval: 1
  runner_result_dump_path: dump.json
  instance_class_path: my.steps:Instance
  network_class_path: my.steps:Network
  startup_class_path: my.steps:Startup
  runner_class_path: my.steps:Runner
  terminal_class_path: my.steps:Terminal
phase:
- {name: p, model: "my.net:Model", dataset_name: q, thread_num: 2, shuffle_filelist: true}
dataset:
- {name: q, type: QueueDataset, batch_size: 2, data_path: data,
   sparse_slots: "click 1 2", dense_slots: "d:13", padding: 0}
hyper_parameters: {optimizer: {class: SGD, learning_rate: 1e-2, strategy: sync}, hidden: [4, 2]}
"""


def test_pdr_1_each_key_of_the_ancestor_is_known(tmp_path):
    """PDR-1 (schema): a file with every key of the ancestor that has a meaning here is right."""
    settings = read(tmp_path, ANCESTOR).settings
    runner = settings.runner[0]
    assert runner.selected_gpus == (0, 1)
    assert runner.save_checkpoint_interval == 1 and runner.save_inference_interval is None  # -1: not set
    assert runner.terminal_class_path == ClassPath("my.steps:Terminal", "Terminal", module="my.steps")
    assert runner.save_inference_path.endswith("/inference") and runner.init_model_path is None


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("class: online_learning", "write `train`"),
        ("class: cluster", "write `cluster_train`"),
        ("trainer_class: a.py", "not supported: replace single steps"),
        ("save_inference_feed_varnames: [C1]", "not supported: a module has no named variables"),
        ("save_inference_fetch_varnames: x", "not supported: a module has no named variables"),
        ("server_num: 1", "not supported: torchrelay has no parameter servers"),
        ("fleet_mode: ps", "`ps` is not supported: torchrelay has no parameter servers"),
        ("distribute_strategy: async", "`async` is not supported"),
    ],
)
def test_pdr_1_what_has_no_meaning_here_is_refused_with_the_remedy(tmp_path, key, says):
    """PDR-1 (schema): keys and words of the ancestor without a meaning are refused, never ignored."""
    (found,) = problems(tmp_path, f"runner:\n- name: a\n  epochs: 1\n  {key}\n")
    assert found.startswith("4:") and says in found


@pytest.mark.parametrize("step", ["instance", "network", "startup", "runner", "terminal"])
def test_pdr_5_class_paths_are_checked_before_anything_is_made(tmp_path, step):
    """PDR-5 (form): a missing file is told with its path, a bad form with the forms and the class."""
    name = step.capitalize()
    runner = f"runner:\n- name: a\n  epochs: 1\n  {step}_class_path: "
    (missing,) = problems(tmp_path, f'{runner}"{{workspace}}/steps/mine.py"\n')
    assert missing.endswith(f"file {tmp_path}/steps/mine.py does not exist")
    (bad,) = problems(tmp_path, f"{runner}mine\n")
    assert f"a class `{name}`, `file.py:Class` or `module:Class`, not the text 'mine'" in bad
    (theirs,) = problems(tmp_path, f"{runner}paddlerec.core.steps\n")
    assert "copy the file to the workspace" in theirs
    (tmp_path / "mine.py").touch()
    config = read(tmp_path, f"{runner}mine.py:Other\n")
    found = getattr(config.settings.runner[0], f"{step}_class_path")
    assert found == ClassPath("mine.py:Other", "Other", file=tmp_path / "mine.py")


def test_pdr_6_all_mistakes_in_one_report_with_their_places(tmp_path):
    """PDR-6: 13 planted mistakes are one report with 13 places, each with its line and a caret below it."""
    written(tmp_path, MISTAKES)
    said = command(tmp_path, "check", "config.yaml", code=2)
    lines = said.stderr.splitlines()
    places = [
        (int(m[1]), int(m[2])) for line in lines if (m := re.match(r"config\.yaml:(\d+):(\d+): ", line))
    ]
    assert places == [place[:2] for place in PLACES]
    for (line, column, message), at in zip(PLACES, range(0, 3 * len(PLACES), 3), strict=True):
        assert message in lines[at]
        assert lines[at + 1] == f"  {line} | {MISTAKES.splitlines()[line - 1]}"
        assert lines[at + 2].index("^") == len(f"  {line} | ") + column - 1
    assert lines[-1] == "13 problems; nothing was started" and len(lines) == 3 * len(PLACES) + 1
    assert said.stdout == "" and sorted(one.name for one in tmp_path.iterdir()) == [
        "config.yaml", "model.py", "reader.py", "your_startup.py"
    ]  # fmt: skip


def test_pdr_6_the_report_as_json(tmp_path):
    """PDR-6: with --json the same places, for programs; the exit code is the same."""
    written(tmp_path, MISTAKES)
    found = json.loads(command(tmp_path, "check", "--json", "config.yaml", code=2).stdout)["problems"]
    assert [(one["line"], one["column"]) for one in found] == [place[:2] for place in PLACES]
    assert found[3] == {
        "source": "config.yaml", "line": 7, "column": 3, "path": "runner.train1.epcohs",
        "message": "unknown key; did you mean `epochs`?", "nearest": "epochs",
    }  # fmt: skip


def test_pdr_6_the_report_takes_less_than_half_a_second_and_no_torch(tmp_path, tell):
    """PDR-6: 13 mistakes cost a fresh process less than 0.5 s of processor time; torch is not imported."""
    path = written(tmp_path, MISTAKES)
    code = (
        "import sys; from torchrelay.__main__ import main\n"
        f"code = main(['config', 'check', {str(path)!r}])\n"
        "print('torch' in sys.modules, code)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    secs = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    tell(f"config check with 13 mistakes: {secs:.2f} s of processor time, process start included")
    assert done.stdout.split() == ["False", "2"]
    assert secs < 0.5


def test_pdr_6_a_directory_means_its_config_yaml(tmp_path, capsys):
    """PDR-6: what `run -m` takes for a configuration, `config check` looks at as well."""
    path = written(tmp_path, RIGHT)
    assert path.name == "config.yaml"
    assert main(["config", "check", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("ok, id ")
    path.unlink()
    assert main(["config", "check", str(tmp_path)]) == 2
    assert "config.yaml" in capsys.readouterr().err
    for nothing in ("", "x" * 300):
        assert main(["config", "check", nothing]) == 2
        assert "cannot be read" in capsys.readouterr().err


def test_pdr_6_a_bad_indent_hides_nothing_else(tmp_path):
    """PDR-6: a line that is no YAML is told, and so is what is wrong before and behind it; nothing more."""
    text = RIGHT.replace("  epochs: 10\n", "   epochs: 10\n").replace("mode: [train1", "mode: [train2")
    found = problems(tmp_path, text.replace("batch_size: 5", "batch_size: five"))
    assert [one.partition(": ")[0] for one in found] == ["2:8", "7:10", "23:15"], found


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("<<: {epochs: x}", "merge keys (<<) are not supported"),
        ("name: {epochs: x}", "'name' is given twice in one mapping, first in line 2"),
        ("stop: *a", "aliases (*a) are not supported"),
        ("keep_last: 010", "'010' is ambiguous in YAML"),
        ("keep_last: !!str 3", "tags (tag:yaml.org,2002:str) are not allowed"),
        ("keep_last: &a 3", "anchors (&a) are not supported"),
    ],
)
def test_pdr_6_what_the_reader_of_yaml_refuses_is_told_once(tmp_path, line, says):
    """PDR-6: the schema has nothing to say of a place that was refused before, and goes on with the rest."""
    found = problems(tmp_path, f"runner:\n- name: a\n  epochs: 1\n  {line}\nseed: x\n")
    assert len(found) == 2 and says in found[0] and found[1].startswith("5:7: seed"), found


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("mode: [a\nrunner: []\n", "2:7: did not find expected ',' or ']'"),
        ('name: "a\nrunner: []\n', "1:7: the quote that begins here is not closed"),
        (
            "workspace: {workspace}/x\n",
            "1:23: did not find expected key: a text that begins with a brace",
        ),
        ("name: {workspace}\n", '1:7: name: expected a name, not a mapping: put "{workspace}" in quotes'),
        ("- a\n", "1:1: a mapping"),
        ("", "1:1: a mapping"),
    ],
)
def test_pdr_6_what_is_no_yaml_is_one_problem(tmp_path, text, says):
    """PDR-6: where the rest cannot be read, nothing is said of it."""
    (found,) = problems(tmp_path, text)
    assert found.startswith(says), found


def test_pdr_6_a_string_is_one_phase_not_its_letters(tmp_path):
    """PDR-6: `phases: phase1` means this one phase; a part of a name is no name."""
    assert read(tmp_path).settings.runner[1].phases == ("phase1",)
    (found,) = problems(tmp_path, RIGHT.replace("phases: phase1", "phases: phase"))
    assert found == "16:11: runner.infer1.phases: unknown phase `phase`; did you mean `phase1`?"


def test_pdr_7_names_are_expanded_in_every_string(tmp_path):
    """PDR-7: `{workspace}`, keys, variables and defaults, in nested lists too; other braces stay."""
    text = RIGHT + (
        "  deep: [[\"{workspace}/a\", {b: '${hyper_parameters.lr}'}], '${env:WHO}-${env:N,7}', '{x} {{y}}']\n"
        "  name: run-${runner.train1.epochs}-${phase.phase1.name}\n"
        "  n: ${env:N,7}\n  all: ${dataset.d.tags}\n"
        "  raw: $${x} {{workspace}}\n  default: ${runner.infer1.print_interval}\n"
    )
    own = read(tmp_path, text, environ={"WHO": "me"}).section("hyper_parameters")
    assert own["deep"][0][0] == f"{tmp_path}/a" and own["deep"][0][1]["b"] == 0.1
    assert own["deep"][1:] == ["me-7", "{x} {{y}}"]
    assert (own["name"], own["n"], own["all"]) == ("run-10-phase1", 7, ["x", "y"])
    assert (own["raw"], own["default"]) == ("${x} {workspace}", 20)


@pytest.mark.parametrize(("written_as", "means"), [('"."', ""), ("sub", "sub"), ('"${env:HERE}"', "sub")])
def test_pdr_7_a_relative_workspace_begins_at_the_file(tmp_path, monkeypatch, written_as, means):
    """PDR-7: wherever the command is typed, the workspace and all relative paths are the same."""
    (tmp_path / "here/sub").mkdir(parents=True)
    monkeypatch.chdir("/")
    text = f'workspace: {written_as}\nrun_dir: r\nhyper_parameters: {{a: "{{workspace}}/b"}}\n'
    config = read(tmp_path / "here", text, environ={"HERE": "sub"})
    assert config.workspace == tmp_path / "here" / means
    assert config.settings.run_dir == f"{config.workspace}/r"
    assert config.section("hyper_parameters")["a"] == f"{config.workspace}/b"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: ${hyper_parameters.lrr}", "2:6: hyper_parameters.a: `hyper_parameters.lrr` is not in the conf"),
        (
            "a: x-${env:NOPE}",
            "2:8: hyper_parameters.a: the environment has no NOPE: set it",
        ),
        ("a: ${b", "2:6: hyper_parameters.a: `${` is not closed"),
        ("a: ${oc.env:X}", "2:6: hyper_parameters.a: expected `${key.path}`, `${env:NAME}` or"),
        (
            "a: x ${hyper_parameters}",
            "2:8: hyper_parameters.a: refers to itself: hyper_parameters -> hy",
        ),
        (
            "a: ${hyper_parameters.a}",
            "2:6: hyper_parameters.a: refers to itself: hyper_parameters.a -> ",
        ),
        ("a: x ${env:X,}${lr}", "2:17: hyper_parameters.a: `lr` is not in the configuration"),
    ],
)
def test_pdr_7_an_unresolved_name_is_an_error(tmp_path, text, says):
    """PDR-7: each with the place of the expression itself and what can be done."""
    (found,) = problems(tmp_path, f"hyper_parameters:\n  {text}\n")
    assert found.startswith(says), found


def test_pdr_7_a_circle_is_told_with_all_its_names(tmp_path):
    """PDR-7: names that refer to each other are one problem, which names the way round."""
    pairs = ("a: '${hyper_parameters.b}'", "b: 'x${hyper_parameters.c}'", "c: '${hyper_parameters.a}'")
    text = f"hyper_parameters: {{{', '.join(pairs)}}}\n"
    (found,) = problems(tmp_path, text)
    way = " -> ".join(f"hyper_parameters.{one}" for one in "abca")
    assert f"refers to itself: {way}" in found
    (found,) = problems(tmp_path, 'workspace: "${name}"\nname: "{workspace}/x"\n')
    assert "refers to itself: workspace -> name -> workspace" in found


def test_pdr_8_overrides_are_typed_and_address_items_by_name(tmp_path):
    """PDR-8: values are YAML, items of lists go by name, `=` may stand in values; the texts are recorded."""
    given = [
        "runner.train1.epochs=3", "hyper_parameters.lr=1e-3", "dataset.d.tags=[a,b]",
        "dataset.d.data_path={workspace}/x=y", "name=a=b", "runner.train1.keep_best={metric: auc, mode: max}",
        "runner.infer1.stop.max_steps=5", "+hyper_parameters.new.deep=on",
    ]  # fmt: skip
    config = read(tmp_path, overrides=given)
    settings, own = config.settings, config.section("hyper_parameters")
    assert settings.runner[0].epochs == 3 and settings.name == "a=b"
    assert own["lr"] == 0.001 and type(own["lr"]) is float
    assert settings.dataset[0].extra["tags"] == ["a", "b"]
    assert settings.dataset[0].data_path == (f"{tmp_path}/x=y",)
    assert settings.runner[0].keep_best.metric == "auc" and settings.runner[1].stop.max_steps == 5
    assert own["new"]["deep"] == "on"
    assert config.overrides == tuple(given)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("runner.train1.epoch_s=3", "-o 1:15: runner.train1.epoch_s: unknown name `epoch_s`; did you mean"),
        ("runner.tran1.epochs=3", "-o 1:8: runner.tran1.epochs: unknown name `tran1`; did you mean `train1`"),
        ("hyper_parameters.lrr=1", "-o 1:18: hyper_parameters.lrr: `lrr` is not in the configuration; did"),
        ("hyper_parameters.lr.x=1", "-o 1:21: hyper_parameters.lr.x: `hyper_parameters.lr` is a single"),
        ("runner.train1.epochs=many", "-o 1:22: runner.train1.epochs: expected a whole number from 1, not"),
        ("runner.train1.trainer_class=a", "-o 1:15: runner.train1.trainer_class: `trainer_class` is not"),
        ("epochs", "-o 1:1: epochs: an override is key.path=value"),
        ("name=[a", "-o 1:6: name: did not find expected"),
        ("name=010", "-o 1:6: name: '010' is ambiguous in YAML"),
    ],
)  # fmt: skip
def test_pdr_8_a_wrong_override_is_refused_at_its_place(tmp_path, override, says):
    """PDR-8: unknown paths are refused with the nearest name, values as those of files."""
    (found,) = problems(tmp_path, overrides=[override])
    assert found.startswith(says), found


@pytest.mark.parametrize(
    ("epoch", "available", "chosen", "absent"),
    [
        ("3", [5, 3, 0], [3], []),
        ("[5, 3, 9]", [3, 5], [3, 5], [9]),
        ("1..5", [0, 2, 5, 6], [2, 5], [1, 3, 4]),
        ("3..", [4, 0, 3], [3, 4], []),
        ("all", [10, 9, 2], [2, 9, 10], []),
    ],
)
def test_pdr_11_epochs_of_infer_are_written_in_many_ways(tmp_path, epoch, available, chosen, absent):
    """PDR-11 (form): one, a list, a range, all; in order of numbers, and what is not there is named."""
    text = f"runner:\n- {{name: a, class: infer, epoch: {epoch}}}\n"
    choice = read(tmp_path, text).settings.runner[0].infer_epochs
    assert (choice.chosen(available), choice.absent(available)) == (chosen, absent)


def test_pdr_11_the_older_form_of_a_range_and_words(tmp_path):
    """PDR-11 (form): infer_start_epoch and infer_end_epoch, `latest`, `best`; `epochs` is not needed."""
    runner = "runner:\n- {{name: a, class: infer, {0}}}\n"
    older = read(tmp_path, runner.format("infer_start_epoch: 2, infer_end_epoch: 5")).settings.runner[0]
    assert older.infer_epochs == EpochChoice("numbers", first=2, last=4)
    for word, kind in (("latest", "latest"), ("last", "latest"), ("best", "best")):
        assert read(tmp_path, runner.format(f"epoch: {word}")).settings.runner[0].infer_epochs.kind == kind
    choice = read(tmp_path, runner.format("epoch: best")).settings.runner[0].infer_epochs
    assert choice.chosen([3, 1, 2], best=1) == [1] and choice.chosen([3]) == []
    assert EpochChoice("latest").chosen([3, 10, 2]) == [10] and EpochChoice("latest").chosen([]) == []
    for keys in ("infer_start_epoch: 2", "infer_start_epoch: 5, infer_end_epoch: 5", "epoch: 5..1",
                 "epoch: newest", "epoch: best, infer_start_epoch: 1, infer_end_epoch: 2"):  # fmt: skip
        assert len(problems(tmp_path, runner.format(keys))) == 1, keys


def test_pdr_16_the_best_epoch_is_named_by_metric_and_mode(tmp_path):
    """PDR-16 (form): `keep_best: {metric: auc, mode: max}` is read; early stopping ends a run."""
    more = "  keep_best: {metric: auc, mode: max}\n"
    more += "  stop: {early_stopping: {metric: auc, mode: max, patience: 3}}\n"
    runner = read(tmp_path, f"runner:\n- name: a\n{more}").settings.runner[0]
    assert (runner.keep_best.metric, runner.keep_best.mode) == ("auc", "max")
    assert runner.stop.early_stopping.patience == 3 and runner.stop.early_stopping.min_delta == 0.0


def test_alf_16_settings_that_are_never_read_are_named(tmp_path):
    """ALF-16: at the end of start-up the keys that no code has read are listed with their places."""
    text = RIGHT + "  learning_rte: 1\n  model: {depth: 2, wdith: 8}\n"
    config = read(tmp_path, text)
    own = config.section("hyper_parameters")
    assert (
        own["lr"] == 0.1
        and own.get("learning_rate") is None
        and dict(**own["model"]).keys() == {"depth", "wdith"}
    )
    config = read(tmp_path, text)
    own = config.section("hyper_parameters")
    assert own["lr"] == 0.1 and own.get("learning_rate") is None and own["model"]["depth"] == 2
    assert config.settings.dataset[0].extra["tags"]
    lines = [line.partition("config.yaml:")[2] for line in config.check_unused(strict=False)]
    assert lines == [
        "33:3: hyper_parameters.sparse_feature_number: was never read",
        "34:3: hyper_parameters.learning_rte: was never read; `learning_rate` was requested but is missing",
        "35:21: hyper_parameters.model.wdith: was never read",
    ]
    with pytest.raises(ConfigError, match="3 problems"):
        config.check_unused(strict=True)


def test_alf_5_what_was_read_is_kept_although_the_file_changes(tmp_path):
    """ALF-5 (form): the resolved form is of what was read, whatever is in the file by then."""
    config = read(tmp_path)
    (tmp_path / "config.yaml").write_text("runner: []\n")
    assert "epochs: 10" in config.resolved_text() and config.source == RIGHT.encode()


def test_a_mistake_of_the_user_is_no_traceback(tmp_path):
    """A file that is not there is one line and exit code 2."""
    assert command(tmp_path, "check", "none.yaml", code=2).stderr == (
        "torchrelay: none.yaml: cannot be read (No such file or directory): expected a YAML file\n"
    )
