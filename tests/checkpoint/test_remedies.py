"""Refusals of loads name the argument that would let them pass: followed to the letter, it does."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchrelay import (
    InitFrom,
    Job,
    JobRunner,
    load_into,
    max_epochs,
    open_checkpoint,
    save_blobs,
    seed,
)
from torchrelay.checkpoint.load.checkpoint import Checkpoint
from torchrelay.errors import BlobError, SaveFailedError, UsageError
from torchrelay.runners.session.local import LocalSession


class Net(nn.Module):
    """Named parts, all numbers `fill`."""

    def __init__(self, fill: float, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(fill)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.children():
            x = part(x)
        return x


def usual(fill: float, **changed: nn.Module) -> Net:
    return Net(fill, **{"body": nn.Linear(4, 4), "tail": nn.Linear(4, 4), "head": nn.Linear(4, 2), **changed})


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


CHANGES: dict[str, Callable[[], Net]] = {
    "of another shape": lambda: usual(9.0, head=nn.Linear(4, 3)),
    "new": lambda: usual(9.0, more=nn.Linear(2, 2)),
    "gone": lambda: Net(9.0, body=nn.Linear(4, 4), tail=nn.Linear(4, 4)),
    "many": lambda: usual(9.0, more=nn.Sequential(block(), block())),
    "of another type": lambda: usual(9.0, head=nn.Linear(4, 2, dtype=torch.float64)),
    "renamed": lambda: Net(9.0, trunk=nn.Linear(4, 4), tail=nn.Linear(4, 4), head=nn.Linear(4, 2)),
}


def train(where: Path, model: nn.Module, epochs: int, optimizer: Any = None, **options: Any) -> None:
    """A run whose epochs change nothing but what an optimizer does."""
    seed(0)
    blobs = {"model": model} if optimizer is None else {"model": model, "optimizer": optimizer}
    job = Job("remedies", blobs=blobs)

    @job.epoch
    def epoch(ctx: Any) -> None:
        if optimizer is not None:
            optimizer.zero_grad()
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()

    job.stop_when(max_epochs(epochs))
    JobRunner(job, where, best=None, **options).train()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, and a file of blobs, of the usual model, filled with 1."""
    place = tmp_path_factory.mktemp("source")
    train(place / "run", usual(1.0), 1)
    save_blobs(place / "file.safetensors", {"model": usual(1.0)})
    return place


def named(text: str) -> dict[str, Any]:
    """The argument that ends a message, as it stands there."""
    (name, value), *others = re.findall(r"(\w+)=(\[.*?\]|\{.*?\}|torch\.\w+)(?:$|;)", text)
    assert not others, f"one remedy: {text}"
    kind = value.removeprefix("torch.")
    return {name: getattr(torch, kind) if kind != value else ast.literal_eval(value)}


def loaded(model: Net) -> bool:
    """Whether what both sides have has come."""
    first = next(model.children())
    return bool(first.weight.eq(1).all())  # type: ignore[operator, union-attr]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("door", ["load", "load_into", "load_blobs", "resume"])
def test_the_argument_of_a_refusal_lets_it_pass(source: Path, tmp_path: Path, change: str, door: str) -> None:
    """Loads, loads of files and resumes: whatever differs, one argument is named, and does what is said."""
    model = CHANGES[change]()
    run = tmp_path / "run"
    if door == "resume":
        train(run, usual(1.0), 1)

    def load(**argument: Any) -> None:
        if door == "load":
            open_checkpoint(source / "run").load({"model": model}, **argument)
        elif door == "load_into":
            load_into(source / "file.safetensors", {"model": model}, **argument)
        elif door == "load_blobs":
            session = LocalSession()
            session.run(lambda ws: ws.update(model=model))
            session.run(lambda ctx: ctx.load_blobs(source / "run", "model", **argument))
        else:
            train(run, model, 2, **argument)

    with pytest.raises(BlobError) as caught:
        load()
    assert not loaded(model), "nothing was changed"
    argument = named(str(caught.value))
    wanted = "resume_exclude" if door == "resume" else "exclude"
    wanted = {"renamed": "rename", "of another type": "dtype"}.get(change, wanted)
    if (change, door) == ("of another type", "resume"):
        wanted = "resume_exclude"
    assert list(argument) == [wanted]
    load(**argument)
    assert loaded(model)
    if change == "of another type" and door != "resume":
        assert model.head.weight.eq(1).all()  # type: ignore[operator, union-attr]
    if change == "of another shape":
        assert model.head.weight.eq(9).all()  # type: ignore[operator, union-attr]


