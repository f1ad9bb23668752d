"""A tensor that the state of an object shares with others is one tensor again after a resume."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from keeps import Keeps
from torch import nn

from torchrelay import Job, JobRunner, max_epochs, open_checkpoint


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
    elif kind == "a learning tensor of two objects":
        one["it"] = other["it"] = torch.ones(4, requires_grad=True)
    elif kind == "one parameter of two objects":
        one["it"] = other["it"] = nn.Parameter(torch.ones(4))
    elif kind == "two objects":
        one["it"] = other["it"] = torch.ones(4)
    elif kind == "a parameter of two objects":
        other["it"] = nn.Parameter(torch.ones(4))
        one["it"] = other["it"].detach()
    elif kind == "two views in one state":
        whole = torch.ones(4)
        one["it"], one["too"] = whole, whole.detach()


KINDS = (
    "a parameter", "a buffer", "a tensor of a container", "what a container gained",
    "a learning view of a tensor that does not", "two objects", "a learning tensor of two objects",
    "one parameter of two objects",
)  # fmt: skip
VIEWS = (
    "a detached parameter", "data of a parameter", "a detached parameter that does not learn",
    "a learning tensor of a container and its view", "a parameter of two objects", "two views in one state",
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
        blobs["one"].kept.get("it") is blobs["other"].kept.get("it"),
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


@pytest.mark.parametrize("kind", VIEWS)
def test_a_view_that_the_state_shows_comes_back_by_itself(tmp_path, kind):
    """It may be a picture of the moment, as those of a module's state: it has its bits and learns so."""
    saved = train(tmp_path / "run", 1, kind)["one"].kept
    loaded = train(tmp_path / "run", 1, kind)["one"].kept
    before, after = tensors(saved), tensors(loaded)
    assert [(one.tolist(), one.requires_grad) for one in before] == [
        (one.tolist(), one.requires_grad) for one in after
    ]
    alone = Keeps()
    open_checkpoint(tmp_path / "run").load({"one": alone})
    assert [(type(one), one.requires_grad) for one in tensors(alone.kept)] == [
        (type(one), one.requires_grad) for one in after
    ]


def test_a_container_gets_a_view_of_a_parameter_as_one(tmp_path):
    """Loads outside of runs make no parameter of what a container held detached."""
    model, held = nn.Linear(2, 2), dict[str, Any]()
    job = Job("view", blobs={"model": model, "held": held})

    @job.epoch
    def epoch(ctx: Any) -> None:
        held["bias"] = model.bias.detach()

    job.stop_when(max_epochs(1))
    JobRunner(job, tmp_path / "run", best=None, code=False).train()
    loaded: dict[str, Any] = {}
    for objects in ({"held": loaded}, {"held": loaded, "model": nn.Linear(2, 2)}):
        open_checkpoint(tmp_path / "run").load(objects)
        assert type(loaded["bias"]) is torch.Tensor and not loaded["bias"].requires_grad


def test_also_where_the_save_leaves_the_model_out(tmp_path):
    """An object's own state is whole without what it shares tensors with."""
    whole = train(tmp_path / "whole", 1, "a parameter", exclude=["model"])
    stored = open_checkpoint(tmp_path / "whole").load_tensors("*")
    assert torch.equal(stored["one.it"], whole["one"].kept["it"])


def test_an_object_alone_gets_its_tensors(tmp_path):
    """A load of the object alone reads what another blob stands for, into memory of its own."""
    whole = train(tmp_path / "run", 1, "a parameter")
    alone, model = Keeps(), build()["model"]
    before = model[0].weight.clone()
    checkpoint = open_checkpoint(tmp_path / "run")
    checkpoint.load({"one": alone})
    assert torch.equal(alone.kept["it"], whole["model"][0].weight)
    checkpoint.load({"one": alone, "model": model})
    assert alone.kept["it"] is model[0].weight and not torch.equal(model[0].weight, before)


