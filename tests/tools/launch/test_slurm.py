"""`torchrelay launch --slurm` on a real Slurm: a controller and two nodes on this machine."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launches import JOB, launched, status, weights
from slurm import Slurm, needs_slurm, slurm
from torchrun import clean_environment

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300), needs_slurm]
OVER = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Slurm]:
    with slurm() as found:
        yield found


def submit(cluster: Slurm, folder: Path, *words: str) -> tuple[str, Path]:
    """The number of the job, and its log; sbatch is asked by the launcher itself."""
    env = {"SLURM_CONF": cluster.env["SLURM_CONF"]}
    code, said = launched(folder, "--slurm", "--set", "mem=300", *words, env=env)
    found = re.search(r"^job (\d+); log: (.*)$", said, re.MULTILINE)
    assert code == 0 and found is not None, said
    return found[1], Path(found[2])


def test_a_preempted_job_is_queued_again_and_ends_like_an_undisturbed_run(
    cluster: Slurm, tmp_path: Path
) -> None:
    """USR1 to the batch script, as Slurm sends it before the end: saved, requeued, the same weights."""
    folder = tmp_path / "a place, 100% $HOME"
    folder.mkdir()
    given = "a,b c\n$(touch pwned) `touch pwned` ' \""
    job, log = submit(
        cluster, folder, "-j", "2x1", "--time-limit", "2h", "--env", f"GIVEN={given}",
        "--", str(JOB), "run", "slow", "$(touch pwned); a 'word\"",
    )  # fmt: skip
    cluster.wait_for_file(job, folder / "run.here")
    cluster.ask("scancel", "--batch", "--signal=USR1", job)
    cluster.wait_for_requeue(job)
    ended = cluster.wait(job, OVER)
    text = log.read_text()
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "1"), text
    assert "preempted (SIGUSR1): the same command resumes from epoch 0+" in text, text
    assert "resuming from epoch 0+" in text and (log.parent / "attempt_1/rank_1.out").exists()
    assert not (folder / "pwned").exists()
    assert launched(folder, "-j", "2", "--", str(JOB), "calm", "")[0] == 0
    struck, calm = weights(folder / "run"), weights(folder / "calm")
    assert sorted(struck) == sorted(calm) and all(struck[name].equal(calm[name]) for name in calm)


def test_a_cancelled_job_stays_cancelled(cluster: Slurm, tmp_path: Path) -> None:
    """The ranks of a cancelled job save and leave, too, and still nobody queues it again."""
    job, log = submit(cluster, tmp_path, "-j", "1x2", "--", str(JOB), "run", "slow")
    cluster.wait_for_file(job, tmp_path / "run.here")
    cluster.ask("scancel", job)
    cluster.wait_until_gone(job)
    ended = cluster.state(job)
    assert (ended["JobState"], ended["Restarts"]) == ("CANCELLED", "0"), log.read_text()
    assert "is requeued" not in log.read_text()
    assert status(tmp_path / "run")["state"] != "FINISHED"


def test_a_second_step_of_the_same_job_is_refused_while_the_first_lives(
    cluster: Slurm, tmp_path: Path
) -> None:
    """Both have one job number, and the second step ends with exit code 4; the first is not disturbed."""
    job, log = submit(cluster, tmp_path, "-j", "1x1", "--", str(JOB), "run", "slow")
    cluster.wait_for_file(job, tmp_path / "run.here")
    second = subprocess.run(
        ["srun", f"--jobid={job}", "--overlap", "-n1", sys.executable, str(JOB), "run", "calm"],
        cwd=tmp_path, env=clean_environment(cluster.env), capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert second.returncode == 4, second
    assert "is in use by job 'launched'" in second.stderr, second
    assert cluster.state(job)["JobState"] == "RUNNING" and status(tmp_path / "run")["state"] == "RUNNING"
    cluster.ask("scancel", job)
    cluster.wait_until_gone(job)
    assert "in use" not in log.read_text(), log.read_text()


def test_a_failing_job_is_not_queued_again_and_its_code_is_told(cluster: Slurm, tmp_path: Path) -> None:
    """A syntax error: the job ends with the code of its ranks, which its log explains."""
    (tmp_path / "bad.py").write_text("def (\n")
    job, log = submit(cluster, tmp_path, "-j", "2x1", "bad.py")
    ended = cluster.wait(job, OVER)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "1:0", "0"), (
        log.read_text()
    )
    assert "exit code 1: " in log.read_text() and "SyntaxError" in log.read_text()