@pytest.mark.parametrize("change", ["of another shape", "new", "gone", "renamed"])
@pytest.mark.parametrize("door", ["load", "resume"])
def test_so_it_does_where_an_optimizer_goes_with_the_model(tmp_path: Path, change: str, door: str) -> None:
    """Groups of an optimizer differ where names of parameters do; one remedy is enough for both."""
    run, first = tmp_path / "run", usual(1.0)
    train(run, first, 2, torch.optim.Adam(first.parameters()))
    model = CHANGES[change]()
    optimizer = torch.optim.Adam(model.parameters())

    def load(**argument: Any) -> None:
        if door == "load":
            open_checkpoint(run).load({"model": model, "optimizer": optimizer}, **argument)
        else:
            train(run, model, 3, optimizer, **argument)

    with pytest.raises(BlobError) as caught:
        load()
    argument = named(str(caught.value))
    assert ("rename" in argument) == (change == "renamed")
    load(**argument)
    weight = next(model.parameters())
    assert weight.lt(2).all(), "it was 9 before"
    if change == "renamed":
        assert optimizer.state[weight]["step"] == (2 if door == "load" else 3)


@pytest.mark.parametrize("door", ["file", "epoch"])
def test_what_is_left_out_already_stays_in_the_remedy(tmp_path: Path, door: str) -> None:
    """A refusal adds to the `exclude` that it was given, and names all parts, so that once is enough."""
    parts = {f"block{number}": 4 for number in range(9)}
    old = Net(1.0, **{name: nn.Linear(n, n) for name, n in parts.items()}, head=nn.Linear(4, 2))
    new = Net(9.0, **{name: nn.Linear(n + 1, 2) for name, n in parts.items()}, top=nn.Linear(4, 2))
    save_blobs(tmp_path / "old.safetensors", {"model": old})
    job = Job("old", blobs={"model": old})
    job.epoch(lambda: None)
    job.stop_when(max_epochs(1))
    JobRunner(job, tmp_path / "run", code=False, best=None).train()

    def load(exclude: list[str]) -> None:
        if door == "file":
            load_into(tmp_path / "old.safetensors", {"model": new}, exclude=exclude)
        else:
            open_checkpoint(tmp_path / "run").load({"model": new}, exclude=exclude)

    with pytest.raises(BlobError) as refused:
        load(["model.head", "model.top"])
    found = re.search(r"exclude=(\[.*\])", str(refused.value))
    assert found is not None
    load(ast.literal_eval(found[1]))


@pytest.mark.parametrize("atomic", [True, False])
def test_large_tensors_are_converted_on_their_way(tmp_path: Path, atomic: bool) -> None:
    """In pieces, verified, with the bits that converting the whole gives; another type is refused."""
    content = torch.randn(3_000_001)
    save_blobs(tmp_path / "file.safetensors", {"w": content})
    live = torch.zeros(3_000_001, dtype=torch.bfloat16)
    for wrong in (None, torch.float16, {"v": torch.bfloat16}):
        with pytest.raises(BlobError, match=r"dtype=torch\.bfloat16$"):
            load_into(tmp_path / "file.safetensors", {"w": live}, dtype=wrong, atomic=atomic)
    assert live.eq(0).all()
    load_into(tmp_path / "file.safetensors", {"w": live}, dtype={"w": torch.bfloat16}, atomic=atomic)
    assert torch.equal(live, content.to(torch.bfloat16))
    with pytest.raises(UsageError, match="floating-point type"):
        load_into(tmp_path / "file.safetensors", {"w": live}, dtype=torch.int8)


def test_an_optimizer_with_other_parameters_begins_anew_where_that_is_asked_for(tmp_path: Path) -> None:
    """The refusal names `resume_exclude` with the optimizer; the weights are still those of the epoch."""
    run, model = tmp_path / "run", usual(1.0)
    train(run, model, 2, torch.optim.Adam(model.parameters()))
    again = usual(9.0)
    optimizer = torch.optim.Adam([*again.body.parameters()])  # type: ignore[union-attr]
    with pytest.raises(BlobError) as caught:
        train(run, again, 3, optimizer)
    assert named(str(caught.value)) == {"resume_exclude": ["optimizer"]}
    train(run, again, 3, optimizer, resume_exclude=["optimizer"])
    assert torch.equal(again.tail.weight, model.tail.weight)  # type: ignore[arg-type, union-attr]
    assert optimizer.state[again.body.weight]["step"] == 1  # type: ignore[index, union-attr]


