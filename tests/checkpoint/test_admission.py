"""What a save admits a load gives back; what a load cannot write into is refused before anything changes."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import torchrelay
from torchrelay import Job, JobRunner, max_epochs, open_checkpoint
from torchrelay.errors import BlobError


class Holder:
    """An object whose state is whatever it was given."""

    def __init__(self, state=None):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_large_arrays_and_lists_in_objects_are_resumed(tmp_path):
    """Arrays and numbers above 1 MiB in values and in objects come back equal, of the same types."""
    array = numpy.random.default_rng(0).random((400, 500))
    array.flags.writeable = False
    state = {
        "array": array,
        "twice": [array],
        "turned": array.T,
        "texts": numpy.array(["abc" * 10] * 20_000),
        "other order": numpy.arange(300_000, dtype=">i4"),
        "numbers": list(range(-3, 200_000)),
        "floats": (0.5,) * 140_000,
    }

    def train(epochs):
        holder = Holder({})
        job = Job("large", blobs={"holder": holder, "order": [0]})

        @job.init
        def begin(ctx):
            holder.state = dict(state)
            ctx["order"] = state["numbers"]

        @job.epoch
        def look(ctx):
            seen.append((holder.state, ctx["order"]))

        job.stop_when(max_epochs(epochs))
        seen = []
        JobRunner(job, tmp_path / "run", best=None).train()
        return seen[0]

    train(1)
    found, order = train(2)
    assert order == state["numbers"]
    assert open_checkpoint(tmp_path / "run").load_values("order")["order"] == order
    assert list(found) == list(state)
    for key, value in state.items():
        if isinstance(value, numpy.ndarray):
            assert type(found[key]) is numpy.ndarray and found[key].dtype == value.dtype
            assert numpy.array_equal(found[key], value) and found[key].flags.writeable
        elif key != "twice":
            assert type(found[key]) is type(value) and found[key] == value
    assert numpy.array_equal(found["twice"][0], array)


def test_a_file_of_blobs_keeps_the_numbers_of_values_as_they_are(tmp_path):
    """`dtype=` changes tensors, not the numbers and arrays of a value, however they are stored."""
    value = {"floats": [0.1] * 140_000, "array": numpy.full(200_000, 0.1)}
    torchrelay.save_blobs(tmp_path / "v.safetensors", {"v": value}, dtype=torch.bfloat16)
    found = torchrelay.load_blobs(tmp_path / "v.safetensors")["v"]
    assert found["floats"] == value["floats"]
    assert numpy.array_equal(found["array"], value["array"]) and found["array"].dtype == numpy.float64


STORED = torch.arange(9.0).reshape(3, 3)


class Typed(torch.Tensor):
    """A subclass that adds a type and nothing else."""


def freed():
    tensor = torch.zeros(3, 3)
    tensor.untyped_storage().resize_(0)
    return tensor


def inference():
    with torch.inference_mode():
        return torch.zeros(3, 3)


REFUSED = {
    "sparse": (lambda: torch.zeros(3, 3).to_sparse(), "layout torch.sparse_coo"),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), "layout torch.sparse_csr"),
    "mkldnn": (lambda: torch.zeros(3, 3).to_mkldnn(), "mkldnn; save to_dense"),
    "expanded": (lambda: torch.zeros(3).expand(3, 3), "is expanded.*clone"),
    "windows": (lambda: torch.zeros(5).unfold(0, 3, 1), "share memory.*clone"),
    "overlapping": (lambda: torch.zeros(9).as_strided((3, 3), (2, 1)), "share memory.*clone"),
    "fake": (
        lambda: FakeTensorMode().from_tensor(torch.zeros(3, 3)),
        "FakeTensor.*outside of FakeTensorMode",
    ),
    "functional": (lambda: torch._to_functional_tensor(torch.zeros(3, 3)), "no memory"),
    "freed": (freed, "no memory"),
    "quantised": (lambda: torch.quantize_per_tensor(torch.zeros(3, 3), 1, 0, torch.qint8), "quantised"),
}
"""Tensors that neither a save nor a load takes; `meta` has tests of its own."""

LOADED = {
    "plain": lambda: torch.zeros(3, 3),
    "transposed": lambda: torch.zeros(3, 3).t(),
    "strided": lambda: torch.zeros(6, 3)[::2],
    "woven": lambda: torch.zeros(15).as_strided((3, 3), (2, 5)),
    "typed": lambda: torch.zeros(3, 3).as_subclass(Typed),
    "no leaf of autograd": lambda: torch.zeros(3, 3, requires_grad=True) * 1,
    "made in inference mode": inference,
    "strided, made in inference mode": lambda: inference().t(),
    "negated view": lambda: torch._neg_view(torch.zeros(3, 3)),
    "of an array": lambda: torch.from_numpy(numpy.zeros((3, 3), "f4")),
    "shared": lambda: torch.zeros(3, 3).share_memory_(),
}


def module_of(tensor):
    module = nn.Module()
    module.register_buffer("x", tensor)
    return module


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A file and an epoch with `module` and `tensor`."""
    root = tmp_path_factory.mktemp("stored")
    blobs = {"module": module_of(STORED.clone()), "tensor": STORED.clone()}
    torchrelay.save_blobs(root / "blobs.safetensors", blobs)
    job = Job("stored", blobs=blobs)
    job.epoch(lambda ctx: None)
    job.stop_when(max_epochs(1))
    JobRunner(job, root / "run", best=None).train()
    return root


