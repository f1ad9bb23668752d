"""One host of a launch on a cluster: the code it ends with, when it is asked to go and with others."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from torchrun import clean_environment
from warm import PLACE, server, warmed

from torchrelay.tools.launch.local import free_port
from torchrelay.tools.launch.on_host import main, time_to_leave, words_of
from torchrelay.tools.launch.outcome import LaunchOutcome, agreed, since

JOB = str(Path(__file__).resolve().parents[2] / "helpers/hosted_job.py")
SECS = 100


def start(
    folder: Path, *words: str, place: list[str], env: dict[str, str], name: str, warm: bool
) -> subprocess.Popen[bytes]:
    """A host whose ranks are forks of a process that has imported torch, as it may be itself."""
    command = ["--no-python", *warmed([JOB, "run", *words])]
    host = words_of(command, notice=60, run="run", place=place)
    with (folder / f"{name}.log").open("w") as log:
        return subprocess.Popen(
            warmed(host) if warm else [sys.executable, *host],
            cwd=folder, env=clean_environment({**env, PLACE: server()}), stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip


def ended(process: subprocess.Popen[bytes]) -> int:
    """Its code; ended by force where it does not end by itself."""
    try:
        return process.wait(SECS)
    finally:
        process.kill()
        process.wait()


def state(folder: Path) -> Any:
    return json.loads((folder / "run/status.json").read_text())["state"]


@pytest.mark.ranks
def test_a_host_that_is_asked_to_go_ends_with_75_and_two_others_go_on(tmp_path: Path) -> None:
    """SIGTERM to the host saves and ends with 75, though torchrun says 1; two hosts of other pods finish it.

    The first host learns its place as Kubeflow's trainer tells it, the others by their index, and the one
    that starts first waits for the one that they meet at.
    """
    trainer = {
        "PET_NNODES": "1", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "localhost",
        "PET_MASTER_PORT": str(free_port()),
    }  # fmt: skip
    host = start(tmp_path, "waiting", place=[], env=trainer, name="first", warm=False)
    end = time.monotonic() + SECS
    while not all((tmp_path / f"waiting.{rank}").exists() for rank in (0, 1)) and host.poll() is None:
        assert time.monotonic() < end
        time.sleep(0.05)
    host.send_signal(signal.SIGTERM)
    assert ended(host) == 75, (tmp_path / "first.log").read_text()
    assert state(tmp_path) == "PREEMPTED"
    place = ["--layout", "2x1", "--endpoint", f"localhost:{free_port()}", "--id", "job-uid", "--index"]
    hosts = [start(tmp_path, place=[*place, index], env={}, name=index, warm=True) for index in ("1", "0")]
    assert [ended(one) for one in hosts] == [0, 0], [(tmp_path / f"{name}.log").read_text() for name in "01"]
    assert state(tmp_path) == "FINISHED"


def test_what_stands_behind_the_dashes_is_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """A host without a command is a mistake in its arguments, and nothing is started."""
    with pytest.raises(SystemExit) as refused:
        main(["--layout", "1x2", "--"])
    assert refused.value.code == 2 and "no command" in capsys.readouterr().err


def test_a_status_of_an_earlier_attempt_says_nothing() -> None:
    """Only what changed since the start counts, and a host does not end well when the run says it failed."""
    old, new = {"state": "FAILED", "exit_code": 5}, {"state": "FAILED", "exit_code": 3, "error": "x"}
    assert since(old, dict(old)) == {} and since(old, new) == new
    well = LaunchOutcome(0, "finished")
    assert agreed(well, {}) == well and agreed(well, {"state": "FINISHED"}) == well
    assert agreed(well, new).code == 3


def test_ranks_have_less_than_the_notice_to_leave() -> None:
    """Torchrun has ended its ranks before the cluster ends torchrun."""
    assert [time_to_leave(secs) for secs in (1, 2, 10, 60, 300)] == [1, 1, 5, 45, 285]
