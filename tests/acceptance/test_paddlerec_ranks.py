"""PaddleRec's numbered statements where several processes run: PDR-2, 3, 9, 11, 12 and 14."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from launches import warm_environment, warm_python
from lifecycle_cases import CONFIG, ROWS, run, written
from torchrun import torchrun

from torchrelay import open_checkpoint
from torchrelay.lifecycle import ConfigResult, StepFailedError
from torchrelay.metadata.experiments import RunStore, results
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.runners.monitoring.status import standing

TWO = CONFIG.replace("phases: [a]", "phases: [a, b]").replace("mode: [train1]", "mode: [train1, infer1]")
TERMINAL = """\
from torchrelay.lifecycle import Terminal as Base

class Terminal(Base):
    def finish(self, context):
        super().finish(context)
        print("finish of rank", context.session.peers.rank, flush=True)
        if context.session.peers.rank == {failing}:
            raise OSError("no uplink")
"""


def assert_alike(ones: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    """The same rows; numbers may differ as sums of floats do."""
    assert [list(one) for one in ones] == [list(one) for one in others]
    for one, other in zip(ones, others, strict=True):
        for name, value in one.items():
            assert value == (
                other[name] if isinstance(value, str) else pytest.approx(other[name], rel=1e-5, abs=1e-7)
            )


@pytest.mark.ranks
def test_pdr_9_11_12_two_ranks_train_two_phases_and_infer_with_global_metrics(tmp_path):
    """PDR-9, 11, 12: both phases on 2 ranks; metrics and predictions are those of one process, in order."""
    written(tmp_path, TWO)
    (tmp_path / "mine.py").write_text(TERMINAL.format(failing="None"))
    words = ["run", "-m", "config.yaml", "-o", "runner.train1.terminal_class_path=mine.py"]
    done = torchrun(Path("-m"), "torchrelay", *words, warm=True, ranks=2, cwd=tmp_path)
    assert done.rc == 0, done
    assert [done.of_rank(rank).count("finish of rank") for rank in (0, 1)] == [1, 1]
    rows = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    predictions = (tmp_path / "out/predictions.jsonl").read_text().splitlines()
    assert [row["epoch"] for row in rows] == [0, 1, 2]
    assert {(row["a/samples"], row["b/samples"]) for row in rows} == {(ROWS, 7)}
    saved = open_checkpoint(tmp_path / "run")
    assert saved.nodes == ("trainer_0", "trainer_1") and {"a.model", "b.model"} <= set(saved.blobs)

    alone = run(tmp_path, mode=["infer1"])["infer1"]
    again = (tmp_path / "out/predictions.jsonl").read_text().splitlines()
    assert_alike(rows, alone)
    assert_alike(list(map(json.loads, predictions)), list(map(json.loads, again)))
    assert len(again) == 3 * (ROWS + 7)


def local(folder: Path, failing: int | None) -> ConfigResult:
    """One epoch on two local processes, then inference in this one."""
    written(folder)
    (folder / "mine.py").write_text(TERMINAL.format(failing=failing))
    words = ["class=local_cluster_train", "worker_num=2", "terminal_class_path=mine.py", "epochs=1"]
    return run(folder, *(f"runner.train1.{word}" for word in words), mode=["train1", "infer1"])


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Started processes see the environment of a plain shell, and this very tree; they are warm."""
    folder = tmp_path_factory.mktemp("python")
    environment = warm_environment(folder)
    for name in set(os.environ) - set(environment):
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "executable", str(warm_python(folder)))


@pytest.mark.ranks
def test_pdr_14_local_processes_are_started_and_their_ranks_have_logs(tmp_path, capfd, no_launcher):
    """PDR-14: `local_cluster_train` starts processes; each rank has a log; the list goes on."""
    done = local(tmp_path, None)
    assert [row["epoch"] for row in done["infer1"]] == [0, 1]
    assert sorted(one.name for one in (tmp_path / "run/logs/attempt_0").iterdir()) == [
        "rank_0.log",
        "rank_1.log",
    ]
    assert open_checkpoint(tmp_path / "run").nodes == ("trainer_0", "trainer_1")
    assert sorted(re.findall("finish of rank (.)", capfd.readouterr().out)) == ["0", "1"]


@pytest.mark.ranks
@pytest.mark.slow
def test_pdr_14_the_first_rank_that_fails_is_shown_and_ends_the_list(tmp_path, capfd, no_launcher):
    """PDR-14, PDR-2: of local processes the one that failed is shown with its traceback; the list ends."""
    with pytest.raises(
        StepFailedError, match=r"runner train1 failed in step loop .Runner.; not run: infer1"
    ) as caught:
        local(tmp_path, 1)
    said = capfd.readouterr().err
    assert caught.value.exit_code == 1
    assert "rank 1" in said and "OSError: no uplink" in said and "failed in step finish (Terminal)" in said


