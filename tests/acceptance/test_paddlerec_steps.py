"""PaddleRec's numbered statements on steps and profiles: PDR-1 to 5."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from bad_input import tree
from lifecycle_cases import command, run, written
from torchrun import REPOSITORY, clean_environment

from torchrelay import open_checkpoint
from torchrelay.errors import UsageError
from torchrelay.lifecycle import ClassLoadError, StepContext, StepFailedError
from torchrelay.runners.config_runs.selection import config_file

STEPS = {
    "Instance": "setup",
    "Network": "build",
    "Startup": "start",
    "Runner": "loop",
    "Terminal": "finish",
}
OLDER = {"Instance": "instance", "Startup": "startup", "Terminal": "terminal"}


def test_pdr_1_a_directory_in_the_words_of_paddlerec_runs_as_it_stands(tmp_path):
    """PDR-1: `run -m config.yaml` with model, reader and your_startup.py trains and infers."""
    shutil.copytree(REPOSITORY / "examples/paddlerec_style", tmp_path / "project")
    words = command("run", "-m", "project/config.yaml", "-o", "runner.train1.epochs=2")
    done = subprocess.run(
        words, cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "project/metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [0, 1, 2]
    assert rows[-1]["loss"] < rows[0]["loss"] and {row["samples"] for row in rows} == {23}
    assert "train1 epoch 1 phase1 step 5: loss " in done.stdout
    assert "init_scale: 0.5" in (tmp_path / "project/increment/config/resolved.yaml").read_text()
    overrides = (tmp_path / "project/increment/config/overrides.yaml").read_text()
    assert overrides == "- 'runner.train1.epochs=2'\n"


def test_pdr_1_check_says_ok_without_torch_and_makes_nothing(tmp_path):
    """PDR-1 and 6: `run --check` reads only; torch is not imported."""
    written(tmp_path)
    before = tree(tmp_path)
    words = ["-X", "importtime", "-m", "torchrelay", "run", "-m", "config.yaml", "--check"]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0 and re.fullmatch(r"ok, id [0-9a-f]{12}\n", done.stdout)
    assert not re.search(r"\| +torch$", done.stderr, re.M)
    assert tree(tmp_path) == before


def test_pdr_2_profiles_run_in_order_and_the_second_sees_the_first(tmp_path, capfd):
    """PDR-2: the second profile of `mode` evaluates what the first has just saved."""
    done = run(tmp_path, mode=["train1", "infer1"])
    assert [one.name for one in done.profiles] == ["train1", "infer1"] and done.exit_code == 0
    assert all(one.steps == tuple(STEPS.values()) for one in done.profiles)
    assert [row["epoch"] for row in done["infer1"]] == [0, 1, 2]
    assert done["train1"].metrics["loss"] > done["infer1"][2]["loss"] > 0
    assert capfd.readouterr().out.count("infer1 epoch ") == 3


def test_pdr_2_a_failure_stops_the_list_and_names_runner_and_step(tmp_path):
    """PDR-2: a failure is told with runner, step, traceback and what did not run; the code is not 0."""
    written(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from torchrelay.lifecycle import Terminal as Base\n"
        "class Terminal(Base):\n    def finish(self, context):\n        raise OSError('no uplink')\n"
    )
    with pytest.raises(StepFailedError) as caught:
        run(tmp_path, "runner.train1.terminal_class_path=mine.py", mode=["train1", "infer1"])
    error = caught.value
    assert (error.runner, error.step, error.not_run, error.exit_code) == ("train1", "finish", ("infer1",), 1)
    text = str(error)
    assert text.startswith("runner train1 failed in step finish (Terminal); not run: infer1: ")
    assert "mine.py" in text and "OSError: no uplink" in text
    assert not (tmp_path / "out").exists()


def test_pdr_2_an_error_of_the_users_mistake_keeps_its_exit_code(tmp_path):
    """PDR-2: a mistake in what a profile asks for is one line with the code of mistakes, 2."""
    with pytest.raises(
        StepFailedError,
        match=r"runner infer1 failed in step start .Startup.; not run: train1: .*run does not exist",
    ) as caught:
        run(tmp_path, mode=["infer1", "train1"])
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)


LEAKY = """\
import os, random, sys
import torch
from torchrelay.lifecycle import Terminal as Base

seen = []

class Terminal(Base):
    def finish(self, context):
        assert not seen and "LEAK" not in os.environ and context.get("mine") is None
        assert torch.get_default_dtype() == torch.float32 and "leak" not in context.session.workspace()
        seen.append(context.runner_name)
        os.environ["LEAK"] = context["mine"] = "1"
        context.session.workspace()["leak"] = 1
        torch.set_default_dtype(torch.float64)
        random.seed(context.runner_name)
        sys.path.append("leak")
