"""What users of ALF type: values and source of earlier stages, alike in training, resume and deployment."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from lifecycle_cases import CONFIG, run, written
from program_cases import Script
from torchrun import clean_environment, torchrun
from warm import PLACE, server, warmed

import torchrelay
from torchrelay import open_checkpoint
from torchrelay.errors import UsageError
from torchrelay.jobs.config.config import Config, load_config
from torchrelay.jobs.config.tree import ConfigError
from torchrelay.lifecycle import run_config
from torchrelay.tools.cli.main import main

BUILT = """\
seed: 4
upstream:
  low: {run: ../low/run@last, into: a.model}
"""
WIDTH = "width: ${upstream.low.hyper_parameters.width}"


def stage(folder: Path, upstream: str = BUILT, width: str = WIDTH) -> Path:
    """A project whose model is as wide as that of the stage before it."""
    folder.mkdir()
    written(folder, CONFIG.replace("seed: 3\n", upstream).replace("width: 2", width))
    return folder


def config_of(folder: Path, *overrides: str) -> Config:
    """The configuration of a project."""
    return load_config(folder / "config.yaml", overrides)


def refused(folder: Path, *overrides: str) -> str:
    """Why a configuration is refused: its only problem."""
    with pytest.raises(ConfigError) as error:
        config_of(folder, *overrides)
    (problem,) = error.value.problems
    return str(problem)


@pytest.fixture
def low(tmp_path: Path) -> Path:
    """The first stage, trained with an override."""
    (tmp_path / "low").mkdir()
    written(tmp_path / "low")
    run(tmp_path / "low", "hyper_parameters.optimizer.learning_rate=0.05", "+hyper_parameters.note=a.b")
    return tmp_path / "low"


def test_a_value_of_the_upstream_stands_in_the_next_stage(low: Path) -> None:
    """Values keep their types; overrides and defaults of the upstream count; mappings are taken whole."""
    high = stage(low.parent / "high")
    more = [
        "+hyper_parameters.rate=${upstream.low.hyper_parameters.optimizer.learning_rate}",
        "+hyper_parameters.note=by ${upstream.low.hyper_parameters.note}",
        "+hyper_parameters.interval=${upstream.low.runner.train1.print_interval}",
        "+hyper_parameters.data=${upstream.low.dataset.d.data_path}",
        "+hyper_parameters.all=${upstream.low.hyper_parameters.optimizer}",
        "+hyper_parameters.model=${upstream.low.phase.a.model}",
    ]
    found = config_of(high, *more).section("hyper_parameters", dict)
    assert (found["width"], found["rate"], found["note"]) == (2, 0.05, "by a.b")
    assert found["data"] == ["data"] and found["all"] == {"class": "sgd", "learning_rate": 0.05}
    assert (found["model"], found["interval"]) == ("model.py", 20)


def test_a_path_of_the_upstream_begins_at_its_workspace(low: Path) -> None:
    """`{workspace}` of the upstream stays its workspace, in a longer text too."""
    (low.parent / "mid").mkdir()
    written(low.parent / "mid", CONFIG.replace("width: 2", 'width: 2\n  file: "{workspace}/x$${y}"'))
    run(low.parent / "mid")
    high = stage(low.parent / "high", BUILT.replace("low/run", "mid/run"))
    found = config_of(high, "+hyper_parameters.file=<${upstream.low.hyper_parameters.file}>")
    assert found.section("hyper_parameters", dict)["file"] == f"<{low.parent}/mid/x${{y}}>"


def test_one_configuration_trains_resumes_and_infers_without_the_upstream(
    low: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recorded configuration holds the value; a resume and `infer` read it from the run, unchanged."""
    high = stage(low.parent / "high")
    run_config(config_of(high), strict=True)
    assert "width: 2\n" in (high / "run/config/resolved.yaml").read_text()
    assert WIDTH in (high / "run/config/source.yaml").read_text()
    before = config_of(high)
    shutil.rmtree(low)
    assert config_of(high).id == before.id and config_of(high).resolved_text() == before.resolved_text()
    capsys.readouterr()
    run(high, "runner.train1.epochs=3")
    run(high, "mode=[infer1]")
    said = capsys.readouterr().err + "".join(one.read_text() for one in (high / "run").glob("*.jsonl"))
    assert "are not read again" in said and "configuration changed" not in said
    assert open_checkpoint(high / "run").epoch == 3
    assert len((high / "out/predictions.jsonl").read_text().splitlines()) >= 11


