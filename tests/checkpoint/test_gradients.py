"""Which gradients are state at a boundary, how they become leaves, and how they come back."""

from __future__ import annotations

import gc
import importlib.util
import shutil
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from torchrelay import (
    EpochLoader,
    Job,
    JobRunner,
    LocalSession,
    MultiNodeCheckpointManager,
    max_epochs,
    open_checkpoint,
)
from torchrelay.checkpoint.format.dtypes import memory_of
from torchrelay.checkpoint.format.manifest import codec
from torchrelay.checkpoint.state.flatten import parameter_names
from torchrelay.checkpoint.state.leaf import Leaf, Value, spec_of
from torchrelay.checkpoint.state.restore import gradients
from torchrelay.checkpoint.state.restore.gradients import Gradients, gradient_leaves
from torchrelay.checkpoint.state.steps import watch_steps

GOLDEN = Path(__file__).parents[1] / "golden"


class Model(nn.Module):
    """Two layers, of which `second` is used when asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, both: bool = True) -> torch.Tensor:
        found = self.first(torch.ones(2, 3))
        return self.second(found).sum() if both else found.sum()


@pytest.fixture
def model() -> Model:
    watch_steps()
    return Model()


def listed(**objects: object) -> dict[str, Leaf]:
    return {leaf.name: leaf for leaf in gradient_leaves(objects, parameter_names(objects))}


def names(**objects: object) -> set[str]:
    """The parameters of which a gradient is saved, whatever its form."""
    leaves = listed(**objects)
    zeros = leaves["@grad"].content.json.get("zeros", []) if leaves else []
    return {name.removeprefix("@grad.") for name in leaves if name != "@grad"} | set(zeros)


ALL = {"m.first.weight", "m.first.bias", "m.second.weight", "m.second.bias"}


def test_a_gradient_that_is_there_before_any_step_is_saved(model: Model) -> None:
    """Nobody has stepped yet, so every gradient is one that a step will see."""
    assert names(m=model) == set()
    model().backward()
    assert names(m=model) == ALL


def test_what_a_step_left_behind_is_none_where_each_step_finds_new_gradients(model: Model) -> None:
    """A loop that clears at its beginning saves none between its steps, and all inside of a window."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
    assert names(m=model) == set()
    model(both=False).backward()
    assert names(m=model) == {"m.first.weight", "m.first.bias"}


def test_after_one_step_nobody_knows_what_the_program_does_with_its_gradients(model: Model) -> None:
    """What the first step left behind is saved: the next backward pass may add to it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model().backward()
    optimizer.step()
    assert names(m=model) == ALL


@pytest.mark.parametrize("later", [0, 3])
def test_gradients_that_one_step_found_again_are_always_saved(model: Model, later: int) -> None:
    """A loop that once added to what a step had left behind may do so again."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3 + later):
        if step >= 3:
            optimizer.zero_grad()
        model().backward()
        optimizer.step()
    assert names(m=model) == ALL


def test_gradients_without_a_step_by_an_optimizer_are_saved(model: Model) -> None:
    """A program that writes its parameters itself does what nobody sees."""
    for _ in range(3):
        model.zero_grad()
        model().backward()
        with torch.no_grad():
            for one in model.parameters():
                one -= 0.1 * one.grad
    assert names(m=model) == ALL


def test_two_optimizers_have_windows_of_their_own(model: Model) -> None:
    """The step of one says nothing of what the other one is adding up."""
    first = torch.optim.SGD(model.first.parameters(), lr=0.1)
    second = torch.optim.SGD(model.second.parameters(), lr=0.1)
    for _ in range(2):
        model().backward()
        first.step()
        second.step()
        first.zero_grad()
        second.zero_grad()
    for _ in range(2):
        first.zero_grad()
        model().backward()
        first.step()
    assert names(m=model) == {"m.second.weight", "m.second.bias"}