SIGNALLED = """\
import time
from pathlib import Path
from torchrelay.lifecycle import Network as Base

class Network(Base):
    def build(self, context):
        super().build(context)
        model = context.phases["a"].model
        plain, limit = model.loss, time.monotonic() + 60

        def loss(outputs, batch):
            folder = Path(context.workspace)
            (folder / f"in_step_{context.session.peers.rank}").touch()
            while not (folder / "asked").exists() and time.monotonic() < limit:
                time.sleep(0.05)
            return plain(outputs, batch)

        model.loss = loss
"""


@pytest.mark.ranks
def test_pdr_14_local_processes_that_are_preempted_end_the_list_to_be_continued(
    tmp_path, no_launcher, monkeypatch
):
    """PDR-14, PDR-2: SIGUSR1 is passed on to local processes; the list ends with 75 and goes on later."""
    written(tmp_path)
    (tmp_path / "mine.py").write_text(SIGNALLED)
    words = ["worker_num=2", "network_class_path=mine.py", "epochs=1", "class=local_cluster_train"]
    given = [f"runner.train1.{word}" for word in words]

    def ask() -> None:
        """Signal this process when both ranks are inside of a step."""
        limit = time.monotonic() + 60
        while not all((tmp_path / f"in_step_{rank}").exists() for rank in (0, 1)):
            if time.monotonic() > limit:
                break
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGUSR1)

    passed = subprocess.Popen.send_signal

    def passing(process: subprocess.Popen[Any], number: int) -> None:
        passed(process, number)
        (tmp_path / "asked").touch()

    monkeypatch.setattr(subprocess.Popen, "send_signal", passing)
    asking = threading.Thread(target=ask)
    asking.start()
    with pytest.raises(StepFailedError, match="not run: infer1") as caught:
        run(tmp_path, *given, mode=["train1", "infer1"])
    asking.join()
    assert caught.value.exit_code == 75 and not (tmp_path / "out").exists()
    assert RunDirectory(tmp_path / "run").status()["state"] == "PREEMPTED"
    done = run(tmp_path, *given[1:3], mode=["train1", "infer1"])  # on one process
    assert done["train1"] == 1 and done["train1"].status == "FINISHED"
    assert [row["epoch"] for row in done["infer1"]] == [0, 1]


VERBS = """\
import os
from torchrelay.jobs.config.config import load_config
from torchrelay.lifecycle import StepFailedError, run_config
from torchrelay.runners.programs.cli import perform
from torchrelay.runners.programs.request import VerbRequest
from torchrelay.runners.training.exit import run_and_leave

unlike = load_config("config.yaml", ["+hyper_parameters.tag=" + os.environ["RANK"]])
try:
    run_config(unlike, run_dir="unlike")
except StepFailedError as error:
    print(error.exit_code, error, flush=True)
assert not os.path.exists("unlike")
overrides = ("mode=[train1,infer1]", "runner.infer1.init_model_path=null", "runner.train1.epochs=null")
told = dict(config="config.yaml", overrides=(*overrides, "runner.train1.epochs_per_partition=1"))
for request in (
    VerbRequest("train", **told),
    VerbRequest("test", **told),
    VerbRequest("eval", paths=("data", "out/eval"), **told),
    VerbRequest("status", **told),
):
    assert perform(request) == 0
run_and_leave(lambda: perform(VerbRequest("amend", **told)))
"""


@pytest.mark.ranks
def test_flm_13_ranks_whose_configuration_differs_are_named_and_all_verbs_run_on_ranks(tmp_path):
    """FLM-13: a rank of another configuration is named before anything is made; the verbs make one run.

    PDR-19: it goes over two partitions of data, one epoch each.
    """
    written(tmp_path, CONFIG.replace("  save_checkpoint_path: run\n", "", 1))
    done = torchrun(VERBS, warm=True, ranks=2, cwd=tmp_path)
    assert "nothing to amend" in done.err and "1 evaluated" not in done.out, done
    for rank in (0, 1):
        told = done.of_rank(rank)
        assert re.search(r"^2 runner train1 .*rank 1: the configuration differs", told, re.MULTILINE), done
    (made,) = RunStore(tmp_path / "runs/train1").runs()
    assert standing(made.path).word == "tested" and made.note.launch.startswith("torchrun ")
    assert open_checkpoint(made.path).nodes == ("trainer_0", "trainer_1")
    assert (done.out + done.err).count(f"run {made.id} in ") == 1
    rows = [len((tmp_path / f"out/eval/{one}.txt.jsonl").read_text().splitlines()) for one in (1, 2)]
    assert rows == [7, 4] and sorted(one["epoch"] for one in results(made.path)) == [2]