def test_a_stage_of_a_stage_is_reached_by_the_upstream_in_between(low: Path) -> None:
    """`${upstream.high.upstream.low...}` holds with the first stage gone, then with both gone."""
    high = stage(low.parent / "high")
    run(high)
    top = stage(
        low.parent / "top",
        "seed: 5\nupstream: {high: ../high/run}\n",
        "width: ${upstream.high.upstream.low.hyper_parameters.width}",
    )
    assert config_of(top).section("hyper_parameters")["width"] == 2
    shutil.rmtree(low)
    run(top)
    shutil.rmtree(high)
    assert config_of(top).section("hyper_parameters")["width"] == 2
    run(top, "runner.train1.epochs=3")
    assert open_checkpoint(top / "run").epoch == 3


def test_a_hyper_parameter_of_an_upstream_has_a_short_form(low: Path) -> None:
    """`${upstream.low.width}` is `hyper_parameters.width` there; a key of the schema stays that key."""
    high = stage(low.parent / "high", width="width: ${upstream.low.width}")
    hyper_parameters = config_of(high, "+hyper_parameters.was=${upstream.low.seed}").section(
        "hyper_parameters"
    )
    assert (hyper_parameters["width"], hyper_parameters["was"]) == (2, 3)


def test_another_upstream_counts_from_its_own_directory(low: Path) -> None:
    """The copy in the run is for the upstream that it was made of: an edited `run` reads the other one."""
    high = stage(low.parent / "high")
    run(high)
    shutil.move(low, low.parent / "moved")
    assert config_of(high, "upstream.low.run=../moved/run").section("hyper_parameters")["width"] == 2
    (low.parent / "wide").mkdir()
    written(low.parent / "wide", CONFIG.replace("width: 2", "width: 7"))
    wide = load_config(low.parent / "wide/config.yaml")
    copied = shutil.copytree(low.parent / "moved/run", low.parent / "wide/run")
    (copied / "config/resolved.yaml").write_text(wide.resolved_text())
    assert config_of(high, "upstream.low.run=../wide/run").section("hyper_parameters")["width"] == 7
    assert config_of(high).section("hyper_parameters")["width"] == 2


def test_what_is_wrong_is_told_with_alias_key_nearest_key_and_place(low: Path) -> None:
    """Unknown aliases and keys, an upstream that is not there, one without values, and a circle."""
    high = stage(low.parent / "high")
    place = f"{high}/config.yaml:"
    told = refused(high, "hyper_parameters.width=${upstream.low.widht}")
    assert "command line:1:" in told and "upstream `low` has no `widht`" in told
    assert "did you mean `hyper_parameters.width`?" in told and str(low / "run") in told
    assert "did you mean `low`?" in refused(high, "hyper_parameters.width=${upstream.lo.width}")
    near = refused(high, "hyper_parameters.width=${upstream.low.hyper_parameters.widht}")
    assert "did you mean `hyper_parameters.width`?" in near
    gone = refused(high, "upstream.low.run=../nowhere@best")
    assert gone.startswith(place) and "upstream `low`: the run" in gone
    assert "train that stage first" in gone and str(low.parent / "nowhere") in gone
    assert "a configuration at a URL" in refused(high, "upstream.low.run=s3://bucket/low")
    (low.parent / "bare").mkdir()
    assert "has no configuration" in refused(high, "upstream.low.run=../bare")
    assert "refers to itself" in refused(high, "upstream.low.run=${upstream.low.hyper_parameters.note}")
    assert "does not exist" in refused(high, "runner.train1.save_checkpoint_path=/", 'upstream.low.run="a b"')
    workspace = refused(high, "workspace=${upstream.low.hyper_parameters.note}")
    assert "the workspace cannot come from an upstream" in workspace
    (low / "run/config/resolved.yaml").write_text("a: [")
    assert "is damaged" in refused(high) and "resolved.yaml" in refused(high)


