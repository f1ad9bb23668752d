"""Real torchrun jobs: agreement, failure on one rank, killed ranks, restarts, leaving."""

from __future__ import annotations

from pathlib import Path

import pytest
from samples import sample
from torchrun import Job, torchrun, wait_for_the_end_of

SCRIPTS = Path(__file__).parent / "scripts"
pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def test_agreements_and_a_failed_task_that_all_survive(tmp_path):
    """Values, decisions, flags, subgroups and failures are the same everywhere, and DDP leaves cleanly."""
    done = torchrun(SCRIPTS / "agreeing.py", "mismatch", warm=True, ranks=3, cwd=tmp_path)
    assert done.rc == 0, done
    assert done.out.count("good ") == 3, done


@pytest.mark.parametrize(
    ("what", "who", "told"),
    [("raise", 1, "ValueError: bad sample 17"), ("raise", 0, "ValueError: bad sample 17")],
)
def test_an_exception_on_one_rank_is_shown_by_all(tmp_path, what, who, told):
    """While the others wait in a collective, all ranks show the failure and the job ends within 15 s."""
    done = torchrun(SCRIPTS / "failing.py", what, str(who), warm=True, ranks=3, cwd=tmp_path)
    assert done.rc != 0 and f"fault {what}" in done.out, done
    for rank in range(3):
        assert told in done.of_rank(rank) and f"rank {who} on" in done.of_rank(rank), done
    assert secs_after_fault(done) < 15


def test_a_killed_rank_is_named(tmp_path):
    """When a rank is killed in an epoch, another names it and the job ends within 15 s."""
    # The launcher looks after its ranks each 100 ms, and a script without a JobRunner dies of its SIGTERM at
    # once: here it looks rarely, so that the ranks always have the time to say what they saw.
    rarely = ["--monitor-interval=5"]
    done = torchrun(SCRIPTS / "failing.py", "kill", "1", ranks=3, cwd=tmp_path, options=rarely)
    assert done.rc != 0 and "fault kill" in done.out, done
    assert "PeerError: rank 1 (pid" in done.err, done
    assert secs_after_fault(done) < 15


@pytest.mark.parametrize("who", [0, 1])
def test_the_launcher_restarts_after_a_kill(tmp_path, who):
    """With --max-restarts the next attempt meets under a fresh nonce and goes on."""
    script = SCRIPTS / "failing.py"
    done = torchrun(script, "kill", str(who), warm=True, ranks=2, cwd=tmp_path, max_restarts=2)
    assert done.rc == 0 and "fault kill" in done.out, done
    assert done.out.count("went on 1 1") == 2, done


def test_a_late_rank_is_named(tmp_path):
    """A rank that does not come is named with its host and the topic, long before it comes."""
    done = torchrun(SCRIPTS / "failing.py", "late", "1", warm=True, ranks=2, cwd=tmp_path)
    assert done.rc != 0 and done.secs < 250, done
    assert "DeadlineError: waited 1 s at 'a save' for rank 1 (pid" in done.err, done


def test_four_ranks_with_live_ddp_leave_cleanly(tmp_path):
    """Leaving with live DDP objects ends with 0, each time."""
    script = (
        "import torch, torchrelay\n"
        "from torch.nn.parallel import DistributedDataParallel as DDP\n"
        "from torchrelay.runners.training.exit import run_and_leave\n"
        "kept = []\n"
        "def work():\n"
        "    torchrelay.init()\n"
        "    kept.append(DDP(torch.nn.Linear(4, 4)))\n"
        "    kept[0](torch.ones(2, 4)).sum().backward()\n"
        "run_and_leave(work)\n"
    )
    for warm in sample((True, True), (False, True, True)):
        done = torchrun(script, warm=warm, ranks=4, cwd=tmp_path)
        assert done.rc == 0, done


def secs_after_fault(done) -> float:
    """Seconds from the fault, as the script printed its time, to the end of the job."""
    line = next(line for line in done.out.splitlines() if "fault " in line)
    return done.ended - float(line.rsplit(" ", 1)[1])


def test_scripts_without_an_ending_leave_cleanly_and_never_outlive_the_launcher(tmp_path):
    """With a store of rank 0's own: a script that just ends gives 0; ranks of a killed launcher end."""
    script = (
        "import sys, time, torch, torchrelay\n"
        "session = torchrelay.init()\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))\n"
        "model(torch.ones(2, 4)).sum().backward()\n"
        "print('ready', session.env.hosts_store, flush=True)\n"
        "time.sleep(600 if 'stay' in sys.argv else session.env.rank)\n"
    )
    unshared = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = torchrun(script, warm=True, ranks=2, cwd=tmp_path, env=unshared)
    assert done.rc == 0 and done.out.count("ready True") == 1, done
    with Job(tmp_path / "train_script.py", "stay", ranks=2, cwd=tmp_path) as job:
        job.wait_for("ready", times=2)
        workers = job.workers()
        assert len(workers) == 2
        job.process.kill()
        wait_for_the_end_of(workers, timeout_secs=15)