def test_renames_and_exclusions_reach_into_optimizers(tmp_path: Path) -> None:
    """`load` finds state and groups by new names of parameters; what is excluded keeps its state."""
    run, model = tmp_path / "run", usual(1.0)
    train(run, model, 2, torch.optim.Adam(model.parameters()))
    other = Net(9.0, trunk=nn.Linear(4, 4), tail=nn.Linear(4, 4), head=nn.Linear(4, 3))
    optimizer = torch.optim.Adam(other.parameters())
    other(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    before = {key: one.clone() for key, one in optimizer.state[other.head.weight].items()}
    checkpoint = open_checkpoint(run)
    checkpoint.load(
        {"net": other, "opt": optimizer}, exclude="net.head",
        rename={"model.body": "net.trunk", "model": "net", "optimizer": "opt"},
    )  # fmt: skip
    assert torch.equal(other.trunk.weight, model.body.weight)  # type: ignore[arg-type, union-attr]
    assert optimizer.state[other.trunk.weight]["step"] == 2
    assert all(torch.equal(before[key], one) for key, one in optimizer.state[other.head.weight].items())


def load_from(door: str, source: Path, model: nn.Module, **argument: Any) -> None:
    """Of the epoch or of the file of `source`."""
    if door == "load":
        open_checkpoint(source / "run").load({"model": model}, **argument)
    else:
        load_into(source / "file.safetensors", {"model": model}, **argument)


@pytest.mark.parametrize("door", ["load", "load_into"])
def test_an_exclusion_that_means_nothing_is_refused(source: Path, door: str) -> None:
    """What a misspelt `exclude` was to keep would be overwritten; the nearest name is told."""
    model = usual(9.0)
    with pytest.raises(UsageError, match=r"'model\.haed' matches no leaf.*model\.head"):
        load_from(door, source, model, exclude=["model.body", "model.haed"])
    assert all(bool((one == 9.0).all()) for one in model.parameters())
    load_from(door, source, model, exclude="model.haed", strict=False)
    assert all(bool((one == 1.0).all()) for one in model.parameters())


@pytest.mark.parametrize("door", ["load", "load_into"])
def test_no_rename_is_proposed_that_would_not_fit(source: Path, door: str) -> None:
    """Names that end alike, of which one has another shape: the argument that is named lets the load pass."""
    body = Net(9.0, body=nn.Linear(4, 4), tail=nn.Linear(4, 8))
    model = Net(9.0, trunk=body, out=nn.Linear(8, 2))
    with pytest.raises(BlobError) as caught:
        load_from(door, source, model)
    argument = named(str(caught.value))
    assert list(argument) == ["exclude"]
    load_from(door, source, model, **argument)


def test_several_renames_are_proposed_at_once(source: Path) -> None:
    """Two parts that moved to different places: both rules stand in one argument, which is enough."""
    inner = Net(9.0, body=nn.Linear(4, 4), tail=nn.Linear(4, 4))
    model = Net(9.0, trunk=inner, classes=nn.Linear(4, 2))
    with pytest.raises(BlobError) as caught:
        load_from("load", source, model)
    argument = named(str(caught.value))
    assert argument == {"rename": {"model.head": "model.classes", "model": "model.trunk"}}
    load_from("load", source, model, **argument)
    assert all(bool((one == 1.0).all()) for one in model.parameters())


def test_a_blob_with_another_name_beside_its_optimizer_is_seen(tmp_path: Path) -> None:
    """The refusal of the resume proposes the rename, not to leave the optimizer out of it."""
    run, first = tmp_path / "run", usual(1.0)
    train(run, first, 2, torch.optim.Adam(first.parameters()))
    model = usual(9.0)
    optimizer = torch.optim.Adam(model.parameters())
    job = Job("remedies", blobs={"net": model, "optimizer": optimizer})
    job.epoch(lambda: None)
    job.stop_when(max_epochs(3))
    with pytest.raises(BlobError) as caught:
        JobRunner(job, run, best=None).train()
    argument = named(str(caught.value))
    assert argument == {"rename": {"model": "net"}}
    JobRunner(job, run, best=None, **argument).train()
    weight = next(model.parameters())
    assert weight.lt(2).all() and optimizer.state[weight]["step"] == 2


def test_a_warm_start_that_takes_nothing_is_refused(source: Path, tmp_path: Path) -> None:
    """Also without `strict`: it would train from scratch, and say so in half a line."""
    other = Net(9.0, a=nn.Linear(4, 4), b=nn.Linear(4, 2))
    with pytest.raises(UsageError, match=r"no leaf of it matches .*rename="):
        train(
            tmp_path / "new", other, 1, upstream={"a": str(source / "run")},
            init_from=[InitFrom("a", into="model", strict=False)],
        )  # fmt: skip


def test_a_warm_start_takes_a_path(source: Path, tmp_path: Path) -> None:
    """A run named by its path needs no alias."""
    model = usual(9.0)
    train(tmp_path / "new", model, 1, init_from=f"{source / 'run'}@1")
    assert loaded(model)
    assert open_checkpoint(tmp_path / "new").upstream["run"] is not None
    with pytest.raises(UsageError, match="unknown upstream 'expert' in init_from"):
        train(tmp_path / "other", model, 1, init_from="expert")


def epoch_of(where: Path, blobs: dict[str, Any]) -> Checkpoint:
    """An epoch of a run that changes nothing."""
    job = Job("still", blobs=blobs)
    job.epoch(lambda ctx: None)
    job.stop_when(max_epochs(1))
    JobRunner(job, where, best=None).train()
    return open_checkpoint(where)


@pytest.mark.parametrize("hooks", [False, True])
def test_a_module_takes_a_dict_of_tensors(tmp_path: Path, hooks: bool) -> None:
    """An average kept as a state dict loads into the model; one with other values is refused."""
    average = nn.BatchNorm1d(2).state_dict()
    average["weight"].fill_(7)
    blobs = {"ema": dict(average), "more": {"shadow": dict(average), "decay": 0.9}}
    save_blobs(tmp_path / "file.safetensors", blobs)
    checkpoint = epoch_of(tmp_path / "run", blobs)
    for load in (
        lambda model: checkpoint.load({"ema": model}),
        lambda model: checkpoint.load({"more.shadow": model}),
        lambda model: load_into(tmp_path / "file.safetensors", {"ema": model}),
    ):
        model = nn.BatchNorm1d(2)
        if hooks:
            model.register_load_state_dict_pre_hook(lambda *args: None)
        load(model)
        assert model.weight.eq(7).all()
    with pytest.raises(BlobError, match="only in the checkpoint: more"):
        checkpoint.load({"more": nn.ModuleDict({"shadow": nn.BatchNorm1d(2)})})


def test_values_that_a_load_cannot_change_are_refused(tmp_path: Path) -> None:
    """Nothing is called loaded that is not; the call that is named gives the stored value."""
    save_blobs(tmp_path / "file.safetensors", {"n": 5, "pair": (1, 2), "list": [1]})
    for given in ({"n": 0}, {"pair": ()}, {"list": {}}):
        with pytest.raises(BlobError, match=r"nothing was changed: use torchrelay\.load_blobs"):
            load_into(tmp_path / "file.safetensors", given)
    checkpoint = epoch_of(tmp_path / "run", {"n": 5, "list": [1]})
    for given in ({"n": 0}, {"list": 3}):
        name = next(iter(given))
        with pytest.raises(BlobError, match=rf"use ckpt\.value\('{name}'\)"):
            checkpoint.load(given)
    assert (checkpoint.value("n"), checkpoint.value("list")) == (5, [1])


def test_nodes_that_are_not_there_are_refused(source: Path) -> None:
    """Also where every node has the same leaves, so that no misspelt name passes."""
    for nodes in ("trainer_7", {"model": "trainer_7"}):
        with pytest.raises(UsageError, match="no such node; did you mean 'trainer_0'"):
            open_checkpoint(source / "run").load({"model": usual(2.0)}, nodes=nodes)
        with pytest.raises(UsageError, match="no such node; did you mean 'trainer_0'"):
            open_checkpoint(source / "run").load_tensors("model.*", nodes=nodes)


NODES = ("trainer_0", "trainer_1")


def on_two_nodes(run: Path, factory: Callable[[Any], Any], stop: Callable[[Any], bool] | None = None) -> None:
    """Train an epoch on two nodes, whose blob `made` a factory makes."""
    job = Job("nodes", blobs={"made": factory})
    job.epoch(lambda ctx: None)
    job.stop_when(stop or max_epochs(1))
    with LocalSession(NODES) as session:
        JobRunner(job, run, best=None, max_failed_saves=1).train(session)


def test_a_failing_factory_or_stop_condition_is_named(tmp_path: Path) -> None:
    """What the program's own code raises on one node names the blob or the condition, and the node."""

    def factory(ctx: Any) -> torch.Tensor:
        if ctx.rank == 1:
            raise KeyError("missing")
        return torch.zeros(1)

    def patience(ctx: Any) -> bool:
        raise ValueError("no metric")

    with pytest.raises(KeyError, match=r"the factory of blob 'made' failed on trainer_1.*'missing'"):
        on_two_nodes(tmp_path / "one", factory)
    with pytest.raises(ValueError, match=r"the stop condition 'patience' failed on trainer_0.*no metric"):
        on_two_nodes(tmp_path / "other", lambda ctx: torch.zeros(1), patience)


def test_a_leaf_that_nodes_have_in_other_ways_is_told_apart(tmp_path: Path) -> None:
    """A tie on one node alone: the refusal says which node has a tensor of its own."""

    def factory(ctx: Any) -> nn.Module:
        net = usual(1.0)
        if ctx.rank == 0:
            net.tail.weight = net.body.weight
        return net

    with pytest.raises(
        SaveFailedError,
        match=r"'made.tail.weight' is replicated, but it is float32\[4, 4\], the same tensor as "
        r"made.body.weight on trainer_0 .* and float32\[4, 4\], a tensor of its own on trainer_1 "
        r".*make it equal on all ranks",
    ):
        on_two_nodes(tmp_path / "run", factory)