"""


def test_pdr_2_no_state_leaks_between_profiles(tmp_path):
    """PDR-2: globals of modules, environment, dtype, workspace, random streams: the next sees none of it."""
    written(tmp_path)
    (tmp_path / "leaky.py").write_text(LEAKY)
    random.seed(7)
    torch.manual_seed(7)
    expected = random.Random(7).random(), torch.rand(1, generator=torch.Generator().manual_seed(7))
    both = [f"runner.{name}.terminal_class_path=leaky.py" for name in ("train1", "infer1")]
    run(tmp_path, *both, mode=["train1", "infer1"])
    assert "LEAK" not in os.environ and "leak" not in sys.path and not torch.distributed.is_initialized()
    assert (random.random(), torch.rand(1)) == expected
    assert not [name for name in sys.modules if name.startswith("_torchrelay_")]


def replaced(folder: Path, name: str, method: str, base: str = "object") -> None:
    """A file with a step that notes its calls, and does what its base does where it has one."""
    imports = "" if base == "object" else f"from torchrelay.lifecycle import {base} as Base\n"
    onward = f"        super().{STEPS[name]}(context)\n" if imports else ""
    (folder / "mine.py").write_text(
        f"{imports}class {name}({'Base' if imports else ''}):\n"
        "    def __init__(self, context):\n        self.first = context\n"
        f"    def {method}(self, context):\n"
        "        assert context is self.first\n"
        "        context['calls'] = [*context.get('calls', []), context.runner_name]\n"
        "        print('called', type(self).__name__, context['calls'])\n" + onward
    )


@pytest.mark.parametrize("name", STEPS)
def test_pdr_3_each_step_is_replaced_alone_and_called_once(tmp_path, capfd, name):
    """PDR-3: each key alone; a class that calls its default by super is called once, with the context."""
    written(tmp_path)
    replaced(tmp_path, name, STEPS[name], base=name)
    done = run(tmp_path, f"runner.train1.{name.lower()}_class_path={{workspace}}/mine.py")
    assert done["train1"] == 2 and open_checkpoint(tmp_path / "run").epoch == 2
    assert capfd.readouterr().out.count("called") == 1


def test_pdr_3_all_steps_are_replaced_at_once(tmp_path, capfd):
    """PDR-3: five keys with five files of the user's: each is called once, in the order of the steps."""
    written(tmp_path)
    keys = []
    for name, method in STEPS.items():
        replaced(tmp_path, name, method, base=name)
        (tmp_path / "mine.py").rename(tmp_path / f"my_{name}.py")
        keys.append(f"runner.train1.{name.lower()}_class_path={{workspace}}/my_{name}.py")
    assert run(tmp_path, *keys)["train1"] == 2
    lines = [line.split()[1] for line in capfd.readouterr().out.splitlines() if line.startswith("called")]
    assert lines == list(STEPS)


@pytest.mark.parametrize("name", ["Terminal", "Runner"])
def test_pdr_3_a_class_of_no_base_replaces_a_step(tmp_path, capfd, name):
    """PDR-3: no base class is asked for, and PaddleRec's names of the methods are called, too."""
    written(tmp_path)
    replaced(tmp_path, name, OLDER.get(name, "run"))
    done = run(tmp_path, f"runner.train1.{name.lower()}_class_path=mine.py")
    assert capfd.readouterr().out.splitlines()[-1:] == [f"called {name} ['train1']"]
    assert (done["train1"] is None) == (name == "Runner")


def test_pdr_3_a_step_from_a_module(tmp_path, capfd, monkeypatch):
    """PDR-3: `module:Class` names a class of any name in what can be imported."""
    written(tmp_path)
    replaced(tmp_path, "Terminal", "finish", base="Terminal")
    (tmp_path / "my_lifecycle_steps.py").write_text(
        (tmp_path / "mine.py").read_text().replace("class Terminal", "class Upload")
    )
    monkeypatch.syspath_prepend(tmp_path)
    run(tmp_path, "runner.train1.terminal_class_path=my_lifecycle_steps:Upload")
    assert capfd.readouterr().out.splitlines()[-1:] == ["called Upload ['train1']"]


def test_pdr_3_a_network_of_ones_own_adds_a_validation_to_the_job(tmp_path):
    """PDR-3: the job that Network makes is a Job like any other: a task added to it is part of each epoch."""
    written(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from torchrelay.lifecycle import Network as Base\n"
        "class Network(Base):\n    def build(self, context):\n        super().build(context)\n"
        "        @context.job.epoch\n        def validate(ctx):\n"
        "            ctx.log('val/epoch', ctx.epoch)\n"
    )
    assert run(tmp_path, "runner.train1.network_class_path=mine.py")["train1"].metrics["val/epoch"] == 2