def loads(root, objects):
    """Every way to load into objects, all or nothing and not."""
    for atomic in (True, False):
        yield lambda a=atomic: torchrelay.load_into(root / "blobs.safetensors", objects, atomic=a)
        yield lambda a=atomic: open_checkpoint(root / "run").load(objects, atomic=a)


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:.*quantize")
@pytest.mark.parametrize("kind", REFUSED)
def test_a_load_refuses_what_a_save_refuses_before_anything_changes(stored, kind, tmp_path):
    """The error names leaf and remedy; objects beside it and the disk stay as they were."""
    make, why = REFUSED[kind]
    other = torch.zeros(3, 3)
    for name, leaf, wrap in (
        ("module", r"module\.x", module_of),
        ("tensor", "tensor", lambda tensor: tensor),
    ):
        target = wrap(make())
        for load in loads(stored, {name: target, "module" if name == "tensor" else "tensor": other}):
            with pytest.raises(BlobError, match=f"{leaf} .*{why}"):
                load()
            assert not other.any()
        if kind not in ("expanded", "windows", "overlapping") or name == "module":
            with pytest.raises(BlobError, match=f"{leaf} .*{why}"):
                torchrelay.save_blobs(tmp_path / "refused.safetensors", {name: target})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", LOADED)
def test_what_a_load_takes_has_the_stored_content_afterwards(stored, kind):
    """Views, foreign memory, types and tensors of inference mode hold the stored values, in place."""
    for number in range(4):
        for name, wrap in (("module", module_of), ("tensor", lambda tensor: tensor)):
            tensor = LOADED[kind]()
            [*loads(stored, {name: wrap(tensor)})][number]()
            assert torch.equal(tensor.detach(), STORED)


MAPPED = """
import sys, warnings
import numpy, torch, torchrelay
from torch import nn
from torchrelay import open_checkpoint
from torchrelay.errors import BlobError
warnings.simplefilter("ignore")
file, run, mapped = sys.argv[1:4]

def tensor(mode):
    return torch.from_numpy(numpy.memmap(mapped, mode=mode, dtype="f4", shape=(3, 3)))

def module(found):
    one = nn.Module()
    one.register_buffer("x", found)
    return one

turned = tensor("r").t()
held = [("tensor", tensor("r")), ("module", module(tensor("r"))), ("tensor", turned)]
refused = 0
for name, found in held:
    for atomic in (True, False):
        for load in (
            lambda: torchrelay.load_into(file, {name: found}, atomic=atomic),
            lambda: open_checkpoint(run).load({name: found}, atomic=atomic),
        ):
            try:
                load()
            except BlobError as error:
                refused += f"read-only memory (it maps {mapped})" in str(error) and "clone()" in str(error)
torchrelay.save_states(file + ".zip", module(torch.ones(3, 3)))
try:
    torchrelay.load_states(file + ".zip", module(turned))
except BlobError as error:
    refused += "read-only memory" in str(error)
before = open(mapped, "rb").read()
private = tensor("c")
torchrelay.load_into(file, {"tensor": private})
torchrelay.load_into(file, {"tensor": torch.from_file(mapped, shared=False, size=9).reshape(3, 3)})
assert private[2, 2] == 8 and open(mapped, "rb").read() == before
shared = tensor("r+")
torchrelay.load_into(file, {"tensor": shared})
assert numpy.fromfile(mapped, dtype="f4")[8] == 8
print("refused", refused)
"""


