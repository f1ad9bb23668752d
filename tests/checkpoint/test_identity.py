"""Tensors are one leaf where they are the same view of the same memory, on saves and on loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from leaf_store import load, save
from safetensors.torch import save_file
from torch import nn

from torchrelay import (
    Job,
    JobRunner,
    export_checkpoint,
    import_checkpoint,
    load_into,
    max_epochs,
    open_checkpoint,
    save_blobs,
)
from torchrelay.checkpoint.state.flatten import leaves_of
from torchrelay.checkpoint.state.names import TensorNames, overlaps_of
from torchrelay.errors import BlobError, SaveFailedError


def aliases(objects: dict[str, Any]) -> dict[str, str]:
    return {leaf.name: leaf.alias_of for leaf in leaves_of(objects) if leaf.alias_of is not None}


class Tied(nn.Module):
    """An output layer whose weight is that of the embedding."""

    def __init__(self, tie: Callable[[nn.Module], None] | None = None) -> None:
        super().__init__()
        self.emb = nn.Embedding(3, 2)
        self.out = nn.Linear(2, 3, bias=False)
        if tie is None:
            self.out.weight = self.emb.weight
        else:
            tie(self)


def by_data(module: Any) -> None:
    module.out.weight.data = module.emb.weight.data


def apart(module: Any) -> None:
    pass


TIES = {"one parameter": None, "one memory": by_data, "apart": apart}


def views() -> dict[str, tuple[torch.Tensor, torch.Tensor, bool]]:
    base = torch.arange(12.0)
    parameter = nn.Parameter(torch.zeros(2))
    one_complex = torch.zeros(2, dtype=torch.complex64)
    return {
        "detached": (parameter, parameter.detach(), True),
        "data": (parameter, parameter.data, True),
        "same slice": (base[2:4], base[2:4], True),
        "other offset": (base[2:4], base[3:5], False),
        "other shape": (base[:4], base[:4].view(2, 2), False),
        "other strides": (base[:4].view(2, 2), base[:4].view(2, 2).t(), False),
        "other type": (base[:2], base[:2].view(torch.int32), False),
        "conjugate": (one_complex, one_complex.conj(), False),
        "empty apart": (torch.zeros(0), torch.zeros(0), False),
        "empty shared": (empty := torch.zeros(0, 2), empty.detach(), True),
        "meta apart": (torch.empty(2, device="meta"), torch.empty(2, device="meta"), False),
        "meta shared": (meta := torch.empty(2, device="meta"), meta.detach(), True),
        "sparse": (torch.zeros(2).to_sparse(), torch.zeros(2).to_sparse(), False),
    }


@pytest.mark.parametrize("case", views())
def test_the_same_view_of_the_same_memory_is_one_tensor(case: str) -> None:
    """Storage, offset, shape, strides and type decide, not the object; what has no memory is itself."""
    one, other, same = views()[case]
    names = TensorNames()
    assert names.of(one) is None
    assert names.earlier(one, "one") is None
    assert names.earlier(one, "again") == "one"
    assert names.earlier(other, "other") == ("one" if same else None)
    assert names.of(other) == ("one" if same else "other")


@pytest.mark.parametrize("saving", ["one parameter", "one memory"])
@pytest.mark.parametrize("loading", TIES)
def test_ties_are_stored_once_and_load_into_any_form(saving: str, loading: str) -> None:
    """Parameters tied by object or by `.data` are one leaf; a model that is not tied gets both copies."""
    source, target = Tied(TIES[saving]), Tied(TIES[loading])
    assert aliases({"m": source}) == {"m.out.weight": "m.emb.weight"}
    load(save({"m": source}), {"m": target})
    assert torch.equal(target.emb.weight, source.emb.weight)
    assert torch.equal(target.out.weight, source.emb.weight)
    assert (target.out.weight.data_ptr() == target.emb.weight.data_ptr()) == (loading != "apart")


def test_parameters_of_one_memory_keep_their_own_optimizer_state() -> None:
    """Two parameters that share data have a momentum each, and the run goes on as it was."""

    def build() -> dict[str, Any]:
        module = Tied(by_data)
        return {"m": module, "opt": torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)}

    source, target = build(), build()
    for number, parameter in enumerate(source["m"].parameters()):
        parameter.grad = torch.full_like(parameter, 1.0 + number)
    source["opt"].step()
    load(save(source), target)
    assert save(target).content == save(source).content
    assert len({state["momentum_buffer"].sum().item() for state in target["opt"].state.values()}) == 2


def two_groups(lr: Callable[[], Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    groups: list[dict[str, Any]] = [{"params": a.parameters()}, {"params": b.parameters(), "lr": lr()}]
    return {"a": a, "b": b, "opt": torch.optim.SGD(groups, lr=lr(), foreach=False)}


def test_one_learning_rate_of_all_groups_resumes_as_one(tmp_path: Path) -> None:
    """A tensor lr that all groups have is one tensor after a resume, and stays it."""

    def run(epochs: int) -> torch.optim.Optimizer:
        one = torch.tensor(0.5 / epochs)
        objects = two_groups(lambda: one)
        job = Job("groups", blobs=objects)
        job.epoch(lambda ctx: None)
        job.stop_when(max_epochs(epochs))
        JobRunner(job, tmp_path / "run", best=None).train()
        return objects["opt"]  # type: ignore[no-any-return]

    shared = torch.tensor(0.1)
    assert aliases(two_groups(lambda: shared)) == {"opt.param_groups.1.lr": "opt.param_groups.0.lr"}
    run(1)
    first, second = run(2).param_groups
    assert first["lr"] is second["lr"] and first["lr"].item() == 0.5


def test_a_learning_rate_stored_for_each_group_loads_into_one_if_all_are_equal() -> None:
    """Earlier epochs have it once per group: equal bytes load into one tensor, others into two."""
    one = torch.tensor(0.3)
    load(save(two_groups(lambda: torch.tensor(0.1))), two_groups(lambda: one))
    assert one.item() == pytest.approx(0.1)
    numbers = iter([0.1, 0.2])
    source = save(two_groups(lambda: torch.tensor(next(numbers))))
    target = two_groups(lambda: one)
    load(source, target)
    first, second = (group["lr"] for group in target["opt"].param_groups)
    assert first is one and (first.item(), second.item()) == (pytest.approx(0.2), pytest.approx(0.1))


class Counting(torch.optim.SGD):
    """All parameters count their steps in one tensor, as some optimizers of libraries do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        every = [parameter for group in self.param_groups for parameter in group["params"]]
        count = next((one["count"] for one in self.state.values()), torch.zeros(()))
        for parameter in every:
            self.state[parameter].setdefault("count", count)
            self.state[parameter].setdefault("nested", {"counts": [count]})
        count += 1


