"""Runs over hosts with a near directory each: what is near only is sent by the host that has it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from near_hosts import Hosts
from torchrun import torchrun

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def alike(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_hosts_go_on_after_kills_and_changes(tmp_path: Path) -> None:
    """Killed with two epochs near only, restarted with hosts in another order, the run ends bit-equal."""
    hosts = Hosts(tmp_path)
    with hosts.start(5, "ab", keep_last=2) as job:
        hosts.go(1)
        job.until(lambda: hosts.far_log.epochs()[-1:] == (1,))
        hosts.hold()
        hosts.go(2, 3)
        job.until(lambda: hosts.near_log("a").epochs()[-1:] == (3,))
        job.kill()
    assert hosts.far_log.epochs()[-1] == 1
    hosts.let_go()
    hosts.go(4)
    with hosts.start(4, "ba", keep_last=2) as job:
        assert job.end() == [0, 0], job.printed
    assert "resuming from epoch 3" in job.printed
    assert hosts.far_log.epochs() == (3, 4)
