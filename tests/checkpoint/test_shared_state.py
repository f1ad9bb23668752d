"""A tensor that the state of an object shares with others is one tensor again after a resume."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchrelay import Job, JobRunner, max_epochs, open_checkpoint


class Keeps:
    """An object with whatever state it is given."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.kept)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = dict(state)


class Trainer:
    """Saves a model and its optimizer beside their own registration, as trainers of people do."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.best: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "sgd": self.optimizer.state_dict(), "best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["sgd"])
        self.best = state["best"]


def build(first: bool = False) -> dict[str, Any]:
    """`first`: the objects are registered before what they share."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    objects = {"one": Keeps(), "other": Keeps(), "trainer": Trainer(model, optimizer)}
    rest = {"model": model, "optimizer": optimizer, "held": {"x": torch.zeros(4)}}
    return {**objects, **rest} if first else {**rest, **objects}


def share(kind: str, blobs: dict[str, Any]) -> None:
    """What the first epoch gives the objects."""
    one, other, held, layer = blobs["one"].kept, blobs["other"].kept, blobs["held"], blobs["model"][0]
    if kind == "a parameter":
        one["it"] = layer.weight
    elif kind == "a detached parameter":
        one["it"] = layer.weight.detach()
    elif kind == "data of a parameter":
        one["it"] = [{"deep": layer.weight.data}]
    elif kind == "a buffer":
        one["it"] = blobs["model"][1].running_mean
    elif kind == "a tensor of a container":
        one["it"] = held["x"]
    elif kind == "what a container gained":
        one["it"] = held["new"] = torch.ones(4)
    elif kind == "a learning tensor of a container and its view":
        held["new"] = torch.ones(4, requires_grad=True)
        one["it"] = held["new"].detach()
    elif kind == "a learning view of a tensor that does not":
        held["also"] = one["it"] = held["x"].detach().requires_grad_()
    elif kind == "a detached parameter that does not learn":
        layer.bias.requires_grad_(False)
        one["it"] = layer.bias.detach()
    elif kind == "two objects":
        one["it"] = other["it"] = torch.ones(4)
    elif kind == "a parameter of two objects":
        other["it"] = nn.Parameter(torch.ones(4))
        one["it"] = other["it"].detach()
    elif kind == "two views in one state":
        whole = torch.ones(4)
        one["it"], one["too"] = whole, whole.detach()
    elif kind == "a best model that is still the model":
        blobs["trainer"].best = {"weight": layer.weight}
        one["it"] = layer.weight.detach()


KINDS = (
    "a parameter", "a detached parameter", "data of a parameter", "a buffer", "a tensor of a container",
    "what a container gained", "a learning view of a tensor that does not",
    "a detached parameter that does not learn", "a learning tensor of a container and its view",
    "two objects", "a parameter of two objects", "two views in one state",
    "a best model that is still the model",
)  # fmt: skip


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [one for item in items for one in tensors(item)]


def train(run: Path, epochs: int, kind: str, first: bool = False, **runner: Any) -> dict[str, Any]:
    blobs = build(first)
    job = Job("shared", blobs=blobs)
    data = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))

    @job.epoch
    def epoch(ctx: Any) -> None:
        loss = blobs["model"](data).square().mean()
        blobs["optimizer"].zero_grad()
        loss.backward()
        blobs["optimizer"].step()
        if ctx.epoch == 1:
            share(kind, blobs)
        else:
            with torch.no_grad():
                for one in tensors(blobs["one"].kept.get("it")):
                    one.mul_(0.5).add_(0.25)

    job.stop_when(max_epochs(epochs))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        JobRunner(job, run, best=None, code=False, **runner).train()
    return blobs


def state(blobs: dict[str, Any]) -> list[Any]:
    """Every bit, what learns, and which tensors lie in one memory."""
    parts = [blobs["one"].kept, blobs["other"].kept, blobs["trainer"].best, blobs["held"]]
    found = [one for part in parts for one in tensors(part)]
    found += list(blobs["model"].state_dict(keep_vars=True).values())
    places = [one.data_ptr() for one in found]
    moments = [blobs["optimizer"].state[one]["momentum_buffer"] for one in blobs["model"].parameters()]
    return [
        [(one.tolist(), one.requires_grad, type(one).__name__) for one in (*found, *moments)],
        [places.index(place) for place in places],
    ]


@pytest.mark.parametrize("first", [False, True], ids=["registered last", "registered first"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_shared_tensor_is_one_again(tmp_path, kind, first):
    """A run that was cut ends in the bits of an undisturbed one, with the same tensors in one memory."""
    whole = train(tmp_path / "whole", 3, kind, first)
    train(tmp_path / "cut", 1, kind, first)
    assert state(train(tmp_path / "cut", 3, kind, first)) == state(whole)
    shared = state(whole)[1]
    assert len(set(shared)) < len(shared)


def test_also_from_an_asynchronous_save(tmp_path):
    """A parameter is copied late, and the state that shows it has what was copied."""
    whole = train(tmp_path / "whole", 3, "a parameter")
    train(tmp_path / "cut", 1, "a parameter", asynchronous=True)
    assert state(train(tmp_path / "cut", 3, "a parameter", asynchronous=True)) == state(whole)


def test_also_where_the_save_leaves_the_model_out(tmp_path):
    """An object's own state is whole without what it shares tensors with."""
    whole = train(tmp_path / "whole", 1, "a detached parameter", exclude=["model"])
    stored = open_checkpoint(tmp_path / "whole").load_tensors("*")
    assert torch.equal(stored["one.it"], whole["one"].kept["it"])
    assert torch.equal(stored["trainer.model.0.weight"], whole["model"][0].weight)


def test_an_object_alone_gets_its_tensors(tmp_path):
    """A load of the object alone reads what another blob stands for, into memory of its own."""
    whole = train(tmp_path / "run", 1, "a parameter")
    alone, model = Keeps(), build()["model"]
    before = model[0].weight.clone()
    checkpoint = open_checkpoint(tmp_path / "run")
    checkpoint.load({"one": alone})
    assert torch.equal(alone.kept["it"], whole["model"][0].weight)
    both: Callable[[], Any] = lambda: checkpoint.load({"one": alone, "model": model})  # noqa: E731
    both()
    assert alone.kept["it"] is model[0].weight and not torch.equal(model[0].weight, before)


def test_it_is_stored_once(tmp_path):
    """What a trainer saves beside the registered model takes no second copy."""
    train(tmp_path / "run", 1, "a parameter")
    leaves = open_checkpoint(tmp_path / "run").manifest.leaves
    aliases = {leaf.name: leaf.alias_of for leaf in leaves if leaf.alias_of}
    assert aliases["one.it"] == aliases["trainer.model.0.weight"] == "model.0.weight"


def test_state_of_an_optimizer_keeps_the_order_of_its_parameters(tmp_path):
    """A program that adds up what lies in `optimizer.state` rounds as before."""
    train(tmp_path / "run", 1, "two objects")
    blobs = train(tmp_path / "run", 2, "two objects")
    assert [id(one) for one in blobs["optimizer"].state] == [id(one) for one in blobs["model"].parameters()]