def test_pdr_4_the_context_is_typed_and_a_mapping():
    """PDR-4: attribute and item are one entry; of what is missing the step that sets it is told."""
    context = StepContext(runner_name="train1")
    assert context.runner_name == context["runner_name"] == "train1" and dict(context) == {
        "runner_name": "train1"
    }
    context.device = "cpu"
    assert context["device"] == "cpu"
    context["mine"] = 3
    assert context.pop("mine") == 3 and context.get("mine") is None and "job" not in context
    with pytest.raises(KeyError, match=r"job.*is not set: the step build .Network. sets it"):
        _ = context.job
    with pytest.raises(UsageError, match=r"context\['sesion'\].*did you mean 'session'"):
        context["sesion"]
    with pytest.raises(UsageError, match=r'set your own as context\["mine"\]'):
        context.mine = 3


def test_pdr_4_an_unknown_status_is_an_error_at_once_with_the_legal_names():
    """PDR-4: a status that is no step raises, naming what is legal; PaddleRec's names are understood."""
    context = StepContext()
    with pytest.raises(UsageError, match=r"'fly': expected setup, build, start, loop, finish, end"):
        context["status"] = "fly"
    context["status"] = "train_pass"
    assert context["status"] == "loop"


@pytest.mark.parametrize(
    ("name", "status", "steps"),
    [
        ("Startup", "finish", ("setup", "build", "start", "finish")),
        ("Startup", "terminal_pass", ("setup", "build", "start", "finish")),
        ("Instance", "end", ("setup",)),
        ("Startup", None, tuple(STEPS.values())),
    ],
)
def test_pdr_4_a_step_may_jump(tmp_path, name, status, steps):
    """PDR-4: the status that a step sets is the next step; what sets none continues in order."""
    written(tmp_path)
    jump = "pass" if status is None else f"context['status'] = {status!r}"
    (tmp_path / "mine.py").write_text(
        f"class {name}:\n    def {STEPS[name]}(self, context):\n        {jump}\n"
    )
    done = run(tmp_path, f"runner.train1.{name.lower()}_class_path=mine.py")
    assert done.profiles[0].steps == steps


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (None, "does not exist"),
        ("import nothing_of_this_name\n", "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        ("class Terminal(:\n", "SyntaxError"),
        ("raise SystemExit(3)\n", "SystemExit: 3"),
        ("class Other: pass\n", "has no such class; its classes: Other"),
        ("Terminal = 3\n", "it is not a class"),
        ("class Terminal: pass\n", "has no method finish(self, context)"),
        ("import helper\n", "write `from . import helper`"),
    ],
)
def test_pdr_5_a_class_that_cannot_be_had_is_told_before_anything_is_made(tmp_path, source, says):
    """PDR-5: missing file, failing import, missing class: path, class and traceback; no group, no file."""
    written(tmp_path)
    (tmp_path / "helper.py").touch()
    if source is not None:
        (tmp_path / "mine.py").write_text(source)
    before, paths = tree(tmp_path), list(sys.path)
    with pytest.raises(UsageError) as caught:  # the last profile's, and the first has not begun
        run(tmp_path, "runner.infer1.terminal_class_path=mine.py", mode=["train1", "infer1"])
    text = str(caught.value)
    assert (says in text and str(tmp_path / "mine.py") in text) or "no method" in text
    assert tree(tmp_path) == before and sys.path == paths and not torch.distributed.is_initialized()
    if source is not None and "import" in source:
        assert isinstance(caught.value, ClassLoadError)
        assert "expected class Terminal" in text and 'mine.py", line 1' in text


def test_pdr_5_two_files_of_one_name_never_meet(tmp_path):
    """PDR-5: two phases with two model.py have two models; a file may import its neighbours relatively."""
    written(tmp_path)
    (tmp_path / "other/parts.py").write_text("from torch import nn\nTower = nn.Linear\n")
    own = (tmp_path / "other/model.py").read_text()
    (tmp_path / "other/model.py").write_text(
        own.replace("nn.Linear", "Tower").replace("import torch\n", "from .parts import Tower\n")
    )
    run(tmp_path, "runner.train1.phases=[a,b]", "runner.train1.epochs=1")
    names = {leaf.name for leaf in open_checkpoint(tmp_path / "run").leaves}
    assert {"a.model.line.weight", "b.model.tower.weight"} <= names


def test_pdr_20_a_model_directory_runs_by_its_name(tmp_path, monkeypatch):
    """PDR-20: a directory, or a package that can be imported, stands for the config.yaml in it."""
    written(tmp_path / "my_pdr20_models/small")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    own = str(tmp_path / "my_pdr20_models/small/config.yaml")
    assert (
        config_file("my_pdr20_models.small") == config_file(str(Path(own).parent)) == config_file(own) == own
    )
    assert config_file("no.such.package") == "no.such.package" and config_file("json") == "json"
