"""Objects into leaves: the names that are part of the disk, roles, wrappers, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from leaf_store import load, save
from torch import nn

from torchrelay.checkpoint.format.mesh import Mesh
from torchrelay.checkpoint.format.mesh_geometry import Sharded
from torchrelay.checkpoint.state.flatten import leaves_of, parameter_names
from torchrelay.checkpoint.state.leaf import Leaf, Role, spec_of
from torchrelay.errors import BlobError

GOLDEN = Path(__file__).parents[1] / "golden" / "leaf_names.json"


class Tally:
    """Has state_dict and load_state_dict, and a tensor and a tuple in its state."""

    def __init__(self):
        self.state = {"count": 3, "spans": [(1, 2)], "sums": [torch.zeros(2)]}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
        self.encoder = nn.Linear(2, 2, bias=False)
        self.decoder = nn.Linear(2, 2, bias=False)
        self.decoder.weight = self.encoder.weight
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def forward(self, x):
        return self.decoder(self.encoder(self.features(x).mean((2, 3))))


def golden_objects():
    torch.manual_seed(0)
    model = ConvNet()
    lonely = nn.Parameter(torch.ones(2))
    adamw = torch.optim.AdamW(model.parameters(), lr=0.1)
    momentum = torch.optim.SGD([{"params": model.parameters()}, {"params": [lonely]}], lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(adamw, max_lr=0.2, total_steps=10)
    (model(torch.randn(2, 1, 4, 4)).sum() + lonely.sum()).backward()
    momentum.step(), adamw.step(), scheduler.step()
    return {
        "model": model,
        "optimizer": adamw,
        "momentum": momentum,
        "scheduler": scheduler,
        "ema": torch.zeros(2),
        "tally": Tally(),
        "best": {"accuracy": 0.5},
    }


def described(leaf: Leaf):
    spec = spec_of(leaf)
    form = str(spec) + (f" = {spec.alias_of}" if spec.alias_of else "")
    return [spec.name, str(spec.role), spec.group, form]


def test_leaf_names_are_frozen():
    """Names, roles, groups and forms of a usual set of blobs never change: they are part of the disk."""
    found = [described(leaf) for leaf in leaves_of(golden_objects())]
    assert found == json.loads(GOLDEN.read_text())


def test_listing_leaves_changes_nothing_and_copies_no_tensor():
    """Two listings are alike, and tensor leaves share the memory of the user's."""
    objects = golden_objects()
    first = save(objects)
    assert save(objects).content == first.content
    weight = next(leaf for leaf in leaves_of(objects) if leaf.name == "model.encoder.weight")
    assert weight.content.data_ptr() == objects["model"].encoder.weight.data_ptr()
    assert not weight.content.requires_grad


def test_the_first_registered_name_wins_across_blobs():
    """A part of a module that is a blob of its own is stored once, under the name that came first."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    leaves = leaves_of({"part": model[0], "whole": model})
    assert [(leaf.name, leaf.alias_of) for leaf in leaves] == [
        ("part.weight", None),
        ("whole.0.weight", "part.weight"),
    ]
    assert parameter_names({"whole": model, "part": model[0]}) == {id(model[0].weight): "whole.0.weight"}


@pytest.fixture
def gloo(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_wrapped_modules_have_the_names_of_bare_ones(gloo):
    """DDP and torch.compile leave no trace in names, inside another module and in optimizer state too."""
    bare = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    ddp = nn.parallel.DistributedDataParallel(bare)
    compiled = torch.compile(ddp)
    nested = nn.ModuleDict({"module": torch.compile(nn.Linear(2, 2)), "_orig_mod": nn.Linear(2, 2)})
    expected = [leaf.name for leaf in leaves_of({"model": bare})]
    for wrapped in (ddp, compiled, torch.compile(bare)):
        assert [leaf.name for leaf in leaves_of({"model": wrapped})] == expected
    assert [leaf.name for leaf in leaves_of({"n": nested})] == [
        "n.module.weight", "n.module.bias", "n._orig_mod.weight", "n._orig_mod.bias",
    ]  # fmt: skip
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    leaves = {leaf.name: leaf for leaf in leaves_of({"model": ddp, "optimizer": optimizer})}
    assert leaves["optimizer.param_groups.0.params"].content.json == [
        "model.0.weight", "model.0.bias", "model.1.weight", "model.1.bias",
    ]  # fmt: skip


def test_a_checkpoint_of_a_wrapped_module_fits_the_bare_one_and_back(gloo):
    """The same epoch is loaded with and without DDP and torch.compile."""
    source = nn.Linear(3, 2)
    saved = save({"model": torch.compile(nn.parallel.DistributedDataParallel(source))})
    for wrap in (lambda m: m, nn.parallel.DistributedDataParallel, torch.compile):
        target = nn.Linear(3, 2)
        load(saved, {"model": wrap(target)})
        assert torch.equal(target.weight, source.weight)


def test_parameters_of_no_registered_module_are_stored_with_the_optimizer():
    """Training goes on right even if only the optimizer is registered."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    leaves = {leaf.name: leaf for leaf in leaves_of({"optimizer": optimizer})}
    assert leaves["optimizer.param.0.0"].role is Role.PARAMETER
    assert leaves["optimizer.param_groups.0.params"].content.json == ["optimizer.param.0.0"]


