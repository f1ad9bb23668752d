"""Implementation of scripts/slurm-check: Slurm jobs that end early, and the results of their runs."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/helpers"))

from launches import JOB, status, wait_for, weights  # noqa: E402
from slurm import UNUSABLE, Slurm, slurm  # noqa: E402
from torchrun import clean_environment  # noqa: E402

_OVER = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED")
_LONG = 400


def launch(cluster: Slurm, folder: Path, *words: str) -> str:
    """Submit; returns the number of the job."""
    env = clean_environment() | {"SLURM_CONF": cluster.env["SLURM_CONF"]}
    command = [
        sys.executable,
        "-m",
        "torchrelay",
        "launch",
        "--slurm",
        "-j",
        "2x1",
        "--set",
        "mem=900",
        *words,
    ]
    subprocess.run(command, cwd=folder, env=env, check=True, capture_output=True, text=True, timeout=60)
    return cluster.ask("squeue", "-h", "-o", "%i").splitlines()[0]


def finished(cluster: Slurm, folder: Path, job: str, restarts: str) -> str:
    """The job must end well after so many restarts; returns what was seen."""
    ended = cluster.wait(job, _OVER, _LONG)
    found = (ended["JobState"], ended["Restarts"], status(folder / "run")["state"])
    log = (folder / "launch/torchrelay.0/job.log").read_text()
    assert found == ("COMPLETED", restarts, "FINISHED"), f"{found}\n{log}"
    resumed = next(line for line in log.splitlines() if "resuming from" in line)
    return f"{', '.join(found)}; {resumed.partition(' r0/2 ')[2]}"


def time_limit(cluster: Slurm, folder: Path) -> str:
    """3 minutes with 2 minutes of notice: Slurm itself sends USR1, the job is queued again and finishes."""
    job = launch(cluster, folder, "--time-limit", "3m", "--notice", "2m", "--", str(JOB), "run", "slow")
    cluster.wait(job, ("RUNNING",))
    begun = time.monotonic()
    cluster.wait_for_requeue(job, _LONG)
    told = f"notified and queued again {time.monotonic() - begun:.0f} s after the start"
    assert "preempted (SIGUSR1)" in (folder / "launch/torchrelay.0/job.log").read_text()
    return f"{told}; {finished(cluster, folder, job, '1')}"


def no_notice(cluster: Slurm, folder: Path) -> str:
    """The shortest notice: the ranks know the end of the job, and leave 30 s before it by themselves."""
    job = launch(cluster, folder, "--time-limit", "2m", "--notice", "1", "--", str(JOB), "run", "slow1")
    cluster.wait(job, ("RUNNING",))
    begun = time.monotonic()
    cluster.wait_for_requeue(job, _LONG)
    log = (folder / "launch/torchrelay.0/job.log").read_text()
    why = log.partition("preempted (")[2].partition(")")[0]
    return f"left after {time.monotonic() - begun:.0f} s ({why}); {finished(cluster, folder, job, '1')}"


def node_down(cluster: Slurm, folder: Path) -> str:
    """An administrator takes a node down: Slurm queues the job again, the run resumes."""
    job = launch(cluster, folder, "--", str(JOB), "run", "slow")
    wait_for(folder / "run.here")
    cluster.ask("scontrol", "update", f"nodename={cluster.nodes[1]}", "state=down", "reason=check")
    cluster.wait_for_requeue(job, _LONG)
    cluster.ask("scontrol", "update", f"nodename={cluster.nodes[1]}", "state=resume", check=False)
    return finished(cluster, folder, job, "1")


def cancelled(cluster: Slurm, folder: Path) -> str:
    """A cancelled job stays cancelled, and no process of it is left."""
    job = launch(cluster, folder, "--", str(JOB), "run", "slow")
    wait_for(folder / "run.here")
    begun = time.monotonic()
    cluster.ask("scancel", job)
    cluster.wait_until_gone(job)
    ended = cluster.state(job)
    assert (ended["JobState"], ended["Restarts"]) == ("CANCELLED", "0"), ended
    left = subprocess.run(["pgrep", "-f", f"{JOB} run"], capture_output=True, text=True, check=False).stdout
    assert not left, left
    state = status(folder / "run")["state"]
    return f"CANCELLED, gone after {time.monotonic() - begun:.1f} s, the run is {state}"


def main() -> int:
    """Run the trials in order, print a line each; 1 where one fails."""
    if UNUSABLE:
        print(f"cannot be tried here: {UNUSABLE}", file=sys.stderr)
        return 2
    trials: tuple[Callable[[Slurm, Path], str], ...] = (time_limit, no_notice, node_down, cancelled)
    chosen = [one for one in trials if one.__name__ in (sys.argv[1:] or [each.__name__ for each in trials])]
    failed, done = 0, []
    with tempfile.TemporaryDirectory(prefix="relay-slurm-check-") as home, slurm() as cluster:
        for trial in chosen:
            folder = Path(home, trial.__name__)
            folder.mkdir()
            try:
                print(f"{trial.__name__:12} ok      {trial(cluster, folder)}", flush=True)
                done.append(folder)
            except (AssertionError, StopIteration, OSError, subprocess.SubprocessError) as error:
                failed += 1
                print(f"{trial.__name__:12} FAILED  {error}", flush=True)
        runs = [one / "run" for one in done if one.name != "cancelled"]
        if len(runs) > 1:
            first, *others = (weights(run) for run in runs)
            same = all(first[name].equal(one[name]) for one in others for name in first)
            print(f"the final weights of {len(runs)} runs are {'the same bits' if same else 'NOT THE SAME'}")
            failed += not same
    return 1 if failed else 0


if __name__ == "__main__":
    os.umask(0o022)
    sys.exit(main())