@pytest.mark.parametrize("steps_before", [0, 1])
def test_a_shared_step_counter_comes_back_as_one(steps_before: int) -> None:
    """State that parameters share is shared again, in a fresh optimizer and in a used one."""

    def build(steps: int) -> dict[str, Any]:
        module = nn.Linear(2, 2)
        optimizer = Counting(module.parameters(), lr=0.1)
        for _ in range(steps):
            optimizer.step()
        return {"m": module, "opt": optimizer}

    source, target = build(3), build(steps_before)
    load(save(source), target)
    counters = {id(state["count"]) for state in target["opt"].state.values()}
    assert len(counters) == 1
    target["opt"].step()
    assert [state["count"].item() for state in target["opt"].state.values()] == [4.0, 4.0]
    assert [state["nested"]["counts"][0].item() for state in target["opt"].state.values()] == [4.0, 4.0]


def separate(where: Path, different: bool) -> Path:
    """Both copies of a tied weight, as an import of a state dict that was cloned key by key has them."""
    state = {name: value.clone() for name, value in Tied().state_dict().items()}
    if different:
        state["out.weight"] += 1
    save_file(state, where / "both.safetensors")
    import_checkpoint(where / "both.safetensors", where / "both", format="safetensors", blob="m")
    return where / "both"


def loads_of(where: Path, blob_file: Path) -> dict[str, Callable[[dict[str, Any]], Any]]:
    def resume(objects: dict[str, Any]) -> None:
        job = Job("imported", blobs=objects)
        job.epoch(lambda ctx: None)
        job.stop_when(max_epochs(1))
        runs = {"source": str(where)}
        JobRunner(job, where.parent / "run", best=None, upstream=runs, init_from="source").train()

    return {
        "load": lambda objects: open_checkpoint(where).load(objects),
        "load_into": lambda objects: load_into(blob_file, objects),
        "init_from": resume,
    }