def test_an_optimizer_that_goes_on_with_what_another_left_behind(model: Model) -> None:
    """Two that step in turn on the same gradients keep them: they are saved."""
    one = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model().backward()
        one.step()
        model().backward()
        other.step()
        model.zero_grad()
    model().backward()
    one.step()
    assert names(m=model) == ALL


def test_an_optimizer_within_an_optimizer_takes_the_same_step(model: Model) -> None:
    """A step within a step leaves behind what the other one does."""
    inner = torch.optim.SGD(model.parameters(), lr=0.1)

    class Outer(torch.optim.Optimizer):
        def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
            inner.step()

    outer = Outer(model.parameters(), {})
    for _ in range(3):
        outer.zero_grad()
        model().backward()
        outer.step()
    assert names(m=model) == set()


def test_the_references_to_gradients_last_as_long_as_these() -> None:
    """A gradient without a reference from Python keeps its object, which all of this stands on."""
    one = nn.Parameter(torch.ones(2))
    one.sum().backward()
    known, version = weakref.ref(one.grad), one.grad._version
    gc.collect()
    assert known() is one.grad and weakref.ref(one.grad) is known and one.grad._version == version
    one.sum().backward()
    assert known() is one.grad and one.grad._version > version
    one.grad = None
    assert known() is None


def again(made: Callable[[], nn.Module], source: nn.Module) -> nn.Module:
    """Another module with the gradients of `source`, through leaves as a save and a load have them."""
    leaves = listed(m=source)
    specs = {name: spec_of(leaf) for name, leaf in leaves.items()}
    contents = {name: leaf.content.json for name, leaf in leaves.items() if isinstance(leaf.content, Value)}
    other = made()
    for one in other.parameters():
        one.grad = torch.full_like(one, 7.0)  # of a start before, which must not stay
    held = Gradients({"m": other}, specs, contents)
    for read in held.reads:
        content = leaves[read.leaf].content
        assert isinstance(content, torch.Tensor)
        memory_of(read.memory())[:] = memory_of(content.contiguous())
    held.install()
    return other


def test_gradients_come_back_in_their_bits_and_strides(model: Model) -> None:
    """Zeros with their sign, NaN, channels last: equal bits, laid out as backward does; None stays None."""

    def made() -> nn.Module:
        return nn.Sequential(nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last), nn.Linear(2, 2))

    source = made()
    (source[0](torch.randn(1, 2, 5, 5)).sum() * 0.3).backward()
    source[0].bias.grad = torch.tensor([-0.0, 0.0, float("nan"), float("inf")])
    source[1].bias.grad = torch.zeros(2)
    other = again(made, source)
    for old, new in zip(source.parameters(), other.parameters(), strict=True):
        if old.grad is None:
            assert new.grad is None
        else:
            assert new.grad.stride() == old.grad.stride()
            assert torch.equal(old.grad.view(torch.int32), new.grad.view(torch.int32))
    assert listed(m=source)["@grad"].content.json["zeros"] == ["m.1.bias"]


def test_zeros_with_a_sign_are_no_zeros() -> None:
    """-0.0 is not what `zero_grad` leaves: it is saved as it is."""
    module = nn.Linear(1, 1, bias=False)
    module.weight.grad = torch.full((1, 1), -0.0)
    assert "@grad.m.weight" in listed(m=module)


def test_sparse_gradients_come_back_sparse() -> None:
    """An embedding's gradient keeps its indices, and whether it is coalesced."""

    def made() -> nn.Module:
        return nn.Embedding(5, 2, sparse=True)

    source = made()
    source(torch.tensor([3, 1, 3])).sum().backward()
    new = again(made, source).weight.grad
    old = source.weight.grad
    assert new.is_sparse and new.is_coalesced() == old.is_coalesced()
    assert torch.equal(new._indices(), old._indices()) and torch.equal(new._values(), old._values())


