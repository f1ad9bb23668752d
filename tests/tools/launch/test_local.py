"""`torchrelay launch --local` with real agents of torchrun and real ranks."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from launches import JOB, Launch, gone, launched, status, wait_for, weights

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]


def attempt(folder: Path, number: int = 0, launch: int = 0) -> Path:
    return folder / f"launch/torchrelay.{launch}/attempt_{number}"


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a run was launched that nothing disturbed, with what was said in `told`."""
    folder = tmp_path_factory.mktemp("calm")
    code, said = launched(folder, "-j", "2x1", "--", str(JOB), "run", "")
    assert code == 0, said
    (folder / "told").write_text(said)
    return folder


def test_two_nodes_of_one_machine_train_and_each_rank_has_its_own_files(calm: Path) -> None:
    """-j 2x1 starts two agents, whose ranks are one job; rank 0 is shown, all are in files; the code is 0."""
    said = (calm / "told").read_text()
    assert "[rank 0] rank 0 of 2 is done" in said and "rank 1 of 2" not in said
    for rank in (0, 1):
        assert (attempt(calm) / f"rank_{rank}.out").read_text() == f"rank {rank} of 2 is done\n"
    assert status(calm / "run")["state"] == "FINISHED"


def test_a_killed_rank_is_named_and_the_next_attempt_ends_like_an_undisturbed_run(
    tmp_path: Path, calm: Path
) -> None:
    """--max-restarts 1: rank 1 is told to be killed by SIGKILL (6), then the run goes on and ends with 0."""
    code, said = launched(tmp_path, "-j", "2", "--max-restarts", "1", "--", str(JOB), "run", "killed")
    assert code == 0, said
    assert "exit code 6: " in said and "rank 1 on " in said and "was killed by SIGKILL" in said
    assert (attempt(tmp_path, 1) / "rank_1.out").exists()
    struck, undisturbed = weights(tmp_path / "run"), weights(calm / "run")
    assert sorted(struck) == sorted(undisturbed) and len(struck) >= 2
    assert all(struck[name].equal(undisturbed[name]) for name in struck)


def test_a_run_that_lost_a_rank_says_so_with_the_code_of_its_processes(tmp_path: Path) -> None:
    """The connection that broke on rank 0 is no failure of its step: status.json says 6, if it says."""
    code, said = launched(tmp_path, "-j", "2", "--", str(JOB), "run", "killed")
    assert code == 6, said
    left = status(tmp_path / "run")
    assert left["state"] == "RUNNING" or (left["state"], left["exit_code"]) == ("FAILED", 6), left


def test_a_failing_step_is_told_with_its_rank_and_last_lines_and_is_not_tried_again(tmp_path: Path) -> None:
    """What raises on rank 1 ends the launch with 1, though restarts are left: the same would come again."""
    code, said = launched(tmp_path, "-j", "2", "--max-restarts", "3", str(JOB), "run", "fails")
    assert code == 1, said
    assert "first to fail: rank 1 on " in said and "ArithmeticError: made up by a test" in said
    assert "restarting" not in said and status(tmp_path / "run")["exit_code"] == 1


def test_a_program_with_a_syntax_error_ends_with_1_and_shows_it(tmp_path: Path) -> None:
    """No run was begun, so the code is that of the ranks, and the words are theirs."""
    (tmp_path / "bad.py").write_text("def (\n")
    code, said = launched(tmp_path, "-j", "2", "--json", "bad.py")
    told = json.loads(said[said.index("{") :])
    assert (told["code"], told["attempts"]) == (1, 1) and told["why"].endswith(" ended with exit code 1"), (
        said
    )
    assert told["directory"] == str(tmp_path / "launch/torchrelay.0")
    assert code == 1 and "SyntaxError: invalid syntax" in said.partition("its last lines")[2], said


def test_signals_drain_the_ranks_and_a_run_in_use_is_left_alone(tmp_path: Path) -> None:
    """A second launch of a running run ends with 4; SIGTERM has the first one save and leave with 75."""
    with Launch(tmp_path, "-j", "2x1", "--", str(JOB), "run", "slow1") as first:
        wait_for(tmp_path / "run.here")
        code, said = launched(tmp_path, "-j", "1", "--", str(JOB), "run", "")
        assert code == 4 and "DirectoryInUseError" in said, said
        first.process.send_signal(signal.SIGTERM)
        assert first.wait() == 75, first.said
    assert "preempted (SIGTERM): the same command resumes" in first.said
    assert status(tmp_path / "run")["step"] > 0


def test_a_notice_before_a_preemption_has_the_ranks_save_and_leave(tmp_path: Path, calm: Path) -> None:
    """SIGUSR1 to the launcher: 75 though restarts are left, and the same command ends in the same bits."""
    command = ("-j", "2x1", "--max-restarts", "1", "--", str(JOB), "run")
    with Launch(tmp_path, *command, "slow") as told:
        wait_for(tmp_path / "run.here")
        begun = time.monotonic()
        told.process.send_signal(signal.SIGUSR1)
        assert told.wait() == 75, told.said
        assert time.monotonic() - begun < 60, "30 s are theirs, the rest is a busy machine's"
    assert "preempted (SIGUSR1): the same command resumes" in told.said
    assert not attempt(tmp_path, 1).exists(), "the launcher was told to leave, so it begins nothing again"
    left = status(tmp_path / "run")
    assert (left["state"], left["epoch"]) == ("PREEMPTED", 0) and left["step"] > 0, left
    code, said = launched(tmp_path, *command, "")
    assert code == 0, said
    struck, undisturbed = weights(tmp_path / "run"), weights(calm / "run")
    assert all(struck[name].equal(undisturbed[name]) for name in undisturbed)


def test_no_rank_outlives_a_launcher_that_was_killed(tmp_path: Path) -> None:
    """SIGKILL of the launcher: its ranks save and leave by themselves."""
    with Launch(tmp_path, "-j", "2", "--", str(JOB), "run", "slow") as launch:
        wait_for(tmp_path / "run.here")
        rank_0 = status(tmp_path / "run")["pid"]
        launch.process.kill()
        launch.process.wait(60)
    end = time.monotonic() + 100
    while not gone(rank_0):
        assert time.monotonic() < end, "rank 0 still runs"
        time.sleep(0.05)
    assert status(tmp_path / "run")["state"] == "PREEMPTED"


def test_logs_that_were_removed_make_no_lost_rank_of_a_failing_program(tmp_path: Path) -> None:
    """The program's 3 is told without its notes, and it is not started again."""
    (tmp_path / "removes.py").write_text(
        "import shutil\nshutil.rmtree('launch/gone.0')\nraise SystemExit(3)\n"
    )
    code, said = launched(tmp_path, "-j", "1", "--name", "gone", "--max-restarts", "1", "removes.py")
    assert code == 3 and "restarting" not in said, said


def test_ctrl_c_and_a_time_limit_end_with_75(tmp_path: Path) -> None:
    """SIGINT preempts the ranks; a limit that ends a program before it has a run is no failure."""
    with Launch(tmp_path, "-j", "1", "--", str(JOB), "run", "slow") as launch:
        wait_for(tmp_path / "run.here")
        os.kill(launch.process.pid, signal.SIGINT)
        assert launch.wait() == 75, launch.said
    (tmp_path / "waits.py").write_text("import time\nprint('waits', flush=True)\ntime.sleep(600)\n")
    code, said = launched(tmp_path, "-j", "1", "--time-limit", "3", "--", "waits.py")
    assert code == 75 and "the time limit" in said, said
