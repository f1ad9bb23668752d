"""TorchX: the script and the component of a launch, and a run by TorchX's own local scheduler."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torchrun import clean_environment
from warm import PLACE, server, warmed

from torchrelay.errors import UsageError
from torchrelay.runners.monitoring.console import Output
from torchrelay.tools.launch import torchx as target
from torchrelay.tools.launch.request import LaunchRequest, Layout, write_files

JOB = str(Path(__file__).resolve().parents[2] / "helpers/hosted_job.py")
PLAIN = LaunchRequest(Layout(1, 2), ("train.py", "--lr", "0.1"), Path("/src"), logs=Path("/src/launch/x.0"))
HOSTILE = ("a\nb", "'\"\\", "$(rm -rf /)", "${app_id}", "$$", "naïve", "", "-", "--", "--name", "x" * 5000)


def words(request: LaunchRequest) -> list[str]:
    """What the script runs, as a shell reads it."""
    return shlex.split(target.files(request)[0].text.partition("\nexec ")[2])


def test_the_script_says_what_was_asked() -> None:
    """What was asked stands in the script, the values of variables only in their file."""
    asked = replace(
        PLAIN, run="runs/a", environment=(("KEY", "hidden"),),
        options=(("scheduler", "slurm"), ("cfg", "partition=a"), ("gpus", "8"), ("memory", "6400"),
                 ("image", "i")),
        restarts=2,
    )  # fmt: skip
    script, variables = target.files(asked)
    assert "hidden" not in script.text and json.loads(variables.text) == {"KEY": "hidden"}
    found = words(asked)
    for pair in (
        "-s slurm", "-cfg partition=a", "--layout 1x2", "--gpu 8", "--memory 6400", "--run runs/a",
        "--image i", "--restarts 2", "--python python3", "--notice 300",
        f"--environment {asked.logs}/environment.json",
    ):  # fmt: skip
        assert shlex.split(pair) in [found[at : at + 2] for at in range(len(found))], pair
    assert "--wait" not in found and "--wait" in words(PLAIN)
    assert found[found.index("--") + 1 :] == ["train.py", "--lr", "0.1"]


def test_words_of_a_user_arrive_as_they_are() -> None:
    """No word is taken for the shell's, and none for a macro of TorchX."""
    specs = pytest.importorskip("torchx.specs")
    from torchrelay.tools.launch.torchx_component import job

    found = words(replace(PLAIN, command=("train.py", *HOSTILE)))
    assert found[found.index("--") + 1 :] == ["train.py", *HOSTILE]
    role = job("train.py", *HOSTILE, layout="3x2", name="n").roles[0]
    known = specs.macros.Values(img_root="", app_id="app", replica_id="2", rank0_env="HOST0")
    replaced = known.apply(role).args
    assert replaced[replaced.index("--") + 1 :] == ["train.py", *HOSTILE]
    assert replaced[replaced.index("--index") + 1] == "2" and replaced[replaced.index("--id") + 1] == "app"
    assert role.num_replicas == 3 and replaced[replaced.index("--host-variable") + 1] == "HOST0"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (dict(options=(("shceduler", "x"),)), "of TorchX; known are"),
        (dict(options=(("cpu", "1"), ("cpu", "2"))), "is given twice"),
        (dict(options=(("cpu", "many"),)), "a whole number"),
        (dict(options=(("scheduler", "a b"),)), "expected a scheduler"),
        (dict(options=(("cfg", " "),)), "is empty"),
        (dict(time_limit=60), "does not support --time-limit"),
        (dict(restarts=1), "does not support --max-restarts"),
    ],
)
def test_mistakes_are_one_line(change: dict[str, Any], told: str) -> None:
    """What TorchX cannot keep is refused before anything is made."""
    with pytest.raises(UsageError) as found:
        target.files(replace(PLAIN, **change))
    assert told in str(found.value) and "\n" not in str(found.value)


def launch(folder: Path, **asked: Any) -> int:
    """Write and submit, as `launch` does."""
    folder.mkdir()
    request = replace(PLAIN, workdir=folder, logs=folder, python=sys.executable, run="../run", **asked)
    write_files(target.files(request), folder)
    return target.submit(request, folder, Output())


@pytest.mark.ranks
def test_a_job_runs_by_the_local_scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked to go, two ranks save and the launch ends with 75, where TorchX says 1; again, it ends with 0."""
    pytest.importorskip("torchx", reason="pip install -e '.[torchx]'")
    for name, value in clean_environment({PLACE: server()}).items():
        monkeypatch.setenv(name, value)
    over = threading.Event()
    asking = threading.Thread(target=ask_to_go, args=(tmp_path / "a/waiting", over))
    asking.start()
    try:
        assert launch(tmp_path / "a", command=("--no-python", *warmed([JOB, "../run", "waiting"]))) == 75
    finally:
        over.set()
        asking.join()
    command = ("--no-python", *warmed([JOB, "../run"]))
    assert launch(tmp_path / "b", command=command, environment=(("KEY", "a,b=$c"),)) == 0
    assert json.loads((tmp_path / "run/status.json").read_text())["state"] == "FINISHED"
    assert list((tmp_path / "b/torchx").rglob("stderr.log"))


def ask_to_go(waiting: Path, over: threading.Event) -> None:
    """SIGTERM to this process, where the launch listens to it, once both ranks are in their epoch."""
    while not over.wait(0.05):
        if all(waiting.with_name(f"waiting.{rank}").exists() for rank in (0, 1)):
            os.kill(os.getpid(), signal.SIGTERM)
            return


def test_without_torchx_the_remedy_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where TorchX is not installed, one line names the package."""
    monkeypatch.setattr(target.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"pip install 'torchx>=0.7'"):
        launch(tmp_path / "a")