@pytest.mark.parametrize("way", ["load", "load_into", "init_from"])
@pytest.mark.parametrize("tie", ["one parameter", "one memory"])
def test_a_tied_model_loads_from_equal_copies(tmp_path: Path, way: str, tie: str) -> None:
    """Of two stored copies with equal bytes both are taken for the one tensor that they go into."""
    where = separate(tmp_path, different=False)
    copies = Tied(apart)
    open_checkpoint(where).load({"m": copies})
    save_blobs(tmp_path / "blobs", {"m": copies})
    target = Tied(TIES[tie])
    loads_of(where, tmp_path / "blobs")[way]({"m": target})
    assert torch.equal(target.emb.weight, copies.emb.weight)


@pytest.mark.parametrize("way", ["load", "load_into", "init_from"])
def test_a_tied_model_refuses_different_copies_by_name(tmp_path: Path, way: str) -> None:
    """Two copies of other bytes do not fit into one tensor: the refusal names both and the way out."""
    where = separate(tmp_path, different=True)
    copies = Tied(apart)
    open_checkpoint(where).load({"m": copies})
    save_blobs(tmp_path / "blobs", {"m": copies})
    target = Tied()
    before = target.emb.weight.clone()
    with pytest.raises(BlobError, match=r"(?s)m\.out\.weight and m\.emb\.weight are one tensor.*exclude="):
        loads_of(where, tmp_path / "blobs")[way]({"m": target})
    assert torch.equal(target.emb.weight, before)
    open_checkpoint(where).load({"m": target}, exclude=["m.out.weight"])
    assert torch.equal(target.emb.weight, copies.emb.weight)


@pytest.mark.parametrize("kept", ["emb.weight", "out.weight"])
def test_one_of_the_tied_names_is_enough(tmp_path: Path, kept: str) -> None:
    """A file that others wrote has one of the names: a tied model loads, one that is not tied does not."""
    weight = torch.randn(3, 2)
    save_file({kept: weight}, tmp_path / "one.safetensors")
    import_checkpoint(tmp_path / "one.safetensors", tmp_path / "one", format="safetensors", blob="m")
    checkpoint = open_checkpoint(tmp_path / "one")
    for tie in (None, by_data):
        target = Tied(tie)
        result = checkpoint.load({"m": target})
        assert torch.equal(target.out.weight, weight) and result.missing == ()
    with pytest.raises(BlobError, match="not in the checkpoint"):
        checkpoint.load({"m": Tied(apart)})


def test_an_export_has_a_tied_tensor_under_its_first_name(tmp_path: Path) -> None:
    """Other programs expect the name that the model has first, whatever sorts before it."""

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.head = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
            self.head.weight = self.model.weight

    from safetensors import safe_open

    job = Job("late", blobs={"lm": Late()})
    job.epoch(lambda ctx: None)
    job.stop_when(max_epochs(1))
    JobRunner(job, tmp_path / "run", best=None).train()
    export_checkpoint(tmp_path / "run", tmp_path / "hf", to="hf", blobs="lm", prefix="lm.")
    with safe_open(tmp_path / "hf/model.safetensors", "pt") as file:
        assert list(file.keys()) == ["model.weight"]


def test_blobs_of_one_memory_are_one_leaf(tmp_path: Path) -> None:
    """Two blobs that show one tensor are stored once, and are loaded as one."""
    one = torch.arange(3.0)
    save_blobs(tmp_path / "blobs", {"a": one, "b": one.view(3), "c": torch.ones(3)})
    assert aliases({"a": one, "b": one.view(3)}) == {"b": "a"}
    fresh = torch.zeros(3)
    load_into(tmp_path / "blobs", {"a": fresh, "b": fresh.view(3), "c": torch.zeros(3)})
    assert torch.equal(fresh, one)


