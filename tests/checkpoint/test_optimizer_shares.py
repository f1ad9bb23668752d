"""A tensor that an optimizer shares with other blobs is one tensor again after a resume."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from keeps import Keeps
from torch import nn

from torchrelay import Job, JobRunner, max_epochs, open_checkpoint
from torchrelay.checkpoint.format.manifest import codec
from torchrelay.checkpoint.save.assignments import NodeClass
from torchrelay.checkpoint.save.plan import plan_classes, shared_unlike
from torchrelay.checkpoint.state.flatten import leaves_of
from torchrelay.checkpoint.state.leaf import Leaf, Role, shared_across_files, spec_of
from torchrelay.errors import DamagedError

GOLDEN = Path(__file__).parent.parent / "golden"


class Leads(torch.optim.SGD):
    """An optimizer that writes what its groups and its state hold, whoever else holds it."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for entries in (*self.param_groups, *self.state.values()):
            for one in (entries.get("lr"), *entries.get("rates", ()), entries.get("kept")):
                if isinstance(one, torch.Tensor):
                    with torch.no_grad():
                        one.mul_(0.9)


def build(first: bool) -> dict[str, Any]:
    """`first`: what shares with the optimizers is registered before them."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    lr = torch.tensor(0.1)
    rates = (torch.tensor(0.5), torch.tensor(0.25))
    groups = [{"params": [model.weight], "rates": rates}, {"params": [model.bias], "rates": rates}]
    optimizers = {
        "optimizer": Leads(groups, lr=lr, momentum=0.9, foreach=False),
        "second": Leads([torch.nn.Parameter(torch.ones(2))], lr=torch.tensor(0.3), foreach=False),
    }
    held = {"lr": lr, "own": torch.tensor(7.0), "like": torch.zeros(2, 3), "list": [None]}
    rest = {"tensor": torch.tensor(0.2), "held": held, "object": Keeps()}
    return {"model": model, **(rest if first else optimizers), **(optimizers if first else rest)}


Place = tuple[Any, Any]
"""What holds a tensor, and under which key."""


def moment(blobs: dict[str, Any]) -> Place:
    return blobs["optimizer"].state[blobs["model"].weight], "momentum_buffer"


def rate(blobs: dict[str, Any]) -> Place:
    return blobs["optimizer"].param_groups[0], "lr"


def second(blobs: dict[str, Any]) -> Any:
    return blobs["second"].state[blobs["second"].param_groups[0]["params"][0]]


KINDS: dict[str, Callable[[dict[str, Any]], tuple[Place, Place]]] = {
    "a rate in a dict from the start": lambda b: ((b["held"], "lr"), rate(b)),
    "a rate in a dict since": lambda b: ((b["held"], "own"), rate(b)),
    "a rate that was a dict's": lambda b: (rate(b), (b["held"], "own")),
    "a registered rate": lambda b: (rate(b), (b, "tensor")),
    "a moment in a dict": lambda b: ((b["held"], "gained"), moment(b)),
    "a moment in a list": lambda b: ((b["held"]["list"], 0), moment(b)),
    "a moment in the place of another tensor": lambda b: ((b["held"], "like"), moment(b)),
    "a rate in an object": lambda b: ((b["object"].kept, "it"), rate(b)),
    "a moment in an object": lambda b: ((b["object"].kept, "it"), moment(b)),
    "a rate of a dict in an object": lambda b: ((b["object"].kept, "it"), (b["held"], "lr")),
    "one of several rates": lambda b: ((b["object"].kept, "it"), (rate(b)[0]["rates"], 1)),
    "one of several rates in a dict": lambda b: ((b["held"], "gained"), (rate(b)[0]["rates"], 1)),
    "a parameter in the state": lambda b: ((moment(b)[0], "kept"), (b["model"]._parameters, "bias")),
    "a rate of two optimizers": lambda b: ((b["second"].param_groups[0], "lr"), rate(b)),
    "a moment of two optimizers": lambda b: ((second(b), "kept"), moment(b)),
}
"""The first epoch puts at one place what is at the other."""


def train(run: Path, epochs: int, kind: str, first: bool = False, **runner: Any) -> dict[str, Any]:
    blobs = build(first)
    job = Job("shared", blobs=blobs)
    data = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))

    @job.epoch
    def epoch(ctx: Any) -> None:
        loss = blobs["model"](data).square().mean() + blobs["second"].param_groups[0]["params"][0].sum()
        for name in ("optimizer", "second"):
            blobs[name].zero_grad()
        loss.backward()
        for name in ("optimizer", "second"):
            blobs[name].step()
        if ctx.epoch == 1:
            (holder, key), (other, name) = KINDS[kind](blobs)
            holder[key] = other[name]

    job.stop_when(max_epochs(epochs))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        JobRunner(job, run, best=None, code=False, **runner).train()
    return blobs


def bits(blobs: dict[str, Any]) -> dict[str, list[Any]]:
    found = {one.name: one.content for one in leaves_of(blobs)}
    return {name: one.tolist() for name, one in found.items() if isinstance(one, torch.Tensor)}


def is_one(blobs: dict[str, Any], kind: str) -> bool:
    (holder, key), (other, name) = KINDS[kind](blobs)
    return holder[key].data_ptr() == other[name].data_ptr()


@pytest.mark.parametrize("first", (False, True), ids=("optimizers first", "optimizers last"))
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_one_tensor_again(tmp_path: Path, kind: str, first: bool) -> None:
    """A run that was cut ends in the bits of the whole one, and what was one tensor still is."""
    whole = train(tmp_path / "whole", 4, kind, first)
    assert is_one(whole, kind)
    train(tmp_path / "cut", 1, kind, first)
    train(tmp_path / "cut", 2, kind, first, asynchronous=True)
    resumed = train(tmp_path / "cut", 4, kind, first)
    assert is_one(resumed, kind)
    assert bits(resumed) == bits(whole)


@pytest.mark.parametrize("kind", ("a rate in a dict since", "a moment in a dict", "a moment in an object"))
def test_what_is_loaded_alone_is_whole(tmp_path: Path, kind: str) -> None:
    """Both blobs can be loaded without the other one, and a resume can leave out what shares."""
    whole = bits(train(tmp_path / "run", 2, kind))
    blobs = build(first=False)
    part = {"model": blobs["model"], "optimizer": blobs["optimizer"]}
    open_checkpoint(tmp_path / "run").load(part)
    assert bits(part) == {
        name: one for name, one in whole.items() if name.startswith(("model.", "optimizer."))
    }
    resumed = bits(train(tmp_path / "run", 2, kind, resume_exclude=["held", "object"]))
    assert {name for name, one in resumed.items() if whole.get(name) != one} <= {"held.lr", "held.own"}


def test_loads_of_other_types_keep_the_shared_one(tmp_path: Path) -> None:
    """Moments follow their parameter to another type, but for one that a dict holds too."""
    whole = train(tmp_path / "run", 2, "a moment in a dict")
    blobs = build(first=False)
    blobs["model"].bfloat16()
    part = {name: blobs[name] for name in ("model", "optimizer", "held")}
    open_checkpoint(tmp_path / "run").load(part, dtype=torch.bfloat16)
    assert blobs["held"]["gained"].tolist() == whole["held"]["gained"].tolist()
    assert is_one(blobs, "a moment in a dict")


def test_a_manifest_that_says_so_reads_as_it_was_written() -> None:
    """The frozen sample with the column `same_as` says it, and encodes to the same bytes."""
    data = (GOLDEN / "manifest_shared.json").read_bytes()
    made = codec.decode(data)
    assert {one.name: one.same_as for one in made.leaves if one.same_as} == {"optim.moment": "model.body"}
    assert codec.encode(made) == data


@pytest.mark.parametrize("wrong", ([[0, 1]], [[0]], [["0", "x"]], [[10**6, "x"]], [[0, "x"], [0, "y"]]))
def test_a_column_of_another_form_is_damage(wrong: Any) -> None:
    """Rows are rows of the manifest, once each, and names are text."""
    manifest = json.loads((GOLDEN / "manifest_shared.json").read_bytes())
    manifest["leaves"]["same_as"] = wrong
    with pytest.raises(DamagedError, match="same_as"):
        codec.decode(json.dumps(manifest).encode())


def test_what_names_nothing_that_fits_is_a_tensor_of_its_own() -> None:
    """A name that the epoch lacks, a leaf of another shape, and one that is not loaded tie nothing."""
    spec = spec_of(Leaf("a", "a", Role.OPTIMIZER, "optim", torch.zeros(2), same_as="b"))
    other = spec_of(Leaf("b", "b", Role.TENSOR, "main", torch.zeros(3)))
    for specs in ({"a": spec}, {"a": spec, "b": other}):
        assert shared_across_files(specs) == specs
    fits = {"a": spec, "b": replace(other, shape=(2,))}
    assert shared_across_files(fits)["a"].alias_of == "b"


@pytest.mark.parametrize("holder", ("a dict", "an optimizer", "an optimizer that comes first", "defaults"))
def test_the_tensor_that_the_program_holds_stays_the_one(tmp_path: Path, holder: str) -> None:
    """A rate that the program changes by its own name, and that others got, is changed everywhere."""

    def run(folder: str, epochs: int) -> list[float]:
        torch.manual_seed(0)
        weight, lr = nn.Parameter(torch.ones(2)), torch.tensor(0.1)
        optimizer = torch.optim.SGD([weight], lr=lr, foreach=False)
        other = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=torch.tensor(0.3), foreach=False)
        held: dict[str, Any] = {"like": torch.tensor(5.0)}
        blobs = {"weight": weight, "optimizer": optimizer, "held": held}
        job = Job(
            "holds", blobs={"other": other, **blobs} if "first" in holder else {**blobs, "other": other}
        )

        @job.epoch
        def epoch(ctx: Any) -> None:
            weight.grad = torch.ones(2)
            optimizer.step()
            if ctx.epoch == 1 and holder == "a dict":
                held["like"] = lr
            elif ctx.epoch == 1 and holder == "defaults":
                held["like"] = optimizer.defaults["lr"]
            elif ctx.epoch == 1:
                other.param_groups[0]["lr"] = lr
            lr.mul_(0.5)

        job.stop_when(max_epochs(epochs))
        JobRunner(job, tmp_path / folder, best=None, code=False).train()
        ends = [optimizer.param_groups[0]["lr"], other.param_groups[0]["lr"], held["like"], lr]
        return [*weight.tolist(), *map(float, ends)]

    whole = run("whole", 3)
    run("cut", 1)
    assert run("cut", 3) == whole


@pytest.mark.parametrize("twin", ("expanded", "of inference", "a view of the model"))
def test_a_dict_that_cannot_be_filled_is_given_a_new_tensor(tmp_path: Path, twin: str) -> None:
    """What lay in the dict at the start has no memory that a momentum could be read into."""

    def run(folder: str, epochs: int) -> tuple[bool, list[Any]]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
        with torch.inference_mode():
            flat = torch.zeros(2, 3)
        twins = {"expanded": torch.zeros(1).expand(2, 3), "of inference": flat}
        held = {"moment": twins.get(twin, model.weight.detach())}
        job = Job("twins", blobs={"model": model, "optimizer": optimizer, "held": held})

        @job.epoch
        def epoch(ctx: Any) -> None:
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            moment = optimizer.state[model.weight]["momentum_buffer"]
            if ctx.epoch == 1:
                held["moment"] = moment
            held["moment"].mul_(0.5)

        job.stop_when(max_epochs(epochs))
        JobRunner(job, tmp_path / folder, best=None, code=False).train()
        moment = optimizer.state[model.weight]["momentum_buffer"]
        return held["moment"].data_ptr() == moment.data_ptr(), [model.weight.tolist(), moment.tolist()]

    whole = run("whole", 3)
    run("cut", 1)
    assert run("cut", 3) == whole and whole[0]


def test_a_load_of_all_keeps_a_registered_tensor(tmp_path: Path) -> None:
    """A rate that is registered, that a dict holds and that an optimizer steps by is one after a load."""

    def build_all() -> dict[str, Any]:
        lr = torch.tensor(0.1)
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=lr)
        return {"lr": lr, "optimizer": optimizer, "held": {"x": [lr]}}

    job = Job("all", blobs=build_all())
    job.epoch(lambda: None)
    job.stop_when(max_epochs(1))
    JobRunner(job, tmp_path / "run", best=None, code=False).train()
    blobs = build_all()
    open_checkpoint(tmp_path / "run").load(blobs)
    assert blobs["optimizer"].param_groups[0]["lr"] is blobs["lr"] is blobs["held"]["x"][0]


def test_a_parameter_of_a_later_optimizer_is_shared_too(tmp_path: Path) -> None:
    """State of the first optimizer may be a parameter that only the second one holds."""

    def run(folder: str, epochs: int) -> tuple[bool, list[Any]]:
        torch.manual_seed(0)
        model, alone = nn.Linear(3, 2), nn.Parameter(torch.ones(2))
        one = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
        two = torch.optim.SGD([alone], lr=0.1, foreach=False)
        job = Job("later", blobs={"model": model, "one": one, "two": two})

        @job.epoch
        def epoch(ctx: Any) -> None:
            (model(torch.ones(1, 3)).sum() + alone.square().sum()).backward()
            one.step()
            if ctx.epoch == 1:
                one.state[model.weight]["kept"] = alone
            with torch.no_grad():
                one.state[model.weight]["kept"].mul_(0.5)
            two.step()

        job.stop_when(max_epochs(epochs))
        JobRunner(job, tmp_path / folder, best=None, code=False).train()
        kept = one.state[model.weight]["kept"]
        return kept.data_ptr() == alone.data_ptr(), [model.weight.tolist(), alone.tolist(), kept.tolist()]

    whole = run("whole", 3)
    run("cut", 1)
    assert run("cut", 3) == whole and whole[0]


def test_renamed_containers_keep_what_others_share(tmp_path: Path) -> None:
    """`rename=` gives a dict another name, and the load still finds what an object and an optimizer share."""
    whole = train(tmp_path / "run", 2, "a rate of a dict in an object")
    blobs = build(first=False)
    renamed = {"held2": blobs["held"], **{name: one for name, one in blobs.items() if name != "held"}}
    open_checkpoint(tmp_path / "run").load(renamed, rename={"held": "held2"})
    assert bits(blobs) == bits(whole)


def test_a_plan_keeps_what_all_nodes_with_both_leaves_say() -> None:
    """A node without the other leaf says nothing; one that keeps both apart unties all."""
    leaf = spec_of(Leaf("o", "o", Role.OPTIMIZER, "optim", torch.zeros(2)))
    other = spec_of(Leaf("a", "a", Role.TENSOR, "main", torch.zeros(2)))
    third = replace(other, name="b", blob="b")
    shares, shares_third = replace(leaf, same_as="a"), replace(leaf, same_as="b")
    for one, two, kept in (
        ((shares, other), (shares, other), "a"),
        ((shares, other), (leaf,), "a"),
        ((leaf,), (shares, other), "a"),
        ((shares, other), (leaf, other), None),
        ((shares, other), (shares_third, third), None),
    ):
        classes = [NodeClass((0,), one), NodeClass((1,), two)]
        assert [row.leaf.same_as for row in plan_classes(classes).rows if row.leaf.name == "o"] == [kept]
        assert ("o" in shared_unlike(classes)) is (kept is None)