def test_gradients_in_a_buffer_of_the_program_stay_there() -> None:
    """Views of one flat buffer are written into, so that the program still sees them."""
    module, flat = nn.Linear(2, 1), torch.zeros(3)
    module.weight.grad, module.bias.grad = flat[:2].view(1, 2), flat[2:]
    Gradients({"m": module}, {}, {}).install()
    module.weight.grad.fill_(1)
    assert flat.tolist() == [1, 1, 0]


def train(run: Path, epochs: int, window: int, *, accumulate: bool = False) -> nn.Module:
    """Windows of so many batches, of which an epoch has 4."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = EpochLoader((torch.randn(16, 4), torch.randn(16, 1)), batch_size=4)
    job = Job("windows", blobs={"model": model, "optimizer": optimizer, "loader": loader})

    @job.epoch
    def epoch(ctx) -> None:
        for x, y in ctx.steps(loader, accumulate=window if accumulate else 1):
            ((model(x) - y).square().mean() / window).backward()
            if ctx.window_end if accumulate else ctx.total_steps % window == 0:
                optimizer.step()
                optimizer.zero_grad()

    job.stop_when(max_epochs(epochs))
    JobRunner(job, run, best=None, code=False).train(LocalSession())
    return model


def features(run: Path, epoch: int) -> list[str]:
    checkpoint = open_checkpoint(run, epoch=epoch)
    return codec._features(checkpoint.manifest)


def test_an_epoch_that_ends_in_a_window_says_so_and_shows_it_to_nobody_else(tmp_path: Path) -> None:
    """Readers that do not know of gradients refuse such an epoch; lists, loads and exports leave them out."""
    train(tmp_path / "run", 2, window=3)
    assert [features(tmp_path / "run", epoch) for epoch in (0, 1, 2)] == [[], ["gradients"], ["gradients"]]
    checkpoint = open_checkpoint(tmp_path / "run")
    assert set(checkpoint.blobs) == {"model", "optimizer", "loader", "rng"}
    assert not any("@grad" in name for name in checkpoint.load_tensors("*"))
    other = nn.Linear(4, 1)
    checkpoint.load({"model": other})
    assert other.weight.grad is None
    assert checkpoint.load_tensors("@grad.*")["@grad.model.weight"].shape == (1, 4)


def test_epochs_whose_windows_are_closed_have_no_gradients(tmp_path: Path) -> None:
    """A window ends with the loader where the loop was told of windows: nothing is added to its epochs."""
    train(tmp_path / "run", 2, window=3, accumulate=True)
    assert [features(tmp_path / "run", epoch) for epoch in (0, 1, 2)] == [[], [], []]


def test_a_second_training_in_one_process_forgets_the_gradients_of_the_first(tmp_path: Path) -> None:
    """What a failed attempt had added up is not added to the window of the next one."""
    whole = train(tmp_path / "whole", 3, window=2)
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = EpochLoader((torch.randn(16, 4), torch.randn(16, 1)), batch_size=4)
    fails = {7}

    def start() -> None:
        job = Job("windows", blobs={"model": model, "optimizer": optimizer, "loader": loader})

        @job.epoch
        def epoch(ctx) -> None:
            for x, y in ctx.steps(loader):
                ((model(x) - y).square().mean() / 2).backward()
                if ctx.total_steps in fails:
                    fails.clear()
                    raise OSError("once")
                if ctx.total_steps % 2 == 0:
                    optimizer.step()
                    optimizer.zero_grad()

        job.stop_when(max_epochs(3))
        JobRunner(job, tmp_path / "run", best=None, code=False).train(LocalSession())

    with pytest.raises(Exception, match="once"):
        start()
    start()
    assert torch.equal(model.weight, whole.weight) and torch.equal(model.bias, whole.bias)


def test_a_frozen_epoch_with_gradients_is_resumed(tmp_path: Path) -> None:
    """Gradients of every form, as an earlier version stored them, are there when the next epoch begins."""
    spec = importlib.util.spec_from_file_location("make_gradients", GOLDEN / "make_gradients.py")
    assert spec and spec.loader
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    shutil.copytree(GOLDEN / "epochs_gradients", tmp_path / "epochs")
    seen: dict[str, torch.Tensor | None] = {}
    manager = MultiNodeCheckpointManager(str(tmp_path / "epochs"))
    JobRunner(made.job(seen, 2), manager, resume_from_epoch=1).train(LocalSession(["trainer_0"]))
    for name, grad in made.expected().items():
        if grad is None:
            assert seen[name] is None
        else:
            assert seen[name].layout == grad.layout and torch.equal(seen[name].to_dense(), grad.to_dense())


class Trainer:
    """An object of the user's that saves its model itself."""

    def __init__(self) -> None:
        self.model = Model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def state_dict(self) -> dict[str, object]:
        return {"model": self.model.state_dict()}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.model.load_state_dict(state["model"])


