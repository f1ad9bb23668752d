"""An elastic job loses an agent that was told to leave: the others go on without it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

import pytest
from torchrun import REPOSITORY, Job


def two_agents(tmp_path: Path, program: Path, *args: str, hosts: str, warm_ranks: bool = True) -> list[Job]:
    """Two torchruns of one rank each that meet; the first serves the rendezvous."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    rendezvous = [f"--nnodes={hosts}", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
    jobs = []
    for name, serves in (("first", "true"), ("second", "false")):
        conf = f"--rdzv-conf=last_call_timeout=5,timeout=60,is_host={serves}"
        (tmp_path / name).mkdir()
        jobs.append(
            Job(
                program,
                *args,
                ranks=1,
                cwd=tmp_path / name,
                max_restarts=3,
                rendezvous=[*rendezvous, "--rdzv-id=x", conf, "--local-addr=127.0.0.1"],
                warm_ranks=warm_ranks,
            )
        )
    return jobs


@pytest.mark.ranks
@pytest.mark.timeout(240)
def test_the_agent_that_stays_goes_on(tmp_path: Path) -> None:
    """SIGTERM to one of two agents: the place is saved, and the other trains on there within a minute."""
    program, run = REPOSITORY / "tests/programs/elastic.py", str(tmp_path / "run")
    stays, leaves = two_agents(tmp_path, program, run, hosts="1:2")
    with stays, leaves:
        stays.wait_for("epoch 3 of 2")
        began = time.monotonic()
        os.kill(leaves.process.pid, signal.SIGTERM)
        leaves.wait(30)
        stays.wait_for("of 1", 60)
        assert time.monotonic() - began < 60
        done = stays.wait(60)
    assert done.rc == 0, str(done)
    epochs = [int(found) for found in re.findall(r"epoch (\d+) of", done.out)]
    assert epochs == sorted(set(epochs)), "an epoch that was over ran again"
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["epoch"]) == ("FINISHED", epochs[-1])


ONE_DIES = """
import os, pathlib, signal, sys

import torchrelay

died = pathlib.Path(sys.argv[1])
if os.environ["RANK"] == "1" and not died.exists():
    died.touch()
    os.kill(os.getpid(), signal.SIGKILL)
session = torchrelay.init()
print("met", session.world.nonce, "restart", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
session.close()
"""


@pytest.mark.ranks
@pytest.mark.timeout(240)
def test_ranks_meet_where_one_host_has_seen_a_failure_and_the_other_none(tmp_path: Path) -> None:
    """A rank that dies before it has met the others is started again, and all meet, though counts differ."""
    (program := tmp_path / "one_dies.py").write_text(ONE_DIES)
    first, second = two_agents(tmp_path, program, str(tmp_path / "died"), hosts="2")
    with first, second:
        found = [re.findall(r"met (\w+) restart (\d)", job.wait(90).out) for job in (first, second)]
    ((one, before),), ((other, after),) = found
    assert one == other
    assert {before, after} == {"0", "1"}, "torchrun counts failures by host, or this test shows nothing"


ORPHANED = """
import os, time

import torchrelay
import torchrelay.runners.distributed.world as world

def waiting(*args, meet=world.agree_on_nonce, **options):
    print("waiting", os.getpid(), flush=True)
    return meet(*args, **options)

world.agree_on_nonce = waiting
time.sleep(120 if os.getcwd().endswith("first") else 0)
torchrelay.init()
"""


@pytest.mark.ranks
@pytest.mark.timeout(120)
def test_a_rank_that_waits_for_others_ends_with_its_torchrun(tmp_path: Path) -> None:
    """A rank whose torchrun is gone does not wait on for the others, where a later attempt would meet it."""
    (program := tmp_path / "orphaned.py").write_text(ORPHANED)
    first, second = two_agents(tmp_path, program, hosts="2", warm_ranks=False)
    with first, second:
        second.wait_for("waiting")
        (rank,) = map(int, re.findall(r"waiting (\d+)", second.printed()))
        os.kill(second.process.pid, signal.SIGKILL)
        try:
            end = time.monotonic() + 20
            while Path(f"/proc/{rank}").exists():
                assert time.monotonic() < end, "the rank waits on"
                time.sleep(0.05)
        finally:
            with suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)
