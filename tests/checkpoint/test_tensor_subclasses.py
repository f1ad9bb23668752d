"""Tensor subclasses: wrappers come back through a live object of their kind, others whole or not at all."""

import dataclasses
import enum
import json
import subprocess
from pathlib import Path

import pytest
import torch
from leaf_store import load, save
from torch import nn
from torchrun import clean_environment
from two_tensor import Tagged, TaggedParameter, TwoTensor, two
from warm import PLACE, server, warmed

import torchrelay
from torchrelay import Job, JobRunner, max_epochs, open_checkpoint
from torchrelay.checkpoint.state.flatten import leaves_of
from torchrelay.checkpoint.state.names import check_recreatable
from torchrelay.errors import BlobError


class Layer(nn.Module):
    """A wrapper as parameter and as buffer, and plain ones beside them."""

    def __init__(self, seed, group=4):
        super().__init__()
        self.weight = nn.Parameter(two(seed, group=group))
        self.bias = nn.Parameter(torch.full((3,), float(seed)))
        self.register_buffer("scale", two(seed + 50, (3,)))
        self.plain = nn.Buffer(torch.full((2,), float(seed)))


def inner(layer):
    return [layer.weight.a, layer.weight.b, layer.scale.a, layer.scale.b, layer.bias, layer.plain]


def same(left, right):
    return all(torch.equal(x, y) for x, y in zip(left, right, strict=True))


def test_a_wrapper_is_stored_by_its_inner_tensors_and_a_description():
    """The names of the inner tensors follow the tensor's own; its class is text to compare by."""
    found = {leaf.name: leaf for leaf in leaves_of({"m": Layer(0)})}
    assert list(found) == [
        *("m.weight", "m.weight.a", "m.weight.b", "m.bias"),
        *("m.scale", "m.scale.a", "m.scale.b", "m.plain"),
    ]
    said = found["m.weight"].content.json
    assert (
        said["class"].endswith("TwoTensor")
        and said["inner"] == ["a", "b"]
        and "'group': 4" in said["context"]
    )
    assert [str(found[name].role) for name in ("m.weight", "m.weight.a", "m.scale.b")] == [
        *("subclass", "parameter", "buffer"),
    ]


def test_a_wrapper_is_loaded_in_place():
    """The live tensors, and so what optimizers and closures hold, stay the same objects."""
    saved, target = save({"m": Layer(0)}), Layer(9)
    before = [id(one) for one in (target.weight, target.weight.a, target.scale.b)]
    load(saved, {"m": target})
    assert same(inner(target), inner(Layer(0)))
    assert [id(one) for one in (target.weight, target.weight.a, target.scale.b)] == before
    assert isinstance(target.weight, TwoTensor) and isinstance(target.weight, nn.Parameter)


def test_tied_wrappers_are_stored_once():
    """Two names of one wrapper share its inner tensors' bytes."""
    pair = nn.Module()
    pair.one = nn.Parameter(two(1))
    pair.two = pair.one
    saved = save({"m": pair})
    assert sorted(saved.tensors) == ["m.one.a", "m.one.b"]
    target = nn.Module()
    target.one = nn.Parameter(two(5))
    target.two = target.one
    load(saved, {"m": target})
    assert torch.equal(target.two.b, two(1).b)


def unlike(change):
    target = Layer(9)
    change(target)
    return target


@pytest.mark.parametrize(
    ("change", "message"),
    {
        "context": (lambda m: setattr(m, "weight", nn.Parameter(two(9, group=8))), "'group': 8.*'group': 4"),
        "shape": (lambda m: setattr(m, "weight", nn.Parameter(two(9, (4, 3)))), r"\[4, 3\].*\[3, 4\]"),
        "plain here": (lambda m: setattr(m, "weight", nn.Parameter(torch.ones(3, 4))), "float32.*TwoTensor"),
        "plain there": (lambda m: setattr(m, "bias", nn.Parameter(two(9, (3,)))), r"TwoTensor.*float32\[3\]"),
    }.values(),
)
def test_a_wrapper_of_another_description_is_refused(change, message):
    """Inner tensors of another context mean other numbers: nothing is changed, both are named."""
    saved, target = save({"m": Layer(0)}), unlike(change)
    before = target.scale.a.clone()
    with pytest.raises(BlobError, match=rf"m\.\w+ is .*{message}"):
        load(saved, {"m": target})
    assert torch.equal(target.scale.a, before)