def test_an_open_window_of_a_model_inside_of_an_object_is_reported() -> None:
    """Its gradients have no names, so no save has them: one warning says so, and what avoids it."""
    watch_steps()
    trainer = Trainer()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            trainer.optimizer.zero_grad()
            trainer.model().backward()
            trainer.optimizer.step()
            assert names(in_trainer=trainer) == set()
        trainer.optimizer.zero_grad()
        trainer.model().backward()
        gradients._warned.clear()
        assert names(in_trainer=trainer, model=trainer.model) == {
            one.replace("m.", "model.", 1) for one in ALL
        }
    with pytest.warns(UserWarning, match=r"parameters of SGD that no blob has by name.*accumulate=n"):
        assert names(in_trainer=trainer) == set()


class Holder:
    """An object that saves what it holds, wherever that is."""

    def __init__(self, held: object, state: Callable[[], dict[str, object]]) -> None:
        self.held, self.state_dict = held, state

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Nothing is loaded here."""


def held_by(kind: str) -> tuple[Holder, torch.optim.Optimizer, Callable[[], torch.Tensor]]:
    """An object that has a model in some way, its optimizer, and the loss."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if kind == "parameters alone":
        table = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([table], lr=0.1)
        return Holder({"table": table}, lambda: {"table": table}), optimizer, lambda: table.sum()
    held = {"a dict of dicts": {"g": {"net": model}}, "its optimizer": optimizer}
    return Holder(held.get(kind, Holder(model, model.state_dict)), model.state_dict), optimizer, model


@pytest.mark.parametrize("kind", ["another object", "a dict of dicts", "its optimizer", "parameters alone"])
def test_an_open_window_deep_inside_of_an_object_is_reported(kind) -> None:
    """Gradients of what an optimizer steps and no blob has by name are reported, wherever they are held."""
    watch_steps()
    holder, optimizer, loss = held_by(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
            assert names(holder=holder) == set()
        optimizer.zero_grad()
        assert names(holder=holder) == set()
        loss().backward()
    gradients._warned.clear()
    with pytest.warns(UserWarning, match=r"parameters of SGD that no blob has by name.*accumulate=n"):
        assert names(holder=holder) == set()


def test_gradients_that_the_next_step_clears_are_not_reported() -> None:
    """The loss of one model adds to what the step of another left behind, as in a GAN: no window is open."""
    watch_steps()
    gradients._warned.clear()
    judge, maker = Model(), torch.nn.Parameter(torch.ones(3))
    holder = Holder({"judge": judge}, judge.state_dict)
    optimizers = [torch.optim.SGD(judge.parameters(), lr=0.1), torch.optim.SGD([maker], lr=0.1)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            for optimizer, loss in zip(optimizers, (judge, lambda: judge() * maker.sum()), strict=True):
                optimizer.zero_grad()
                loss().backward()
                optimizer.step()
            assert names(holder=holder) == set()
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=False)
        assert names(holder=holder) == set()
        look = Holder({"loss": (never := Model())}, never.state_dict)  # its gradients are of no account
        never().backward()
        assert names(holder=holder, look=look) == set()