def test_names_that_read_alike_stay_apart():
    """A dot in a key and a level of a tree are different things, and both come back."""
    value = {"a.b": torch.tensor(1), "a": {"b": torch.tensor(2)}, "c": [torch.tensor(3)], 4: torch.tensor(4)}
    saved = save({"v": value})
    assert set(saved.tensors) == {"v.a.b", "v.a.b~2", "v.c.0", "v.4"}
    created = load(saved, {})["v"]
    assert [int(created["a.b"]), int(created["a"]["b"]), int(created["c"][0]), int(created[4])] == [
        1,
        2,
        3,
        4,
    ]


def test_optimizers_with_their_own_state_dict_are_asked_for_it():
    """A subclass that overrides state_dict, and a hooked instance, are stateful objects in group optim."""

    class Own(torch.optim.SGD):
        def state_dict(self):
            return {"mine": 1}

    hooked = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    hooked.register_state_dict_post_hook(lambda _, state: {**state, "extra": 1})
    for optimizer in (Own([nn.Parameter(torch.ones(1))], lr=0.1), hooked):
        (leaf,) = leaves_of({"o": optimizer})
        assert (leaf.name, leaf.role, leaf.group) == ("o", Role.STATE, "optim")


class Tagged(torch.Tensor):
    pass


REFUSED = {
    "meta": (lambda: nn.Linear(2, 2, device="meta"), "blob.weight is a meta tensor.*to_empty"),
    "lazy": (lambda: nn.LazyLinear(2), "blob.weight is not initialised yet.*forward"),
    "sparse": (lambda: torch.eye(2).to_sparse(), "blob has layout torch.sparse_coo.*values"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "blob is a nested tensor"),
    "subclass": (lambda: torch.ones(2).as_subclass(Tagged), r"blob is a .*Tagged.*as_subclass"),
    "expanded": (lambda: torch.ones(1).expand(3), "blob is expanded.*clone"),
    "function": (lambda: {"a": [1, print]}, r"blob\.a\[1\] is a .*builtin_function.*state_dict"),
    "loader": (lambda: torch.utils.data.DataLoader([1]), "blob is a DataLoader, which has no state to save"),
    "class": (lambda: Tally, "blob is a .*type, which cannot be stored"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_stored_is_refused_by_name(name):
    """The message has the path inside the blob, the type and the way out."""
    make, message = REFUSED[name]
    with pytest.raises(BlobError, match=message):
        leaves_of({"blob": make()})


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantised_tensors_are_refused_by_name():
    """Their scales lie outside of the elements."""
    with pytest.raises(BlobError, match=r"blob.x is quantised"):
        leaves_of({"blob": {"x": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)}})


def test_a_state_dict_that_raises_is_named():
    """The user's exception is shown with the blob's name."""

    class Broken(Tally):
        def state_dict(self):
            raise KeyError("gone")

    with pytest.raises(BlobError, match=r"state_dict\(\) of blob 'b' \(Broken\) raised KeyError"):
        leaves_of({"b": Broken()})


def test_state_of_a_removed_parameter_is_refused():
    """State that no group's parameter owns has no name to be stored under; the parameter is named."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    gone = nn.Parameter(torch.ones(3))
    optimizer.state[gone] = {"momentum_buffer": None}
    for others, said in (({}, r"a parameter of shape \[3\]"), ({"gone": gone}, "gone")):
        with pytest.raises(BlobError, match=f"'o' has state of {said}, which is in none of its groups"):
            leaves_of({**others, "o": optimizer})


def test_sharded_tensors_are_described_whole(gloo):
    """The spec of a DTensor has the shape of the whole, and says who has which part; Partial has none."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    (leaf,) = leaves_of({"x": distribute_tensor(torch.ones(2, 3), mesh, [Shard(-1)])})
    spec = spec_of(leaf)
    assert (spec.shape, spec.nbytes, spec.sharding) == ((2, 3), 24, Mesh((0,), (1,), (Sharded(1),)))
    (leaf,) = leaves_of({"x": DTensor.from_local(torch.ones(2), mesh, [Partial()])})
    with pytest.raises(BlobError, match=r"'x' is a DTensor with placement P.*redistribute"):
        spec_of(leaf)