class Color(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Scheme:
    bits: int
    color: Color


def test_contexts_of_plain_parts_have_a_text_and_others_are_refused():
    """Equal contexts have equal texts, others differ; an object without a text is named with the remedy."""
    contexts = [None, 4, "4", (4,), [4], {"a": Scheme(4, Color.RED)}, {"a": Scheme(8, Color.RED)}, {4}, int]
    texts = {json.dumps(described(context), sort_keys=True) for context in contexts}
    assert len(texts) == len(contexts)
    assert described({"b": 1, "a": 2}) == described({"a": 2, "b": 1})
    with pytest.raises(
        BlobError, match=r"the context of x \(.*TwoTensor\) holds a .*object, which has no text"
    ):
        described(object())


def described(context):
    tensor = two(0)
    tensor.group = context
    (leaf, *_) = leaves_of({"x": tensor})
    return leaf.content.json


def test_an_optimizer_of_wrappers_comes_back_exactly_into_a_fresh_one():
    """State that a fresh optimizer lacks is built by the parameter's own class."""
    layer = Layer(0)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, foreach=False)
    step(layer, optimizer)
    saved = save({"m": layer, "o": optimizer})
    target = Layer(9)
    fresh = torch.optim.AdamW(target.parameters(), lr=0.5, foreach=False)
    load(saved, {"m": target, "o": fresh})
    found, wanted = fresh.state[target.weight]["exp_avg"], optimizer.state[layer.weight]["exp_avg"]
    assert isinstance(found, TwoTensor) and torch.equal(found.a, wanted.a) and torch.equal(found.b, wanted.b)
    step(layer, optimizer)
    step(target, fresh)
    assert same(inner(layer), inner(target))


def step(layer, optimizer):
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter) * 0.5
    optimizer.step()


def test_state_of_another_class_than_its_parameter_is_refused():
    """A fresh optimizer could not show what it is like."""
    parameter = nn.Parameter(torch.ones(3, 4))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state[parameter] = {"momentum_buffer": two(0)}
    with pytest.raises(
        BlobError, match=r"o\.state\.o\.param\.0\.0\.momentum_buffer is a .*TwoTensor, which a load"
    ):
        leaves_of({"o": optimizer})


def eight_bit(directory, epochs):
    program = Path(__file__).parents[1] / "programs/eight_bit.py"
    arguments = warmed([str(program), str(directory), str(epochs)])
    environment = clean_environment({PLACE: server()})
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    return dict(map(json.loads, done.stdout.splitlines()))


def test_state_of_eight_bits_resumes_or_is_refused_with_advice_that_works(tmp_path):
    """Wrappers that only the optimizer makes come back in another process, or the save says what would."""
    first = eight_bit(tmp_path / "run", 2)
    assert "optimizer.state.model.weight.m is a __main__.State8, which a load could not" in first["closed"]
    assert "state_dict_to_load_into()" in first["closed"]
    resumed, whole = eight_bit(tmp_path / "run", 4), eight_bit(tmp_path / "whole", 4)
    for how in ("optimizer", "around", "showing", "advised"):
        (steps, found), (all_steps, wanted) = json.loads(resumed[how]), json.loads(whole[how])
        assert (steps, all_steps, found) == (2, 4, wanted), how


class Holder:
    """An object with a wrapper in its state."""

    def __init__(self, seed):
        self.tensor = two(seed)

    def state_dict(self):
        return {"inner": {"x": self.tensor}, "n": [1, 2]}

    def load_state_dict(self, state):
        self.tensor = state["inner"]["x"]


def test_a_wrapper_in_a_state_dict_is_built_by_the_live_one():
    """`load_state_dict` gets a tensor of the class that the object has there now."""
    saved, target = save({"h": Holder(3)}), Holder(8)
    load(saved, {"h": target})
    assert isinstance(target.tensor, TwoTensor) and target.tensor.group == 4
    assert torch.equal(target.tensor.a, two(3).a) and torch.equal(target.tensor.b, two(3).b)
    bare = Holder(8)
    bare.tensor = torch.ones(1)
    with pytest.raises(BlobError, match=r"h\.inner\.x is .*TwoTensor.*no such tensor here"):
        load(saved, {"h": bare})


def test_a_type_without_content_of_its_own_is_loaded_in_place():
    """Subclasses of Parameter and Tensor in a module keep their type; with attributes they are refused."""

    def module(fill):
        made = nn.Module()
        made.p = TaggedParameter(torch.full((2,), fill))
        made.register_buffer("t", torch.full((2,), fill).as_subclass(Tagged))
        return made

    target = module(0.0)
    load(save({"m": module(7.0)}), {"m": target})
    assert type(target.p) is TaggedParameter and type(target.t) is Tagged
    assert torch.equal(target.p.detach().as_subclass(torch.Tensor), torch.full((2,), 7.0))
    assert torch.equal(target.t.as_subclass(torch.Tensor), torch.full((2,), 7.0))
    target.p.scale = 3
    with pytest.raises(BlobError, match=r"m\.p is a .*TaggedParameter with additional attributes \(scale\)"):
        leaves_of({"m": target})


