"""Ranks whose agent was killed are ended by the launcher. These ranks are processes without torch."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from torchrelay.runners.distributed.launcher import DIRECTORY
from torchrelay.tools.launch.local import end_left_behind, ranks_of

STAYS = "trap '' TERM; echo here; while :; do sleep 0.1; done"
LEAVES = "trap 'exit 75' TERM; echo here; while :; do sleep 0.1; done"


def rank(attempt: Path, script: str, **more: str) -> subprocess.Popen[str]:
    """A process with these surroundings, once it has said that it hears signals."""
    env = {**os.environ, DIRECTORY: str(attempt), **more}
    started = subprocess.Popen(["bash", "-c", script], env=env, stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None and started.stdout.readline() == "here\n"
    return started


def test_ranks_of_the_attempt_are_asked_then_killed_and_no_other_process_is(tmp_path: Path) -> None:
    """SIGTERM first, SIGKILL when it was ignored; another attempt's rank and the agents themselves stay."""
    here, other = tmp_path / "attempt_1", tmp_path / "attempt_10"
    leaves, stays = rank(here, LEAVES, LOCAL_RANK="0"), rank(here, STAYS, LOCAL_RANK="1")
    strangers = [rank(other, LEAVES, LOCAL_RANK="0"), rank(here, LEAVES)]
    try:
        assert {leaves.pid, stays.pid} <= set(ranks_of(here))
        assert end_left_behind(here, 1, lambda: leaves.poll() is not None) >= 2
        assert (leaves.wait(60), stays.wait(60)) == (75, -9)
        assert all(one.poll() is None for one in strangers)
        assert end_left_behind(other, 60) >= 1 and strangers[0].wait(60) == 75
    finally:
        for one in (leaves, stays, *strangers):
            one.kill()
            one.communicate()