def test_mapped_memory_that_can_only_be_read_is_refused_not_written(stored, tmp_path):
    """No load writes into a map for reading; a private map leaves the file alone, a shared one changes it."""
    numpy.zeros(9, "f4").tofile(tmp_path / "mapped")
    arguments = [str(stored / "blobs.safetensors"), str(stored / "run"), str(tmp_path / "mapped")]
    done = subprocess.run(
        [sys.executable, "-c", MAPPED, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ,
    )
    assert (done.returncode, done.stdout.split()[-2:]) == (0, ["refused", "13"]), done.stderr


def test_an_optimizer_of_meta_parameters_is_refused_with_the_order_that_works(tmp_path):
    """Nothing is loaded, and the error says to build the optimizer after the model has memory."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torchrelay.save_blobs(tmp_path / "o.safetensors", {"model": model, "optimizer": optimizer})
    with torch.device("meta"):
        other = nn.Linear(2, 2)
    with pytest.raises(BlobError, match=r"optimizer is an optimizer of parameters on the meta.*build.*after"):
        blobs = {"model": other, "optimizer": torch.optim.AdamW(other.parameters())}
        torchrelay.load_into(tmp_path / "o.safetensors", blobs)
    assert other.weight.is_meta


def tied():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    model[1].bias.requires_grad_(False)
    model[0].weight.note = "kept"
    return model


def same_states(one, other):
    left, right = one.state_dict(), other.state_dict()
    return list(left) == list(right) and all(map(torch.equal, left.values(), right.values()))


@pytest.mark.parametrize("place", ["file", "epoch"])
def test_modules_on_the_meta_device_get_memory(tmp_path, place):
    """A load gives tied parameters, buffers and single parameters memory, and keeps what they are."""
    torch.manual_seed(0)
    model = tied()
    with torch.device("meta"):
        whole = tied()
    part = tied()
    part[1].weight = nn.Parameter(torch.empty(3, device="meta"))
    kept = part[0].weight
    torchrelay.save_blobs(tmp_path / "m.safetensors", {"model": model})
    job = Job("meta", blobs={"model": model})
    job.epoch(lambda ctx: None)
    job.stop_when(max_epochs(1))
    JobRunner(job, tmp_path / "run", best=None).train()
    for other in (whole, part):
        if place == "file":
            torchrelay.load_into(tmp_path / "m.safetensors", {"model": other})
        else:
            open_checkpoint(tmp_path / "run").load({"model": other})
        assert same_states(other, model)
        assert other[2].weight is other[0].weight and other[0].weight.note == "kept"
        assert type(other[1].weight) is nn.Parameter and other[1].weight.requires_grad
        assert not other[1].bias.requires_grad and not other[1].running_mean.is_meta
        other(torch.ones(2, 3)).sum().backward()
    assert part[0].weight is kept


def test_a_leaf_that_is_excluded_stays_on_the_meta_device(tmp_path):
    """`exclude=` works for a module without content: what it names stays as it was."""
    job = Job("meta", blobs={"model": nn.Linear(2, 2)})
    job.epoch(lambda ctx: None)
    job.stop_when(max_epochs(1))
    JobRunner(job, tmp_path / "run", best=None).train()
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    open_checkpoint(tmp_path / "run").load({"model": model}, exclude=["model.bias"])
    assert model.bias.is_meta and not model.weight.is_meta
    torchrelay.save_blobs(tmp_path / "m.safetensors", {"model": nn.Linear(2, 2)})
    torchrelay.load_into(tmp_path / "m.safetensors", {"model": model}, exclude=["model.weight"])
    assert not model.bias.is_meta


def test_meta_tensors_that_a_load_cannot_fill_are_refused(tmp_path):
    """Single tensors, and buffers that no checkpoint has, are named; the rest stays on the meta device."""
    torchrelay.save_blobs(tmp_path / "m.safetensors", {"model": nn.Linear(2, 2), "tensor": torch.ones(2)})
    with torch.device("meta"):
        model = nn.Linear(2, 2)
        model.register_buffer("table", torch.ones(2), persistent=False)
    with pytest.raises(BlobError, match=r"model\.table is on the meta device.*persistent=False"):
        torchrelay.load_into(tmp_path / "m.safetensors", {"model": model})
    assert model.weight.is_meta
    with pytest.raises(BlobError, match="tensor is a meta tensor without content"):
        torchrelay.load_into(tmp_path / "m.safetensors", {"tensor": torch.ones(2, device="meta")})
    model.table = torch.ones(2)
    torchrelay.load_into(tmp_path / "m.safetensors", {"model": model})
    assert not model.weight.is_meta


def test_lazy_modules_are_refused_until_they_have_shapes(tmp_path):
    """A lazy parameter or buffer, and an optimizer of them, are refused by name, on loads as on saves."""
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = tmp_path / "m.safetensors"
    torchrelay.save_blobs(path, {"model": model, "optimizer": optimizer})
    for other in (
        nn.Sequential(nn.LazyLinear(2), nn.BatchNorm1d(2)),
        nn.Sequential(nn.Linear(3, 2), nn.LazyBatchNorm1d()),
    ):
        with pytest.raises(BlobError, match=r"model\.[01]\.weight is not initialised yet"):
            torchrelay.save_blobs(tmp_path / "n.safetensors", {"model": other})
        with pytest.raises(BlobError, match=r"model\.[01]\.weight is not initialised yet"):
            torchrelay.load_into(path, {"model": other})
        with pytest.raises(BlobError, match="optimizer is an optimizer of parameters not initialised yet"):
            blobs = {"model": other, "optimizer": torch.optim.SGD(other.parameters(), lr=0.1)}
            torchrelay.load_into(path, blobs)


def test_what_a_load_makes_in_inference_mode_can_be_trained(tmp_path):
    """A load within `torch.inference_mode()` makes ordinary tensors."""
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    torchrelay.save_blobs(tmp_path / "m.safetensors", {"model": model, "optimizer": optimizer})
    with torch.device("meta"):
        other = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    third = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    fresh = torch.optim.SGD(third.parameters(), lr=0.1, momentum=0.9)
    with torch.inference_mode():
        torchrelay.load_into(tmp_path / "m.safetensors", {"model": other})
        torchrelay.load_into(tmp_path / "m.safetensors", {"model": third, "optimizer": fresh})
    for one in (other, third):
        one(torch.ones(2, 3)).sum().backward()
    fresh.step()


class Late(nn.Module):
    """Makes buffers when it is used: one was None, one not there, one grows."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Module()
        self.register_buffer("seen", None)
        self.register_buffer("grows", torch.zeros(0))
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x):
        if self.seen is None:
            self.seen = torch.zeros(2)
            self.inner.register_buffer("mask", torch.ones(2, dtype=torch.bool))
            self.inner.register_buffer("same", self.inner.mask)
        self.seen += x
        self.inner.mask.logical_not_()
        self.grows = torch.cat([self.grows, x])
        return self.weight * self.seen