def test_config_check_tells_it_without_torch(low: Path) -> None:
    """`config check` says ok with the upstream there and ends with 2 without it; torch is not imported."""
    high = stage(low.parent / "high")
    code = (
        "import sys; from torchrelay.tools.cli.main import main; rc = main(sys.argv[1:]); "
        "print('torch' in sys.modules); sys.exit(rc)"
    )
    command = [sys.executable, "-c", code, "config", "check", str(high / "config.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and done.stdout.startswith("ok") and done.stdout.endswith("False\n")
    shutil.rmtree(low)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "config.yaml:" in done.stderr and "upstream `low`" in done.stderr
    assert done.stdout == "False\n"


def test_config_print_says_where_the_value_stands(low: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The value is printed with the place in this file where it was asked for."""
    high = stage(low.parent / "high")
    assert main(["config", "print", str(high / "config.yaml")]) == 0
    line = next(one for one in capsys.readouterr().out.splitlines() if "width" in one)
    assert line.strip().startswith("width: 2  # ") and "config.yaml:" in line


def code_of(*words: str) -> int:
    """The exit code of a command."""
    try:
        return main(list(words))
    except SystemExit as left:
        return int(left.code or 0)


def test_the_verbs_go_on_without_the_upstream(low: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`train -m`, `test -m` and `status -m` find the value in the run that is there, with `--runs` too."""
    high = stage(low.parent / "high")
    monkeypatch.chdir(high)
    for more in ([], ["--runs", "elsewhere"]):
        words = ["-m", "config.yaml", *more]
        assert code_of("train", *words, "--max-epochs", "1") == 0
        low.rename(low.with_name("away"))
        assert code_of("train", *words) == 0
        assert code_of("status", *words) == 0
        assert code_of("test", *words, "-o", "mode=[train1,infer1]") == 0
        low.with_name("away").rename(low)
    runs = [*(high / "run").glob("*/run.json"), *(high / "elsewhere").glob("*/*/*/run.json")]
    assert len(runs) == 2, "each was continued, none begun anew"


@pytest.mark.ranks
def test_two_ranks_train_and_resume_with_values_of_the_upstream(low: Path) -> None:
    """Both ranks have the same configuration, before and after the upstream is gone."""
    high = stage(low.parent / "high")
    for epochs in (1, 2):
        words = ["run", "-m", "config.yaml", "-o", f"runner.train1.epochs={epochs}", "--strict-config"]
        done = torchrun(Path("-m"), "torchrelay", *words, warm=True, ranks=2, cwd=high)
        assert done.rc == 0, done
        shutil.rmtree(low, ignore_errors=True)
    assert open_checkpoint(high / "run").epoch == 2
    starts = [json.loads((high / f"run/captured.{number}.json").read_text()) for number in (0, 1)]
    assert starts[0]["config_id"] == starts[1]["config_id"]


NETWORK = """\
from torchrelay.lifecycle import Network as Base

class Network(Base):
    def build_model(self, context, phase):
        low = context.load_upstream("low")
        return low.code.import_module("model").Model(low.config["hyper_parameters"])
"""


def test_a_step_of_a_configured_stage_uses_the_source_of_the_upstream(
    low: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`context.load_upstream` serves training, resume, `infer`, `eval` and replay alike."""
    high = stage(low.parent / "high")
    monkeypatch.chdir(high)
    (high / "network.py").write_text(NETWORK)
    more = ["-o", "runner.train1.network_class_path=network.py", "-o", "runner.train1.replay=true"]
    more += ["-o", "runner.infer1.network_class_path=network.py"]
    assert code_of("train", "-m", "config.yaml", *more) == 0
    shutil.rmtree(low)
    assert code_of("train", "-m", "config.yaml", *more, "--max-epochs", "3") == 0
    assert code_of("test", "-m", "config.yaml", *more, "-o", "mode=[train1,infer1]") == 0
    assert code_of("eval", "-m", "config.yaml", *more, "data/1.txt", "out.jsonl") == 0
    (ran,) = (one.parent for one in (high / "run").glob("*/run.json"))
    assert code_of("verify", str(ran), "--replay") == 0 and open_checkpoint(ran).epoch == 3
    assert "same bits" in capsys.readouterr().out


CONF = "import torch\n\nWIDTH = {}\n\ndef make():\n    return torch.nn.Linear(WIDTH, 1)\n"
PROGRAM = """\
import sys
import torch
import torchrelay
from torchrelay import InitFrom, Job, JobRunner, Upstream, max_epochs
import conf

name, epochs, *above = sys.argv[1:]
upstream = {above[0]: Upstream(f"runs/{above[0]}", keep="model")} if above else None
if above:
    first = "low" if above[0] == "low" else above[0] + "/low"
    low = torchrelay.load_upstream(first, f"runs/{name}", upstream)
    model = low.code.import_module("conf").make()
    print("width", model.in_features)
else:
    model = conf.make()
job = Job(name, blobs={"model": model})

@job.epoch
def step(ctx):
    ctx.log("val/acc", 1.0)

job.stop_when(max_epochs(int(epochs)))
starts = [above[0]] if above else None
print("epoch", int(JobRunner(job, f"runs/{name}", upstream=upstream, init_from=starts).train()))
"""


def programs(folder: Path, *words: str, width: int) -> str:
    """What a stage prints; its source lies in a folder of its own and is deleted behind it."""
    source = folder / "source"
    source.mkdir()
    (source / "conf.py").write_text(CONF.format(width))
    (source / "stage.py").write_text(PROGRAM)
    done = subprocess.run(
        warmed(["source/stage.py", *words]), cwd=folder, env=clean_environment({PLACE: server()}),
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    shutil.rmtree(source)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_one_program_uses_the_source_of_its_upstream_in_every_start(tmp_path: Path) -> None:
    """Training, resume, and the next stage have the first stage's module, with all else deleted."""
    assert programs(tmp_path, "low", "1", width=5) == "epoch 1\n"
    assert programs(tmp_path, "expert", "1", "low", width=9) == "width 5\nepoch 1\n"
    shutil.rmtree(tmp_path / "runs/low")
    assert programs(tmp_path, "expert", "2", "low", width=9) == "width 5\nepoch 2\n"
    assert programs(tmp_path, "agent", "1", "expert", width=9) == "width 5\nepoch 1\n"
    shutil.rmtree(tmp_path / "runs/expert")
    assert programs(tmp_path, "agent", "2", "expert", width=9) == "width 5\nepoch 2\n"
    alone = torchrelay.load_upstream("expert/low", tmp_path / "runs/agent")
    assert alone.path == tmp_path / "runs/agent/lineage/expert/lineage/low"
    assert torchrelay.load_code(alone.path).id == alone.code.id
    with pytest.raises(UsageError, match="only a run of a YAML file has values"):
        _ = alone.config


def test_load_upstream_tells_what_is_wrong(low: Path) -> None:
    """An upstream that is nowhere, or not in the mapping, no alias, and a stage that is not there."""
    with pytest.raises(UsageError, match=r"the run .*nowhere.*does not exist.*train that stage first"):
        torchrelay.load_upstream("low", low.parent / "high", {"low": low / "nowhere@best"})
    with pytest.raises(UsageError, match="use upstream="):
        torchrelay.load_upstream("low", low.parent / "high")
    with pytest.raises(UsageError, match="mapping with 'low'"):
        torchrelay.load_upstream("low", low.parent / "high", {"expert": low})
    with pytest.raises(UsageError, match="cannot be the alias"):
        torchrelay.load_upstream("../low", low.parent / "high")
    with pytest.raises(UsageError, match=r"stage .*lineage/first does not exist"):
        torchrelay.load_upstream("low/first", low.parent / "high", {"low": low / "run"})
    loaded = torchrelay.load_upstream(
        "low", low.parent / "high", {"low": torchrelay.Upstream(low / "run@last")}
    )
    assert loaded.config["hyper_parameters"]["width"] == 2 and loaded.path == low / "run"
    loaded.config["hyper_parameters"]["width"] = 3
    assert loaded.config["hyper_parameters"]["width"] == 2


def test_a_program_with_a_configuration_goes_on_without_the_upstream(
    low: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`script.py train -m config.yaml` finds the value in the program's runs where the upstream is gone."""
    (low.parent / "program").mkdir()
    line = Script(low.parent / "program", capsys)
    line.more(f'def runner_options(self):\n        return {{"upstream": {{"low": {str(low / "run")!r}}}}}')
    text = f"upstream: {{low: {low / 'run'}}}\nhyper_parameters:\n  {WIDTH}\n"
    (low.parent / "config.yaml").write_text(text)
    words = ("-m", str(low.parent / "config.yaml"))
    first = line("train", *words, "--max-epochs", "1")
    assert first.rc == 0, first.err
    shutil.rmtree(low)
    again = line("train", *words, "--max-epochs", "2")
    assert again.rc == 0, again.err
    assert len(line.runs) == 1 and open_checkpoint(line.run).epoch == 2


TWO = """\
mode: [train1]
runner:
- {name: train1, device: cpu, epochs: 1, phases: [a], save_checkpoint_path: one}
- {name: train2, device: cpu, epochs: 1, phases: [a], save_checkpoint_path: two}
- {name: infer1, class: infer, device: cpu, phases: [a], init_model_path: two@last}
"""


def test_each_profile_takes_the_copy_of_its_own_run(low: Path) -> None:
    """Two profiles, built on the upstream before it was trained again and behind that, keep their own."""
    high = stage(
        low.parent / "high",
        width="width: 2\n  noted: ${upstream.low.hyper_parameters.optimizer.learning_rate}",
    )
    path = high / "config.yaml"
    path.write_text(path.read_text().replace(path.read_text().partition("phase:")[0], BUILT + TWO, 1))

    def noted(*overrides: str) -> float:
        return float(config_of(high, *overrides).section("hyper_parameters")["noted"])

    run(high)
    shutil.rmtree(low / "run")
    run(low, "hyper_parameters.optimizer.learning_rate=0.5")
    assert (noted(), noted("mode=train2")) == (0.05, 0.5)
    run(high, "mode=[train2]")
    assert (noted(), noted("mode=[train2]"), noted("mode=[infer1]")) == (0.05, 0.5, 0.5)
    assert noted("mode=[infer1]", "runner.infer1.init_model_path=one/1") == 0.05
    told = refused(high, "mode=[train1, train2]")
    assert "is 0.05 in" in told and "and 0.5 in" in told and "one profile at a time" in told
    shutil.rmtree(low)
    assert (noted(), noted("mode=train2"), noted("mode=[infer1]")) == (0.05, 0.5, 0.5)
