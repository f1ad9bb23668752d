"""Tensors with gradients outside of modules: in containers, made by `init`, and in groups that were added."""

from __future__ import annotations

import json
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchrelay import Job, JobRunner, max_epochs, open_checkpoint
from torchrelay.checkpoint.format.manifest import codec
from torchrelay.errors import DamagedError

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
Step = Callable[[Any, dict[str, Any]], object]


@pytest.fixture(autouse=True)
def without_warnings() -> Iterator[None]:
    """Of what was built otherwise than it is loaded."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def train(run: Path, epochs: int, build: Callable[[], dict[str, Any]], step: Step, init: Any = None) -> Any:
    """A program in one container, with a model and an optimizer of its parameters."""
    torch.manual_seed(0)
    held, model = build(), nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    blobs = {"held": held, "model": model, "optimizer": optimizer}
    seen: dict[str, Any] = {}
    job = Job("learning", blobs=blobs)
    if init is not None:
        job.init(init)

    @job.epoch
    def epoch(ctx: Any) -> None:
        step(ctx, blobs)
        seen.update({name: ctx[name] for name in ("made", "list") if name in ctx})

    job.stop_when(max_epochs(epochs))
    JobRunner(job, run, best=None).train()
    return {**blobs, **seen}


def content(value: Any) -> Any:
    """What is compared: bits, whether a tensor learns and its gradient, and in what classes."""
    if isinstance(value, torch.Tensor):
        grad = None if value.grad is None else value.grad.tolist()
        return type(value), value.requires_grad, value.detach().tolist(), grad
    if isinstance(value, dict):
        return {key: content(item) for key, item in value.items()}
    if isinstance(value, list):
        return list(map(content, value))
    return content(value.state_dict()) if hasattr(value, "state_dict") else value


def same_after_every_cut(tmp_path: Path, build: Callable[[], dict[str, Any]], step: Step, **how: Any) -> Any:
    """The same program, cut at the end of each epoch, ends as the one that was not."""
    whole = train(tmp_path / "whole", 4, build, step, **how)
    for cut in (1, 2, 3):
        train(tmp_path / f"cut{cut}", cut, build, step, **how)
        found = train(tmp_path / f"cut{cut}", 4, build, step, **how)
        assert content(found) == content(whole)
    return whole


def learn(tensor: torch.Tensor) -> None:
    """A step by hand; the gradient is added to the one before."""
    (tensor * tensor + tensor).sum().backward()
    with torch.no_grad():
        tensor -= 0.1 * tensor.grad


def test_tensors_that_a_container_gains_still_learn(tmp_path: Path) -> None:
    """A tensor with a gradient, a parameter and one that stopped to learn come back as they were."""

    def step(ctx: Any, blobs: dict[str, Any]) -> None:
        held = blobs["held"]
        if ctx.epoch == 1:
            held.update(late=torch.ones(3, requires_grad=True), more=[nn.Parameter(torch.ones(2))])
            held["frozen"] = nn.Parameter(torch.ones(2), requires_grad=False)
            held["centre"] = held["centre"].detach() + 1
        for one in (held["late"], held["more"][0], held["first"]):
            learn(one)

    def build() -> dict[str, Any]:
        return {name: torch.zeros(3, requires_grad=True) for name in ("first", "centre")}

    whole = same_after_every_cut(tmp_path, build, step)["held"]
    assert whole["late"].requires_grad and not whole["centre"].requires_grad


def test_tensors_that_init_made_still_learn(tmp_path: Path) -> None:
    """Alone or in a list, which no program registers; two places of one parameter stay one."""

    def init(ctx: Any) -> None:
        one = nn.Parameter(torch.ones(2))
        ctx["made"], ctx["list"] = torch.ones(3, requires_grad=True), [one, one, torch.ones(1)]

    def step(ctx: Any, blobs: dict[str, Any]) -> None:
        learn(ctx["made"])
        learn(ctx["list"][0])
        assert ctx["list"][0] is ctx["list"][1]

    same_after_every_cut(tmp_path, dict, step, init=init)


def test_what_was_detached_from_a_parameter_is_so_again(tmp_path: Path) -> None:
    """`model.state_dict()` in a container shares memory with the parameters, and takes no gradient."""

    def step(ctx: Any, blobs: dict[str, Any]) -> None:
        blobs["held"]["state"] = blobs["held"].get("state") or dict(blobs["model"].state_dict())
        blobs["held"]["state"]["weight"] *= 0.5
        assert blobs["held"]["state"]["weight"].data_ptr() == blobs["model"].weight.data_ptr()

    same_after_every_cut(tmp_path, dict, step)


@pytest.mark.parametrize("make", [nn.Parameter, torch.Tensor.requires_grad_], ids=["parameter", "tensor"])
def test_groups_of_parameters_that_a_container_gained_come_back(
    tmp_path: Path, make: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """A latent per epoch, each in a group of its own with moments: the same bits, and the same object."""

    def step(ctx: Any, blobs: dict[str, Any]) -> None:
        latents, optimizer = blobs["held"]["latents"], blobs["optimizer"]
        latents.append(make(torch.zeros(3)))
        optimizer.add_param_group({"params": [latents[-1]], "lr": 0.1 * ctx.epoch})
        for latent, group in zip(latents, optimizer.param_groups[1:], strict=True):
            assert group["params"][0] is latent
        optimizer.zero_grad()
        blobs["model"](torch.ones(2, 3) + sum(latents)).square().sum().backward()
        optimizer.step()

    same_after_every_cut(tmp_path, lambda: {"latents": []}, step)


def test_a_parameter_that_moves_into_and_inside_of_a_container_is_one(tmp_path: Path) -> None:
    """One that only the optimizer held, and one that gets another key: the optimizer keeps that object."""

    def step(ctx: Any, blobs: dict[str, Any]) -> None:
        held, optimizer = blobs["held"], blobs["optimizer"]
        alone, named = optimizer.param_groups[0]["params"]
        if ctx.epoch == 2:
            held["alone"], held["other"] = alone, held.pop("named")
        assert ctx.epoch < 2 or (held["alone"] is alone and held["other"] is named)
        optimizer.zero_grad()
        (alone.sum() * named - 1).square().sum().backward()
        optimizer.step()

    def run(folder: str, epochs: int) -> Any:
        held = {"named": nn.Parameter(torch.ones(2))}
        blobs = {"held": held, "optimizer": torch.optim.Adam([nn.Parameter(torch.ones(2)), held["named"]])}
        job = Job("moving", blobs=blobs)
        job.epoch(lambda ctx: step(ctx, blobs))
        job.stop_when(max_epochs(epochs))
        JobRunner(job, tmp_path / folder, best=None).train()
        return content(held), content(blobs["optimizer"].param_groups[0]["params"])

    whole = run("whole", 4)
    for cut in (1, 2, 3):
        run(f"cut{cut}", cut)
        assert run(f"cut{cut}", 4) == whole


@pytest.mark.parametrize("cut", range(1, 6))
def test_a_window_over_a_container_resumes_to_equal_bits(tmp_path: Path, cut: int) -> None:
    """Parameters in a dict, changed by hand after every third batch, cut at any step."""

    def run(folder: str, at: int = 0) -> Any:
        weights = {"w": torch.zeros(2, requires_grad=True), "seen": 0}
        job = Job("window", blobs={"weights": weights})

        @job.epoch
        def epoch(ctx: Any) -> None:
            for batch in ctx.steps([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]):
                (weights["w"] * batch + batch).square().sum().backward()
                weights["seen"] += 1
                if weights["seen"] % 3 == 0:
                    with torch.no_grad():
                        weights["w"] -= 0.001 * weights["w"].grad
                    weights["w"].grad = None
                if weights["seen"] == at:
                    os.kill(os.getpid(), signal.SIGTERM)

        job.stop_when(max_epochs(2))
        result = JobRunner(job, tmp_path / folder, best=None).train()
        return result.status, content(weights)

    whole = run("whole")
    assert run("cut", at=cut)[0] == "PREEMPTED"
    assert run("cut") == whole


@pytest.mark.parametrize("names", [("p", "view"), ("view", "p")])
@pytest.mark.parametrize(
    "before", [{}, {"p": torch.ones(3), "view": torch.ones(3)}], ids=["gained", "rebound"]
)
def test_a_parameter_and_what_was_detached_of_it_stay_two(
    names: tuple[str, str], before: dict[str, Any], tmp_path: Path
) -> None:
    """They share memory; one learns after a resume and the other does not, whatever their names."""
    learns, shadow = names

    def step(ctx: Any, blobs: dict[str, Any]) -> None:
        held = blobs["held"]
        if not isinstance(held.get("ready"), int):
            held[learns] = nn.Parameter(torch.arange(3.0))
            held[shadow] = held[learns].detach()
            held["ready"] = 1
        held[learns].square().sum().backward()
        with torch.no_grad():
            held[learns] -= 0.1 * held[learns].grad
        held[learns].grad = None

    def run(folder: str, epochs: int) -> Any:
        build = lambda: {name: one.clone() for name, one in before.items()}  # noqa: E731
        held = train(tmp_path / folder, epochs, build, step)["held"]
        return [(held[name].requires_grad, held[name].tolist()) for name in names]

    whole = run("whole", 3)
    run("cut", 1)
    assert run("cut", 3) == whole


@pytest.mark.parametrize("learns", [True, False], ids=["learns", "frozen"])
def test_an_object_gets_the_parameters_that_its_state_had(learns: bool, tmp_path: Path) -> None:
    """`load_state_dict` may assign them to a module, which takes no plain tensor there."""

    class Around:
        def __init__(self) -> None:
            self.inner = nn.Linear(1, 2, bias=False)
            self.inner.weight.requires_grad_(learns)

        def state_dict(self) -> dict[str, Any]:
            return {"weight": self.inner.weight, "pair": [self.inner.weight, (self.inner.weight.detach(),)]}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            assert state["pair"][0] is state["weight"] and type(state["pair"][1][0]) is torch.Tensor
            self.inner.weight = state["weight"]

    def run(folder: str, epochs: int) -> Any:
        torch.manual_seed(0)
        around = Around()
        job = Job("objects", blobs={"around": around})

        @job.epoch
        def epoch(ctx: Any) -> None:
            around.inner.weight.data.mul_(torch.rand(2, 1))

        job.stop_when(max_epochs(epochs))
        JobRunner(job, tmp_path / folder).train()
        return around.inner.weight.tolist(), around.inner.weight.requires_grad

    whole = run("whole", 3)
    run("cut", 1)
    assert run("cut", 3) == whole
    assert whole[1] is learns
    loaded = open_checkpoint(tmp_path / "cut").manifest
    assert '"$":"parameter"' in json.dumps(loaded.values[loaded.rows["around"][0]], separators=(",", ":"))


def test_the_manifest_says_which_tensors_learn(tmp_path: Path) -> None:
    """A column of rows; where a writer did not say it nothing is known; odd rows are damage."""
    train(
        tmp_path / "run",
        1,
        lambda: {"a": torch.ones(1, requires_grad=True), "b": torch.ones(1)},
        lambda ctx, blobs: None,
    )
    manifest = open_checkpoint(tmp_path / "run").manifest
    frozen = {leaf.name: leaf.frozen for leaf in manifest.leaves if leaf.role == "tensor"}
    assert frozen == {"held.a": False, "held.b": True}
    data = codec.encode(manifest)
    assert codec.decode(data) == manifest
    raw = json.loads(data)
    raw["leaves"]["learning"] = [99]
    with pytest.raises(DamagedError):
        codec.decode(json.dumps(raw).encode())
    del raw["leaves"]["learning"]
    silent = codec.decode(json.dumps(raw).encode())
    assert {leaf.frozen for leaf in silent.leaves if leaf.role == "tensor"} == {None}


def test_the_frozen_sample_is_read_and_written_alike() -> None:
    """The manifest of a frozen sample says of each tensor whether it had a gradient."""
    data = (GOLDEN / "manifest_learning.json").read_bytes()
    manifest = codec.decode(data)
    found = {leaf.name: leaf.frozen for leaf in manifest.leaves if leaf.role == "tensor"}
    assert found["model.mean"] is False and list(found.values()).count(False) == 1
    assert {leaf.name for leaf in manifest.leaves if leaf.frozen and leaf.role == "parameter"} == {
        "model.body",
        "model.tied",
    }
    assert codec.encode(manifest) == data