def train_late(where, epochs, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = Job("late", blobs={"model": model, "optimizer": optimizer})

    @job.epoch
    def step(ctx):
        optimizer.zero_grad()
        model(torch.full((2,), float(ctx.epoch))).sum().backward()
        optimizer.step()

    job.stop_when(max_epochs(epochs))
    JobRunner(job, where, best=None).train()
    return model


def test_buffers_that_a_module_makes_late_are_resumed(tmp_path):
    """Buffers that were None, absent or of another shape at the start have the stored content; ties stay."""
    whole = train_late(tmp_path / "whole", 5, Late())
    train_late(tmp_path / "run", 2, Late())
    model = Late()
    grows = model.grows
    assert same_states(train_late(tmp_path / "run", 5, model), whole)
    assert len(model.grows) == 10 and model.inner.same is model.inner.mask and model.grows is not grows
    compiled = torch.compile(nn.Sequential(nn.Sequential(Late())), backend="eager")
    torchrelay.save_blobs(tmp_path / "late.safetensors", {"model": nn.Sequential(nn.Sequential(whole))})
    torchrelay.load_into(tmp_path / "late.safetensors", {"model": compiled})
    assert same_states(compiled._orig_mod[0][0], whole)


def test_a_module_that_differs_gets_no_buffers(tmp_path):
    """Where anything else does not fit, a stored buffer that the module lacks is a difference too."""
    torchrelay.save_blobs(tmp_path / "m.safetensors", {"model": nn.BatchNorm1d(2)})
    with pytest.raises(BlobError, match=r"only in the checkpoint: model\.running_mean") as caught:
        torchrelay.load_into(tmp_path / "m.safetensors", {"model": nn.Linear(2, 2)})
    assert "model.weight is float32[2, 2] here" in str(caught.value)
    other = nn.GroupNorm(1, 2)
    result = torchrelay.load_into(tmp_path / "m.safetensors", {"model": other}, strict=False)
    assert "model.running_mean" in result.unexpected and not list(other.buffers())
    with pytest.raises(
        BlobError, match=r"(?s)model\.weight is float32\[3\] here.*model\.running_mean is float32"
    ):
        torchrelay.load_into(tmp_path / "m.safetensors", {"model": nn.BatchNorm1d(3)})
