"""Runs over hosts with a near directory each: what is near only is sent by the host that has it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import s3_server
import torch
from near_hosts import Hosts
from near_job import near_job
from store_servers import skip_without
from surroundings import surroundings

import torchrelay
from torchrelay import JobRunner

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def undisturbed(place: Path, epochs: int) -> dict[int, dict[str, torch.Tensor]]:
    """The weights of a run without a tier, by epoch."""
    JobRunner(near_job(epochs), place, code=False).train()
    return {epoch: weights(place, epoch) for epoch in range(epochs + 1)}


def weights(place: Path | str, epoch: int) -> dict[str, torch.Tensor]:
    return dict(torchrelay.open_checkpoint(str(place), epoch=epoch).load_tensors("model.*"))


def alike(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def killed_with_two_near_only(hosts: Hosts, epochs: int, **options: Any) -> None:
    """Epoch 1 comes to the far place, 2 and 3 do not; then all processes are killed."""
    with hosts.start(epochs, "ab", **options) as job:
        hosts.go(1)
        job.until(lambda: hosts.far_log.epochs()[-1:] == (1,))
        hosts.hold()
        hosts.go(2, 3)
        job.until(lambda: hosts.near_log("a").epochs()[-1:] == (3,))
    assert hosts.far_log.epochs()[-1] == 1


def test_hosts_go_on_after_kills_and_losses(tmp_path: Path) -> None:
    """Kills, hosts in another order, a lost disk, then one host alone: the bits of an undisturbed run."""
    whole = undisturbed(tmp_path / "whole", 6)
    hosts = Hosts(tmp_path / "hosts", ranks=2)
    killed_with_two_near_only(hosts, 5, keep_last=2)
    both = [{path.name for path in hosts.near(host).rglob("trainer_*.3.*")} for host in "ab"]
    assert both[0] and both[1] and not both[0] & both[1], both
    hosts.let_go()
    hosts.go(4)
    with hosts.start(5, "ba", keep_last=2, asynchronous=True) as job:
        job.until(lambda: hosts.far_log.epochs()[-1:] == (4,))
        assert "resuming from epoch 3" in job.printed
        hosts.hold()
        hosts.go(5)
        job.until(lambda: hosts.near_log("b").epochs()[-1:] == (5,))
    assert hosts.far_log.epochs() == (3, 4) and alike(weights(hosts.run, 4), whole[4])
    shutil.rmtree(hosts.disk("a"))
    hosts.let_go()
    with hosts.start(5, "ba", keep_last=2) as job:
        assert job.end() == [0, 0], job.printed
    assert "resuming from epoch 4 instead" in job.printed and "epoch 5 is abandoned" in job.printed
    assert hosts.far_log.epochs() == (4, 5) and alike(weights(hosts.run, 5), whole[5])
    assert len(hosts.tries("a")) == 1 and hosts.tries("a") < hosts.tries("b") and len(hosts.tries("b")) <= 3
    hosts.go(6)
    with hosts.start(6, "a", keep_last=2) as job:
        assert job.end() == [0], job.printed
    assert "resuming from epoch 5" in job.printed and alike(weights(hosts.run, 6), whole[6])


def test_hosts_go_on_before_a_store(tmp_path: Path) -> None:
    """Two hosts before S3, killed with two epochs near only, send them when they start again, and go on."""
    skip_without(", ".join(s3_server.MISSING))
    whole = undisturbed(tmp_path / "whole", 4)
    with s3_server.moto() as served, surroundings(served.seen_at(served.port)):
        hosts = Hosts(tmp_path / "hosts", 1, f"{served.url}run", served.seen_at(served.port))
        killed_with_two_near_only(hosts, 4)
        hosts.let_go()
        hosts.go(4)
        with hosts.start(4, "ba") as job:
            assert job.end() == [0, 0], job.printed
        assert "resuming from epoch 3" in job.printed
        assert all(alike(weights(hosts.run, epoch), whole[epoch]) for epoch in (2, 3, 4))