def masked():
    from torch.masked import masked_tensor

    return masked_tensor(torch.ones(2), torch.tensor([True, False]))


def fake():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(2)


KINDS = {
    "masked": (masked, "m.x is a MaskedTensor, not a plain tensor"),
    "fake": (fake, "m.x is a "),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
        "m.x is a nested tensor",
    ),
    "csr": (lambda: torch.eye(2).to_sparse_csr(), "m.x has layout torch.sparse_csr"),
    "meta inside": (lambda: TwoTensor(*[torch.empty(2, device="meta")] * 2), r"m\.x\.a is a meta tensor"),
    "sparse inside": (lambda: TwoTensor(*[torch.eye(2).to_sparse()] * 2), r"m\.x\.a has layout"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", KINDS)
def test_other_kinds_of_tensors_are_refused_by_name(name):
    """Nothing is stored that would come back as something else."""
    make, message = KINDS[name]
    module = nn.Module()
    module.register_buffer("x", make())
    with pytest.raises(BlobError, match=message):
        leaves_of({"m": module})


def test_a_wrapper_that_nobody_registered_is_refused():
    """A resumed run would have nothing to load it into."""
    check_recreatable({"x": two(0)}, ["x"])
    with pytest.raises(BlobError, match=r"'x' .TwoTensor. was put into the workspace"):
        check_recreatable({"x": two(0)}, [])


def trained(epochs, where, *, asynchronous=False):
    torchrelay.seed(3)
    layer = Layer(0)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, foreach=False)
    job = Job("subclasses", blobs=dict(m=layer, o=optimizer))
    job.epoch(lambda ctx: step(layer, optimizer))
    job.stop_when(max_epochs(epochs))
    JobRunner(job, where, asynchronous=asynchronous, reuse=True).train()
    return layer


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_with_wrappers_resumes_bit_by_bit(tmp_path, asynchronous):
    """Interrupted or not, the run ends in the same bits, and its epochs load elsewhere."""
    whole = trained(4, tmp_path / "whole", asynchronous=asynchronous)
    trained(2, tmp_path / "parts", asynchronous=asynchronous)
    resumed = trained(4, tmp_path / "parts", asynchronous=asynchronous)
    assert same(inner(whole), inner(resumed))
    checkpoint, target = open_checkpoint(tmp_path / "parts"), Layer(9)
    checkpoint.load({"m": target})
    assert same(inner(target), inner(whole))
    assert torch.equal(checkpoint.load_tensors("m.weight.a")["m.weight.a"], whole.weight.a)
    renamed = Layer(8)
    checkpoint.load({"other": renamed}, rename={"m": "other"})
    assert same(inner(renamed), inner(whole))


def test_a_run_goes_on_saving_a_wrapper_of_an_object_that_it_resumed_under_another_name(tmp_path):
    """What a load found a place for counts under the names of today."""
    for epochs, name in ((1, "old"), (3, "new")):
        job = Job("renamed", blobs={name: Holder(0)})
        job.epoch(lambda ctx: None)
        job.stop_when(max_epochs(epochs))
        JobRunner(job, tmp_path, code=False, rename={"old": "new"} if epochs > 1 else None).train()
    assert same(list(open_checkpoint(tmp_path).load_tensors("new.inner.x.a").values()), [two(0).a])


def test_wrappers_in_a_blob_file(tmp_path):
    """A file gives the inner tensors by name, and loads into a workspace's objects."""
    torchrelay.save_blobs(tmp_path / "f", {"m": Layer(0), "x": two(1)})
    found = torchrelay.load_blobs(tmp_path / "f")
    assert torch.equal(found["m.weight.b"], two(0).b) and torch.equal(found["x.a"], two(1).a)
    job, target, alone = Job("into"), Layer(9), two(7)
    job.blobs(m=target, x=alone)
    job.epoch(lambda ctx: ctx.load_blobs(tmp_path / "f"))
    job.stop_when(max_epochs(1))
    JobRunner(job, tmp_path / "run").train()
    assert same(inner(target), inner(Layer(0))) and torch.equal(alone.b, two(1).b)
