"""ctx.load_blobs: blobs of another run, loaded into what the workspace has under their names."""

from __future__ import annotations

import pytest
import torch

from torchrelay.jobs.job import Job
from torchrelay.jobs.stop import max_epochs
from torchrelay.runners.job_runner import JobRunner
from torchrelay.runners.local_session import LocalSession


@pytest.fixture
def pretrained(tmp_path):
    """A run of two epochs: a module whose bias counts epochs, a tensor and a value."""
    model = torch.nn.Linear(2, 1)
    job = Job("pretrain", blobs={"model": model, "seen": torch.zeros(1), "best": 0})

    @job.epoch
    def train(ctx):
        with torch.no_grad():
            model.bias.fill_(ctx.epoch)
        ctx["seen"] += 8
        ctx["best"] = ctx.epoch * 10

    job.stop_when(max_epochs(2))
    JobRunner(job, tmp_path / "pre").train(LocalSession())
    return tmp_path / "pre", model


def test_objects_are_loaded_in_place_and_values_replaced(pretrained):
    """A module, a tensor and a value of the chosen epoch; the result says that nothing was missing."""
    where, source = pretrained
    target, tensor = torch.nn.Linear(2, 1), torch.zeros(1)
    session = LocalSession()
    session.run(lambda ws: ws.update(model=target, seen=tensor, best=None))
    session.run(lambda ctx: ctx.load_blobs(where, ["model", "seen", "best"], epoch=1))
    assert (target.bias.item(), tensor.item(), session.blob("best")) == (1, 8, 10)
    assert torch.equal(target.weight, source.weight)
    session.run(lambda ctx: ctx.load_blobs(where, "model"))
    assert target.bias.item() == 2


def test_a_name_that_the_workspace_lacks_is_named(pretrained):
    """Loading makes no objects: the name must be there."""
    where, _ = pretrained
    with pytest.raises(Exception, match="no 'model'"):
        LocalSession().run(lambda ctx: ctx.load_blobs(where, "model"))
