"""ctx.load_blobs: blobs of another run, loaded into what the workspace has under their names."""

from __future__ import annotations

import pytest
import torch

from torchrelay import save_blobs
from torchrelay.jobs.job import Job
from torchrelay.jobs.stop import max_epochs
from torchrelay.runners.session.local import LocalSession
from torchrelay.runners.training.job_runner import JobRunner


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


class Averages:
    """An object with state that holds a tensor."""

    def __init__(self, value: float) -> None:
        self.mean, self.count = torch.full((2,), value), int(value)

    def state_dict(self):
        return {"mean": self.mean, "count": self.count}

    def load_state_dict(self, state):
        self.mean, self.count = state["mean"], state["count"]


@pytest.mark.parametrize("place", ["run", "file"])
def test_renames_reach_into_objects_with_state(tmp_path, place):
    """An object whose state holds tensors loads under another name, from an epoch and from a blob file."""
    if place == "file":
        save_blobs(tmp_path / place, {"old": Averages(3), "older": 1})
    else:
        job = Job(blobs={"old": Averages(3), "older": 1})
        job.epoch(lambda: None)
        job.stop_when(max_epochs(1))
        JobRunner(job, tmp_path / place).train(LocalSession())
    session, target = LocalSession(), Averages(0)
    session.workspace().update(new=target)
    session.run(lambda ctx: ctx.load_blobs(tmp_path / place, ["new", "older"], rename={"old": "new"}))
    assert (target.mean.tolist(), target.count, session.blob("older")) == ([3, 3], 3, 1)


def test_a_pattern_takes_what_can_be_loaded(pretrained):
    """`*` fills the objects that the workspace has and makes tensors and values; others are left out."""
    where, _ = pretrained
    session = LocalSession()
    session.run(lambda ctx: ctx.load_blobs(where))
    assert set(session.workspace()) == {"seen", "best"} and session.blob("best") == 20