@pytest.mark.parametrize("torn_in", [0, 1, 2])
def test_memory_that_is_shared_in_part_stays_shared_or_fails_the_save(tmp_path: Path, torn_in: int) -> None:
    """The next start builds the row inside of the weight again: two contents would have one place."""

    def train(epochs: int) -> torch.Tensor:
        model = nn.Linear(3, 3)
        with torch.no_grad():
            model.weight.fill_(1.0)
        row = model.weight.data[0]
        job = Job("row", blobs={"model": model, "row": row})

        @job.epoch
        def epoch(ctx: Any) -> None:
            if ctx.epoch == torn_in:
                model.weight.data = model.weight.data + 1
            row.mul_(2)

        job.stop_when(max_epochs(epochs))
        JobRunner(job, tmp_path / "run", best=None, max_failed_saves=1).train()
        return model.weight.detach()

    if torn_in:
        with pytest.raises(SaveFailedError, match=r"model\.weight shared memory with row at the start"):
            train(2)
    else:
        train(2)
        assert train(3)[:, 0].tolist() == [8.0, 1.0, 1.0]


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("way", ["load", "load_into"])
def test_loads_refuse_objects_that_share_memory_in_part(tmp_path: Path, way: str, row: int) -> None:
    """The leaf that comes last would overwrite a part of the other; the argument that is named helps."""
    stored = {"model": nn.Linear(3, 3), "row": torch.full((3,), 7.0)}
    save_blobs(tmp_path / "file.safetensors", stored)
    job = Job("row", blobs=stored)
    job.epoch(lambda: None)
    job.stop_when(max_epochs(1))
    JobRunner(job, tmp_path / "run", best=None).train()
    model = nn.Linear(3, 3)
    objects = {"model": model, "row": model.weight.data[row]}
    before = model.weight.detach().clone()

    def load_them(**argument: Any) -> None:
        if way == "load":
            open_checkpoint(tmp_path / "run").load(objects, **argument)
        else:
            load_into(tmp_path / "file.safetensors", objects, **argument)

    with pytest.raises(BlobError, match="share memory here") as caught:
        load_them()
    assert torch.equal(model.weight, before)
    name = str(caught.value).rpartition("exclude=['")[2].removesuffix("']")
    load_them(exclude=name)
    kept = stored["model"].weight if name == "row" else before  # type: ignore[union-attr]
    assert torch.equal(model.weight[2], kept[2])  # type: ignore[index]


def test_a_buffer_that_left_shared_memory_for_another_shape_is_saved(tmp_path: Path) -> None:
    """A load gives it memory of its own, so the tensor in which it lay keeps its content."""

    def train(epochs: int) -> dict[str, list[float]]:
        model = nn.Module()
        model.register_buffer("all", torch.zeros(4))
        model.register_buffer("part", model.all[1:3])
        job = Job("part", blobs={"model": model})

        @job.epoch
        def epoch(ctx: Any) -> None:
            if ctx.epoch == 1:
                model.part = torch.zeros(3)
            model.part.add_(1)

        job.stop_when(max_epochs(epochs))
        JobRunner(job, tmp_path / "run", best=None, max_failed_saves=1).train()
        return {name: one.tolist() for name, one in model.named_buffers()}

    train(1)
    assert train(2) == {"all": [0.0] * 4, "part": [2.0] * 3}


def test_parts_of_a_matrix_that_lie_between_one_another_share_nothing() -> None:
    """Columns have extents that overlap and no byte in common; a row has one with each column."""
    matrix = torch.zeros(4, 3)
    columns = {"a": matrix[:, 0], "b": matrix[:, 1], "t": torch.zeros(2, 2)}
    assert overlaps_of(columns) == {}
    assert overlaps_of({**columns, "row": matrix[1]}) == {"row": ("a", 12)}
    assert overlaps_of({"all": matrix.t(), "part": matrix[2:, 1:]}) == {"part": ("all", 28)}


def test_columns_of_one_matrix_are_loaded_each(tmp_path: Path) -> None:
    """Blobs that lie between one another in memory are no blobs that share it."""
    save_blobs(tmp_path / "file.safetensors", {"a": torch.full((4,), 1.0), "b": torch.full((4,), 2.0)})
    matrix = torch.zeros(4, 3)
    load_into(tmp_path / "file.safetensors", {"a": matrix[:, 0], "b": matrix[:, 1]})
    assert matrix[3].tolist() == [1.0, 2.0, 0.0]
