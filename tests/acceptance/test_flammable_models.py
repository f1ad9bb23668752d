"""Programs that are not one network with one optimizer: k-means, a pair of networks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from program_cases import Script

import torchrelay

MEANS = """\
import torch
import torchrelay


class Centres(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("centres", torch.tensor([[0.0], [1.0]]))

    def forward(self, x):
        return (x - self.centres.T).abs().argmin(1)


class Means(torchrelay.Program):
    max_epochs = 3
    runs_dir = "../runs"

    def make_data(self):
        x = torch.tensor([[0.0], [2.0], [10.0], [12.0]])
        return {"train": (x, x), "test": (x, x)}

    def make_model(self):
        return Centres()

    def make_optimizer(self):
        return None

    def iteration(self, batch):
        x, _ = self.prepare(batch)
        nearest = self.model(x)
        for at in nearest.unique():
            self.model.centres[at] = x[nearest == at].mean(0)
        return {"distance": (x - self.model.centres[nearest]).abs().mean()}

    def single_test(self, batch):
        return {"distance": (batch[0] - self.model.centres[self.model(batch[0])]).abs().mean()}


torchrelay.main(Means)
"""
PAIR = """\
import torch
import torchrelay


class Pair(torchrelay.Program):
    max_epochs = 2
    runs_dir = "../runs"

    def make_data(self):
        x = torch.linspace(-1, 1, 16)[:, None]
        return {"train": (x, x)}

    def make_model(self):
        return torch.nn.ModuleDict({"maker": torch.nn.Linear(1, 1), "judge": torch.nn.Linear(1, 1)})

    def make_optimizer(self):
        self.judging = torch.optim.Adam(self.model["judge"].parameters(), lr=0.1)
        return torch.optim.Adam(self.model["maker"].parameters(), lr=0.1)

    def more_state(self):
        self.optimizer
        return {"judging": self.judging}

    def iteration(self, batch):
        found = {}
        for name, optimizer, sign in (("judge", self.judging, -1), ("maker", self.optimizer, 1)):
            made = self.model["judge"](self.model["maker"](batch[0])).mean()
            found[name] = sign * (made - self.model["judge"](batch[0]).mean())
            optimizer.zero_grad()
            found[name].backward()
            optimizer.step()
        return found


torchrelay.main(Pair)
"""


def test_a_model_without_an_optimizer_is_trained_and_tested(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """K-means moves its centres in `iteration`; its own measure is what `test` stores of it."""
    line = Script(tmp_path, capsys, MEANS)
    assert line("train").rc == 0
    centres = torchrelay.open_checkpoint(line.run).load_tensors("model.centres")["model.centres"]
    assert sorted(centres.flatten().tolist()) == [1, 11]
    assert line("test").rc == 0
    (row,) = torchrelay.metric_rows(line.run, "test")
    assert (row["epoch"], row["distance"]) == (3, 1.0)


def test_two_optimizers_go_on_where_they_were(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A program of two networks, each with an optimizer, that was cut ends in the bits of the whole one."""
    (tmp_path / "whole").mkdir()
    (tmp_path / "cut").mkdir()
    whole, cut = (Script(tmp_path / name, capsys, PAIR) for name in ("whole", "cut"))
    assert whole("train").rc == 0
    assert cut("train", "--max-epochs", "1").rc == 0
    assert cut("train").rc == 0
    first, second = (torchrelay.open_checkpoint(one.run).load_tensors("*") for one in (whole, cut))
    names = [name for name in first if not name.startswith("rng")]
    assert {name.split(".")[0] for name in names} >= {"model", "optimizer", "judging"}
    assert all(torch.equal(first[name], second[name]) for name in names)
