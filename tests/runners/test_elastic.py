"""An elastic job loses an agent that was told to leave: the others go on without it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest
from torchrun import REPOSITORY, Job


@pytest.mark.ranks
@pytest.mark.timeout(240)
def test_the_agent_that_stays_goes_on(tmp_path: Path) -> None:
    """SIGTERM to one of two agents: the place is saved, and the other trains on there within a minute."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    rendezvous = ["--nnodes=1:2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=x"]
    jobs = []
    for name, serves in (("stays", "true"), ("leaves", "false")):
        conf = f"--rdzv-conf=last_call_timeout=5,timeout=60,is_host={serves}"
        (tmp_path / name).mkdir()
        jobs.append(
            Job(
                REPOSITORY / "tests/programs/elastic.py",
                str(tmp_path / "run"),
                ranks=1,
                cwd=tmp_path / name,
                max_restarts=3,
                rendezvous=[*rendezvous, conf, "--local-addr=127.0.0.1"],
                warm_ranks=True,
            )
        )
    stays, leaves = jobs
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