def test_it_is_stored_once(tmp_path):
    """What the state of an object shares takes no second copy; a picture of it does."""
    train(tmp_path / "run", 1, "a parameter")
    leaves = open_checkpoint(tmp_path / "run").manifest.leaves
    aliases = {leaf.name: leaf.alias_of for leaf in leaves if leaf.alias_of}
    assert aliases == {"one.it": "model.0.weight"}


class Swaps:
    """An average that its load puts into the model, to take it from there, before it loads the model."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.average = model, copy.deepcopy(model.state_dict())

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average, "model": self.model.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["average"])
        self.average = copy.deepcopy(self.model.state_dict())
        self.model.load_state_dict(state["model"])


class Resets:
    """Begins its load with a reset of what it shares."""

    def __init__(self, shared: torch.Tensor) -> None:
        self.mean = shared

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean.zero_()
        self.mean.copy_(state["mean"])


class Anchors:
    """Pulls towards the weights of the last epoch's end, which its state gives as what they are then."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.anchor: list[torch.Tensor] = []

    def state_dict(self) -> dict[str, Any]:
        return {"anchor": [one.detach() for one in self.model.parameters()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.anchor = state["anchor"]


class Counts:
    """Adds what it is given to what it has, holds a shared tensor, and has no state before its first step."""

    def __init__(self, shared: torch.Tensor) -> None:
        self.shared, self.loads, self.begun, self.items = shared, 0, True, list[int]()

    def state_dict(self) -> dict[str, Any]:
        assert self.begun
        return {"shared": self.shared, "items": list(self.items)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert not self.loads
        self.loads, self.begun = 1, False
        self.items += state["items"]
        self.shared = state["shared"]


class Flushes:
    """Writes what it has collected into a registered list when it is asked for its state."""

    def __init__(self, history: list[Any]) -> None:
        self.history, self.pending = history, list[Any]()

    def state_dict(self) -> dict[str, Any]:
        self.history += self.pending
        self.pending = []
        return {"pending": self.pending}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.pending = state["pending"]


def train_with(run: Path, epochs: int, first: bool) -> list[Any]:
    """A run with all of these objects; what came of it."""
    torch.manual_seed(0)
    model, history, x = nn.Linear(3, 4), list[Any](), torch.zeros(3)
    objects = {
        "swaps": Swaps(model), "resets": Resets(x), "anchors": Anchors(model), "flushes": Flushes(history),
        "counts": Counts(x),
    }  # fmt: skip
    rest: dict[str, Any] = {"model": model, "held": {"x": x}, "history": history}
    blobs = {**objects, **rest} if first else {**rest, **objects}
    job = Job("loads", blobs=blobs)

    @job.epoch
    def epoch(ctx: Any) -> None:
        for number, one in enumerate(model.parameters()):
            anchor = blobs["anchors"].anchor
            with torch.no_grad():
                one.add_(1 + (0.5 * anchor[number] if anchor else 0.0))
        blobs["anchors"].anchor = [one.detach().clone() for one in model.parameters()]
        for name, one in model.state_dict().items():
            blobs["swaps"].average[name].lerp_(one, 0.1)
        x.add_(1)
        blobs["flushes"].pending.append(ctx.epoch)
        blobs["counts"].items.append(ctx.epoch)
        blobs["counts"].begun = True

    job.stop_when(max_epochs(epochs))
    JobRunner(job, run, best=None, code=False).train()
    average = [one.tolist() for one in blobs["swaps"].average.values()]
    assert blobs["counts"].shared is x
    return [[one.tolist() for one in model.parameters()], average, x.tolist(), history, blobs["counts"].items]


@pytest.mark.parametrize("first", [False, True], ids=["registered last", "registered first"])
def test_a_load_that_writes_into_what_it_is_given_is_right_too(tmp_path, first):
    """An object that swaps, resets, refers to the weights of the moment, or writes when it is saved."""
    whole = train_with(tmp_path / "whole", 3, first)
    train_with(tmp_path / "cut", 1, first)
    assert train_with(tmp_path / "cut", 3, first) == whole


def test_a_parameter_that_a_task_froze_is_the_same_object_again(tmp_path):
    """It learns, or does not, as it was saved, and whoever lets it learn again lets it do so everywhere."""

    def run(where: Path, epochs: int) -> tuple[bool, bool]:
        model, keeps = nn.Linear(2, 2), Keeps()
        job = Job("frozen", blobs={"keeps": keeps, "model": model})

        @job.epoch
        def epoch(ctx: Any) -> None:
            if ctx.epoch == 1:
                keeps.kept["it"] = model.weight.requires_grad_(False)

        job.stop_when(max_epochs(epochs))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            JobRunner(job, where, best=None, code=False).train()
        return keeps.kept["it"] is model.weight, model.weight.requires_grad

    run(tmp_path / "run", 1)
    assert run(tmp_path / "run", 2) == (True, False)


@pytest.mark.parametrize("dtype", [torch.int2, torch.uint4, torch.bits8, torch.float8_e4m3fn, torch.bool])
def test_shared_tensors_of_any_type_are_resumed(tmp_path, dtype):
    """Integers of less than a byte too, which torch cannot copy."""
    held: dict[str, Any] = {}
    for epochs in (1, 2):
        keeps, held = Keeps(), {"x": torch.zeros(3, dtype=torch.uint8).view(dtype)}
        job = Job("types", blobs={"keeps": keeps, "held": held})

        @job.epoch
        def epoch(ctx: Any, keeps: Any = keeps, held: Any = held) -> None:
            if ctx.epoch == 1:
                keeps.kept["x"] = held["x"]

        job.stop_when(max_epochs(epochs))
        JobRunner(job, tmp_path / "run", best=None, code=False).train()
        assert keeps.kept["x"] is held["x"]


def test_what_a_load_converts_is_not_shared(tmp_path):
    """A load that gives the model another type leaves the object's own tensor as it was saved."""
    train(tmp_path / "run", 1, "a parameter")
    keeps, model = Keeps(), build()["model"].to(torch.bfloat16)
    open_checkpoint(tmp_path / "run").load({"one": keeps, "model": model}, dtype={"model.*": torch.bfloat16})
    assert keeps.kept["it"].dtype is torch.float32 and model[0].weight.dtype is torch.bfloat16


def test_state_of_an_optimizer_is_in_the_order_of_its_parameters(tmp_path):
    """A resume installs it so, whatever the parameters are called."""
    train(tmp_path / "run", 1, "two objects")
    blobs = train(tmp_path / "run", 2, "two objects")
    assert [id(one) for one in blobs["optimizer"].state] == [id(one) for one in blobs["model"].parameters()]


@pytest.mark.parametrize("last", [False, True])
def test_a_learning_rate_that_a_task_has_replaced_resumes(tmp_path, last):
    """A registered tensor that an optimizer no longer shares is resumed, in either order of the two."""

    def rates(run, epochs):
        model, rate = nn.Linear(2, 1), torch.tensor(0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, foreach=False)
        blobs = {"optimizer": optimizer, "rate": rate} if last else {"rate": rate, "optimizer": optimizer}
        job = Job("rates", blobs={"model": model, **blobs})

        @job.epoch
        def epoch(ctx: Any) -> None:
            group = optimizer.param_groups[0]
            group["lr"] = rate * 0.5 if ctx.epoch == 1 else group["lr"]
            rate.mul_(0.9)

        job.stop_when(max_epochs(epochs))
        JobRunner(job, run, best=None, code=False).train()
        return float(optimizer.param_groups[0]["lr"]), float(rate)

    rates(tmp_path / "cut", 2)
    assert rates(tmp_path / "cut", 4) == rates(tmp_path / "whole", 4)
