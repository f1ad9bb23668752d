"""The five verbs on a configuration alone (FLM-1, 3, 4, 5, 7, 10): the same words as for a program."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from torchrelay import open_checkpoint
from torchrelay.errors import RelayError
from torchrelay.metadata.experiments import RunStore, results
from torchrelay.tools.cli.main import main

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/paddlerec_style"
SHORT = ("-o", "runner.train1.epochs=1")


@dataclass(frozen=True)
class Typed:
    """What became of a command."""

    rc: int
    out: str
    err: str


class Project:
    """A copy of the example, and its verbs, typed in this process."""

    def __init__(self, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capfd, self.config = folder, capfd, "config.yaml"
        shutil.copytree(EXAMPLE, folder)

    def __call__(self, verb: str, *words: str) -> Typed:
        self._capfd.readouterr()
        try:
            rc = main([verb, "-m", self.config, *words])
        except SystemExit as end:
            rc = int(end.code or 0)
        told = self._capfd.readouterr()
        assert not os.environ.get("TORCHRELAY_ARCHIVED_SOURCE")
        return Typed(rc, told.out, told.err)

    def change(self, name: str, old: str, new: str) -> None:
        """Replace a text in a file, which must be there."""
        text = (self.folder / name).read_text()
        assert old in text
        (self.folder / name).write_text(text.replace(old, new))

    @property
    def runs(self) -> list[str]:
        """The ids of its runs, the oldest first."""
        return [run.id for run in RunStore(self.folder / "increment").runs()]


@pytest.fixture
def project(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Project:
    """A workspace of its own, the working directory."""
    found = Project(tmp_path / "recommending", capfd)
    monkeypatch.chdir(found.folder)
    monkeypatch.delenv("TORCHRELAY_RUNS", raising=False)
    return found


def test_flm_1_and_3_train_of_a_configuration_refuses_continues_and_begins_anew(project: Project) -> None:
    """FLM-1, FLM-3: unchanged is refused with both ways out; a limit goes on; code or keys make a new run."""
    first = project("train", *SHORT, "--message", "first")
    assert first.rc == 0 and ": new (no run yet)" in first.out, first
    again = project("train", *SHORT)
    assert again.rc == 2 and "--force" in again.err and "--retrain" in again.err
    assert "continued (max_epochs raised)" in project("train", "--max-epochs", "2").out
    project.change("config.yaml", "epochs: 3", "epochs: 2")  # the file's limit is no part of it either
    assert project("train").rc == 2
    (run,) = project.runs
    (project.folder / "increment" / run / "mine.txt").write_text("an artefact")
    assert "from the beginning (--retrain)" in project("train", *SHORT, "--retrain").out
    assert project.runs == [run] and not (project.folder / "increment" / run / "mine.txt").exists()
    assert (project.folder / "increment/.retrained" / f"{run}.1/mine.txt").exists()
    assert "new (--force)" in project("train", *SHORT, "--force").out and len(project.runs) == 2
    assert "new (code or configuration changed)" in project("train", *SHORT, "-o", "seed=4").out
    project.change("model.py", "nn.ReLU", "nn.Tanh")
    assert "new (code or configuration changed)" in project("train", *SHORT).out and len(project.runs) == 4
    assert project("train", "--max-epochs", "2", "--epoch", "0").rc == 0
    newest = open_checkpoint(project.folder / "increment" / project.runs[-1])
    assert (newest.epoch, newest.branch) == (2, 1)
    strict = project("train", *SHORT, "-o", "+hyper_parameters.hiden=1", "--strict-config")
    assert strict.rc == 2 and "hyper_parameters.hiden: was never read" in strict.err
    assert len(project.runs) == 4
    project.change("model.py", "super()", "broken()")
    assert project("train", *SHORT).rc == 1 and len(project.runs) == 4  # what cannot be built leaves no run


def test_flm_4_and_10_test_of_a_configuration_uses_the_run_and_stores_rows_in_it(project: Project) -> None:
    """FLM-4, FLM-10: its rows lie in the run; changed code is refused, ignored, or the archived runs."""
    assert project("train", *SHORT).rc == 0
    (run,) = project.runs
    path = project.folder / "increment" / run
    tested = project("test", "--json")
    assert tested.rc == 0 and [one["epoch"] for one in json.loads(tested.out)["results"]] == [0, 1], tested
    assert (project.folder / "predictions.jsonl").exists() and "never read" not in tested.err
    assert [one["epoch"] for one in results(path)] == [0, 1]
    quiet = ("-o", "runner.infer1.predictions_path=null", "-o", "runner.infer1.metrics_path=null")
    assert "tested before; --retest" in project("test", *quiet, "--epoch", "last").out
    other = "dataset.dataset_infer.batch_size=4"
    assert "infer1 epoch 1" in project("test", *quiet, "--epoch", "last", "-o", other).out
    assert "infer1 epoch 1" in project("test", *quiet, "--epoch", "last", "--retest").out
    project.change("model.py", "nn.ReLU", "nn.Tanh")
    refused = project("test")
    assert refused.rc == 2 and "changed: model.py" in refused.err
    assert "--ignore: runs the current code" in project("test", "--ignore", "--epoch", "1").err
    sample = "".join((project.folder / "data/test.csv").read_text().splitlines(keepends=True)[:2])
    (project.folder / "in.csv").write_text(sample)
    (project.folder / "model.py").unlink()  # the archive is enough
    archived = project("eval", "in.csv", "archived.csv", "--run", run[-5:])
    assert archived.rc == 2, "today's configuration names a file that is gone"
    shutil.copy(EXAMPLE / "model.py", project.folder / "model.py")
    project.change("model.py", "nn.ReLU", "nn.Identity")
    assert project("eval", "in.csv", "archived.csv", "--run", run[-5:]).rc == 0
    shutil.copy(EXAMPLE / "model.py", project.folder / "model.py")
    assert project("eval", "in.csv", "today.csv", "--ignore").rc == 0
    first, second = ((project.folder / name).read_text() for name in ("archived.csv", "today.csv"))
    assert first == second and first.startswith("index,click")


def test_flm_5_eval_of_a_configuration_reads_by_the_reader_and_writes_whole_files(project: Project) -> None:
    """FLM-5: files or directories in, rows out; what cannot be read or written is told before anything."""
    assert project("train", *SHORT).rc == 0
    done = project("eval", "data", "out")
    assert done.rc == 0 and sorted(one.name for one in (project.folder / "out").iterdir()) == [
        "test.csv.jsonl",
        "train.csv.jsonl",
    ], done
    rows = [json.loads(one) for one in (project.folder / "out/test.csv.jsonl").read_text().splitlines()]
    assert [row["index"] for row in rows] == list(range(23)) and all(0 < row["click"] < 1 for row in rows)
    missing = project("eval", "nowhere.csv", "out.jsonl")
    assert missing.rc == 2 and "nowhere.csv does not exist" in missing.err
    assert project("eval", "one.csv").rc == 2
    (project.folder / "closed").write_text("")
    closed = project("eval", "data/test.csv", "closed/out.jsonl")
    assert closed.rc == 2 and "cannot be written" in closed.err


def test_flm_7_status_and_amend_of_a_configuration(project: Project) -> None:
    """FLM-7: status tells files and state, writes nothing and can be scripted; amend keeps both codes."""
    assert project("status", "--check").rc == 1
    assert not (project.folder / "increment").exists()
    assert project("train", *SHORT).rc == 0
    assert project("status", *SHORT, "--check").rc == 0
    project.change("reader.py", "import torch", "import torch  # as tensors")
    (project.folder / "data/test.csv").write_text("1,2,3,4\n")  # data are no source
    told = json.loads(project("status", *SHORT, "--json").out)
    assert told["changed"]["files"] == {"added": [], "changed": ["reader.py"], "removed": []}
    assert told["run"]["state"] == "finished" and told["train"]["trains"]
    amended = project("amend", *SHORT, "--message", "a comment")
    assert amended.rc == 0 and "amended to" in amended.out
    assert project("status", *SHORT, "--check").rc == 0
    assert project("amend", *SHORT).rc == 2  # nothing to amend
    project.change("model.py", "nn.ReLU()", "nn.ReLU(), nn.Linear(hidden, hidden)")
    refused = project("amend", *SHORT)
    assert refused.rc == 2 and "cannot load its epoch 1" in refused.err and "Traceback" not in refused.err
    (project.folder / "data/train.csv").rename(project.folder / "moved.csv")
    refused = project("amend", *SHORT)
    assert (
        refused.rc == 2
        and "model and data cannot be built here" in refused.err
        and "train.csv" in refused.err
    )
    assert project("status", "--check").rc == 1


@pytest.mark.parametrize(
    ("change", "words", "taken"),
    [
        ("", ["+runner.train1.checkpoint.exclude=[recommend.model.net.0.bias]"], True),
        (
            "self.more = nn.Linear(1, 1)",
            ["+runner.train1.checkpoint.resume_exclude=[MODEL.more.*, PHASE.optimizer]"],
            True,
        ),
        ("self.more = nn.Linear(1, 1)", [], False),
    ],
)
def test_amend_of_a_configuration_takes_what_a_resume_takes(
    project: Project, change: str, words: list[str], taken: bool
) -> None:
    """Leaves that the configuration excludes, from saves or from resumes, are not asked of the epoch."""
    text = (project.folder / "config.yaml").read_text()
    (phase,) = re.findall(r"^- name: (\w+)\n  model:", text, re.MULTILINE)[:1]
    words = [
        one.replace("recommend.", f"{phase}.").replace("MODEL", f"{phase}.model").replace("PHASE", phase)
        for one in words
    ]
    overrides = [*SHORT, *(part for one in words for part in ("-o", one))]
    assert project("train", *overrides).rc == 0
    project.change("model.py", "self.net = ", f"{change or 'pass'}  # new\n        self.net = ")
    told = project("amend", *overrides)
    assert (told.rc == 0) is taken, told
    if taken:
        again = [one.replace("epochs=1", "epochs=2") for one in overrides]
        assert project("train", *again).rc == 0


@pytest.mark.parametrize("words", [[], ["--runs", "elsewhere"]])
def test_eval_by_archived_code_behind_a_changed_configuration(project: Project, words: list[str]) -> None:
    """`eval --run ID` finds its run, wherever runs lie, and gives what it gave before the change."""
    assert project("train", *SHORT, *words).rc == 0
    (run,) = [one.parent for one in project.folder.rglob("program.json")]
    assert project("eval", *SHORT, *words, "data/test.csv", "before.csv").rc == 0
    project.change("config.yaml", "hidden: ", "hidden: 1")
    told = project("eval", *words, "--run", run.name, "data/test.csv", "after.csv")
    assert told.rc == 0, told
    assert (project.folder / "after.csv").read_text() == (project.folder / "before.csv").read_text()


def test_archived_code_replaces_no_source_of_another_folder(project: Project) -> None:
    """Source lies in the workspace, wherever the configuration does: a result in place of it is refused."""
    (project.folder / "cfg").mkdir()
    text = (project.folder / "config.yaml").read_text()
    assert 'workspace: "."' in text
    (project.folder / "cfg/config.yaml").write_text(text.replace('workspace: "."', 'workspace: ".."'))
    (project.folder / "table.json").write_text("[1]")
    project.config = "cfg/config.yaml"
    assert project("train", *SHORT).rc == 0
    (run,) = project.runs
    project.change("model.py", "import torch", "import torch  # changed")
    told = project("eval", "--run", run, "data/test.csv", "table.json")
    assert told.rc == 2 and "is part of the source of" in told.err
    assert (project.folder / "table.json").read_text() == "[1]"
    assert project("eval", "--run", run, "data/test.csv", "cfg/table.json").rc == 0


def test_amend_of_a_configuration_loads_the_optimizer_too(project: Project) -> None:
    """An optimizer of another kind is told by `amend`, not by the next training."""
    network = "import torch\nfrom torchrelay import lifecycle\n\nclass Network(lifecycle.Network):\n    "
    (project.folder / "network.py").write_text(f"{network}pass\n")
    words = (*SHORT, "-o", "+runner.train1.network_class_path=network.py")
    assert project("train", *words).rc == 0
    project.change(
        "network.py",
        "pass",
        "def build_optimizer(self, context, model):\n        return torch.optim.Rprop(model.parameters())",
    )
    told = project("amend", *words)
    assert told.rc == 2 and "cannot load its epoch 1" in told.err, told


def test_status_of_a_configuration_says_what_train_does(project: Project) -> None:
    """A limit that the configuration raises is one `train` goes on with; nothing imports torch for it."""
    assert project("train", *SHORT).rc == 0
    told = project("status")
    assert "continues" in told.out and "max_epochs raised" in told.out
    assert "refused" in project("status", *SHORT).out
    code = "import sys; from torchrelay.tools.cli.main import main\n"
    code += "try: main(['status', '-m', 'config.yaml'])\nfinally: assert 'torch' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0 and "continues" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train"], "needs a PROGRAM, or a configuration"),
        (["test", "-m", "config.yaml", "-o", "mode=[train1]"], "no runner of its mode infers"),
        (["train", "-m", "config.yaml", "--force", "--retrain"], "not allowed with"),
        (["status", "-m", "two.yaml"], "but there is train1, train2: choose one with -o mode=[train1]"),
        (["train", "-m", "config.yaml", "--runs", "one"], "is a single run of `torchrelay run`"),
    ],
)
def test_mistakes_with_verbs_of_configurations_make_nothing(
    project: Project, words: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """2 and one line; nothing is made."""
    text = (project.folder / "config.yaml").read_text()
    another = "- name: infer1"
    two = text.replace(another, f"- {{name: train2, epochs: 1}}\n{another}")
    (project.folder / "two.yaml").write_text(two.replace("[train1, ", "[train1, train2, "))
    taken = project.folder / "one/recommending/train1/run.json"
    taken.parent.mkdir(parents=True)
    taken.write_text("{}")
    before = sorted(project.folder.rglob("*"))
    try:
        rc = main(words)
    except SystemExit as end:
        rc = int(end.code or 0)
    err = capfd.readouterr().err
    assert rc == RelayError.exit_code + 1 == 2 and said in err and err.count("\n") == 1
    assert sorted(project.folder.rglob("*")) == before


def test_run_and_the_verbs_do_not_mix_in_one_directory_and_eval_replaces_nothing_of_the_users(
    project: Project,
) -> None:
    """What would make the history useless, or a file of the user's a result, is refused with a way out."""
    assert project("train", *SHORT).rc == 0
    mixed = project("run", *SHORT)
    assert mixed.rc == 2 and "`torchrelay train -m " in mixed.err and "--run-dir" in mixed.err
    config, data = Path("config.yaml").read_bytes(), Path("data/test.csv").read_bytes()
    for out in ("config.yaml", "model.py", "data/train.csv", "data/test.csv"):
        refused = project("eval", "data/test.csv", out)
        assert refused.rc == 2 and refused.err.startswith(f"torchrelay: UsageError: {out} is"), refused
    assert (Path("config.yaml").read_bytes(), Path("data/test.csv").read_bytes()) == (config, data)
    assert main(["train", "config.yaml"]) == 2 and main(["run", "-m", "config.yaml", "--run-dir", ""]) == 2


def test_a_run_that_goes_on_with_other_settings_says_which(project: Project) -> None:
    """A learning rate that a resume does not use is told, with what it was; unchanged settings are not."""
    words = ("-o", "mode=[train1]", "--run-dir", "one")
    assert project("run", *words, *SHORT).rc == 0
    assert "configuration changed" not in project("run", *words).err
    told = project(
        "run", *words, "-o", "runner.train1.epochs=4", "-o", "hyper_parameters.optimizer.learning_rate=1"
    )
    rate = "hyper_parameters.optimizer.learning_rate 0.01 -> 1"
    assert "configuration changed since attempt" in told.out + told.err and rate in told.out + told.err, told


def test_a_closed_reader_of_the_output_ends_no_training_and_no_verb(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind `| head -1` a training goes on to its end, and status and test keep their exit codes."""
    for words in (("train", *SHORT, "-o", "runner.train1.print_interval=1"), ("test",), ("status",)):
        read, write = os.pipe()
        os.close(read)
        with os.fdopen(write, "w") as unread, monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", unread)
            assert project(*words).rc == 0, words
    assert ": tested, newest epoch 1" in project("status", *SHORT).out
