"""Real torchrun jobs whose ranks meet by one report per host."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from torchrun import REPOSITORY, torchrun

PROGRAM = REPOSITORY / "tests/programs/host_reports.py"
pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def played(tmp_path: Path, what: str, *options: str):
    path = os.pathsep.join(filter(None, (str(REPOSITORY / "tests/helpers"), os.environ.get("PYTHONPATH"))))
    return torchrun(
        PROGRAM,
        str(tmp_path),
        what,
        warm=True,
        ranks=4,
        cwd=tmp_path,
        env={"PYTHONPATH": path},
        options=options,
    )


def test_a_job_ends_the_same_with_reports(tmp_path):
    """All state of all ranks at every end of an epoch is that of the run without reports, bit by bit."""
    done = played(tmp_path, "train")
    assert done.rc == 0, done
    for rank in range(4):
        told = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert told["runs"]["reports"] == told["runs"]["flat"] and told["runs"]["flat"]["trail"]
        assert told["reported"] == [False, False, True, False], "rank 2 leads the second host"


def test_a_killed_leader_is_named(tmp_path):
    """When the leader of a host is killed it is named, and the job ends within 15 s."""
    # The launcher ends this script by SIGTERM as soon as it looks: rarely, so that ranks say what they saw.
    done = played(tmp_path, "die", "--monitor-interval=5")
    fault = next(line for line in done.out.splitlines() if "fault " in line)
    assert done.rc != 0 and done.ended - float(fault.rsplit(" ", 1)[1]) < 15, done
    assert "rank 2 (pid" in done.err and "on host1) died unexpectedly" in done.err, done
