"""Leaves back into objects: in place, exactly, and nothing at all when anything does not fit."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from leaf_store import load, plan, save
from torch import nn

from torchrelay.checkpoint.state.names import check_recreatable
from torchrelay.errors import BlobError, DamagedError, PartiallyLoadedError


class Tally:
    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def same(left, right):
    """Whether two trees are alike, types and element types included."""
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64)
tensors = st.builds(
    lambda shape, dtype: (torch.arange(shape.numel()) % 3).reshape(shape).to(dtype),
    st.lists(st.integers(0, 3), max_size=3).map(torch.Size),
    st.sampled_from([*DTYPES, torch.complex128]),
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=4)
    | st.binary(max_size=4)
)
keys = st.text(max_size=3) | st.integers(-9, 9)
trees = st.recursive(
    scalars | tensors,
    lambda inner: (
        st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(deadline=None, max_examples=80)
@given(trees)
@example(torch.ones(2))
@example({"": torch.ones(1), "a.b": torch.ones(2), "a": {"b": torch.ones(3)}, "a.b~2": torch.ones(4)})
def test_any_tree_comes_back_as_it_was(tree):
    """Whatever state_dict returns of tensors and typed values, load_state_dict gets the same."""
    other = Tally(None)
    load(save({"tally": Tally(tree)}), {"tally": other})
    assert same(tree, other.state)


TENSORS = {
    "zero_dim": lambda: torch.tensor(3.5),
    "empty": lambda: torch.empty(0, 4),
    "transposed": lambda: torch.arange(6.0).reshape(2, 3).t(),
    "channels_last": lambda: torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "strided": lambda: torch.arange(10)[::3],
    "complex": lambda: torch.rand(3, dtype=torch.complex128),
    "conjugate": lambda: torch.rand(3, dtype=torch.complex64).conj(),
    "bool": lambda: torch.tensor([True, False]),
    "float8": lambda: torch.rand(4).to(torch.float8_e4m3fn),
    "parameter": lambda: nn.Parameter(torch.rand(2)),
    "int16": lambda: torch.tensor([[1, -2]], dtype=torch.int16),
    "parameter of truths": lambda: nn.Parameter(torch.tensor([True, False]), requires_grad=False),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_are_loaded_in_place_and_created_when_missing(name):
    """A registered tensor stays the same object in the same memory; without one a new tensor is made."""
    source, target = TENSORS[name](), TENSORS[name]()
    strides, address = target.stride(), target.data_ptr()
    with torch.no_grad():
        target.zero_()
    saved = save({"x": source})
    assert load(saved, {"x": target}) == {}
    created = load(saved, {})["x"]
    assert save({"x": target}).content == saved.content == save({"x": created}).content
    assert (target.stride(), target.data_ptr()) == (strides, address)
    assert type(created) is type(source) and created.requires_grad == source.requires_grad


def test_contiguous_memory_is_read_without_a_copy():
    """The bytes of a plain CPU parameter go straight into its memory; other layouts are staged."""
    plain, odd = nn.Linear(2, 3), nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
    saved = save({"plain": plain, "odd": odd})
    reads = {read.leaf: read for read in plan(saved, {"plain": plain, "odd": odd}).reads}
    assert reads["plain.weight"].memory().data_ptr() == plain.weight.data_ptr()
    assert reads["odd.weight"].destination is None
    assert reads["odd.weight"].memory().data_ptr() != odd.weight.data_ptr()


def tied(bias):
    net = nn.ModuleDict({"a": nn.Linear(2, 2, bias=bias), "b": nn.Linear(2, 2, bias=bias)})
    net["b"].weight = net["a"].weight
    return net


def test_tied_parameters_are_stored_and_read_once_and_stay_tied():
    """One tensor of two names is one leaf with an alias, and one read."""
    source, target = tied(False), tied(False)
    saved = save({"m": source})
    assert set(saved.tensors) == {"m.a.weight"}
    assert [read.leaf for read in plan(saved, {"m": target}).reads] == ["m.a.weight"]
    load(saved, {"m": target})
    assert target["a"].weight is target["b"].weight
    assert torch.equal(target["b"].weight, source["a"].weight)


def test_tied_in_the_checkpoint_and_apart_here_fills_both():
    """Every name gets the content that it had."""
    source = tied(False)
    target = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    load(save({"m": source}), {"m": target})
    assert torch.equal(target["a"].weight, source["a"].weight)
    assert torch.equal(target["b"].weight, source["a"].weight)


def test_tied_here_and_apart_in_the_checkpoint_is_refused():
    """One tensor cannot have two contents."""
    apart = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    with pytest.raises(BlobError, match=r"m\.b\.weight and m\.a\.weight are one tensor here"):
        load(save({"m": apart}), {"m": tied(True)})


def test_an_alias_can_be_loaded_without_the_blob_that_it_is_stored_in():
    """A partial load follows the alias to its first name."""
    net = nn.Sequential(nn.Linear(2, 2))
    saved = save({"whole": net, "part": net[0]})
    target = nn.Linear(2, 2)
    load(saved.only("part"), {"part": target})
    assert torch.equal(target.weight, net[0].weight)


def test_one_created_name_of_a_shared_tensor_is_the_live_one():
    """Two workspace names of one tensor are one tensor again."""
    total = torch.ones(2)
    saved = save({"total": total, "last": total})
    live = torch.zeros(2)
    assert load(saved, {"total": live})["last"] is live
    created = load(saved, {})
    assert created["total"] is created["last"]


def test_values_are_given_back_and_types_survive():
    """A JSON value is no object to load into: the workspace gets the stored one."""
    value = {"best": (1, 2.5), "seen": {3, 4}, "big": 2**70, "nothing": None}
    assert load(save({"v": value}), {"v": 0})["v"] == value


def test_leaves_that_are_kept_stay_as_the_program_made_them():
    """A blob that a policy left out is neither missing nor changed."""
    saved = save({"a": torch.ones(1), "t": Tally({"n": 1}), "m": nn.Linear(1, 1)})
    kept = {"a", "t"}
    for name in kept:
        del saved.specs[name]
    objects = {"a": torch.zeros(1), "t": Tally({"n": 7}), "m": nn.Linear(1, 1)}
    load(saved, objects, kept=kept)
    assert (objects["a"].item(), objects["t"].state) == (0.0, {"n": 7})
    with pytest.raises(BlobError, match="not in the checkpoint: a"):
        load(saved, objects)


class Extra(nn.Module):
    """Has extra state, a hook that computes an entry, and a derived buffer that a load hook refreshes."""

    def __init__(self, value):
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), float(value)))
        self.extra = {"tuple": (value, torch.full((1,), float(value)))}
        self.scale = float(value)
        self.register_buffer("doubled", self.weight.detach() * 2, persistent=False)
        self.register_state_dict_post_hook(type(self).add_scale)
        self.register_load_state_dict_pre_hook(type(self).take_scale)
        self.register_load_state_dict_post_hook(type(self).refresh)

    @staticmethod
    def add_scale(module, state, prefix, _):
        state[f"{prefix}scale"] = torch.tensor(module.scale)

    @staticmethod
    def take_scale(module, state, prefix, *_):
        module.scale = state.pop(f"{prefix}scale").item()

    @staticmethod
    def refresh(module, _):
        module.doubled = module.weight.detach() * 2

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


def test_extra_state_and_hooks_take_part():
    """What reading in place does not do goes through the module's own load_state_dict, nested too."""
    source, target = nn.Sequential(Extra(3)), nn.Sequential(Extra(5))
    saved = save({"m": source})
    assert set(saved.content) == {"m.0.weight", "m.0._extra_state", "m.0._extra_state.tuple.1", "m.0.scale"}
    weight = target[0].weight
    load(saved, {"m": target})
    assert target[0].weight is weight and weight.tolist() == [3.0, 3.0]
    assert same(target[0].extra, source[0].extra)
    assert target[0].scale == 3.0 and target[0].doubled.tolist() == [6.0, 6.0]


class Cached(nn.Linear):
    """Keeps something derived from its weight, refreshed by a hook or by its own load method."""

    def __init__(self, hooked):
        super().__init__(2, 1, bias=False)
        self.total = None
        if hooked:
            self.register_load_state_dict_post_hook(lambda module, _: module.refresh())

    def refresh(self):
        self.total = self.weight.sum().item()


class CachedByMethod(Cached):
    def _load_from_state_dict(self, *args):
        super()._load_from_state_dict(*args)
        self.refresh()


@pytest.mark.parametrize(
    "make", [lambda: Cached(True), lambda: CachedByMethod(False)], ids=["hook", "method"]
)
def test_load_code_of_a_module_runs_after_its_tensors_are_read(make):
    """A module that refreshes what it derives from its parameters sees the loaded ones, in place."""
    source, target = nn.Sequential(make()), nn.Sequential(make())
    weight = target[0].weight
    load(save({"m": source}), {"m": target})
    assert target[0].weight is weight
    assert target[0].total == source[0].weight.sum().item()


def test_tensors_as_extra_state_are_leaves():
    """get_extra_state may return a tensor by itself."""

    class Packed(nn.Module):
        packed = torch.zeros(2)

        def get_extra_state(self):
            return self.packed

        def set_extra_state(self, state):
            self.packed = state

    source, target = Packed(), Packed()
    source.packed = torch.ones(2)
    load(save({"m": source}), {"m": target})
    assert target.packed.tolist() == [1.0, 1.0]


def trained(seed, width=3):
    torch.manual_seed(seed)
    model = nn.Linear(2, width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.rand(4, 2)).sum().backward()
    optimizer.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "tally": Tally({"n": seed}),
        "ema": torch.full((2,), float(seed)),
    }


def damage_shape(objects):
    objects["ema"] = torch.zeros(3)


def damage_dtype(objects):
    objects["ema"] = torch.zeros(2, dtype=torch.float64)


def damage_kind(objects):
    objects["ema"] = Tally({})


def damage_names(objects):
    objects["model"].wieght = nn.Parameter(torch.zeros(1))


def damage_groups(objects):
    objects["optimizer"].add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def damage_member(objects):
    other = nn.Linear(2, 3)
    objects["model"].extra = other
    objects["optimizer"] = torch.optim.AdamW(other.parameters())


def damage_missing(objects):
    objects["emma"] = torch.zeros(1)


def damage_homeless(objects):
    del objects["tally"]


DAMAGES = {
    damage_shape: r"ema is float32\[3\] here, float32\[2\] in the checkpoint",
    damage_dtype: r"ema is float64\[2\] here, float32\[2\]",
    damage_kind: r"ema is a Tally \(stateful object\) here, a tensor in the checkpoint",
    damage_names: r"not in the checkpoint: model.wieght \(similar: model.weight",
    damage_groups: r"optimizer has groups of \[2, 1\] parameters here, of \[2\]",
    damage_member: r"optimizer has model.extra.weight in group 0 here, and not in the checkpoint",
    damage_missing: r"not in the checkpoint: emma \(similar: ema",
    damage_homeless: r"tally is a stateful object in the checkpoint, and no object.*factory",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_what_does_not_fit_changes_nothing(damage):
    """A load that is refused leaves every object bit by bit as it was, and says what and where."""
    saved = save(trained(1))
    objects = trained(2)
    damage(objects)
    before = save(objects).content
    with pytest.raises(BlobError, match=DAMAGES[damage]):
        load(saved, objects)
    assert save(objects).content == before


def test_all_differences_are_listed_at_once():
    """One error names everything, so that nobody fixes leaf by leaf."""
    objects = trained(2)
    damage_shape(objects), damage_names(objects), damage_homeless(objects)
    with pytest.raises(BlobError) as caught:
        load(save(trained(1)), objects)
    for text in ("ema is", "model.wieght", "tally is", "nothing was changed"):
        assert text in str(caught.value)


def test_leaves_of_one_side_only_are_skipped_without_strict():
    """`strict=False` loads what both sides have; another shape is still refused."""
    saved = save({"m": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))})
    target = nn.Sequential(nn.Linear(2, 2))
    target.add_module("new", nn.Linear(1, 1))
    with pytest.raises(BlobError, match=r"only in the checkpoint: m.1.weight"):
        load(saved, {"m": target})
    load(saved, {"m": target}, strict=False)
    assert save({"m": target}).tensors["m.0.weight"] == saved.tensors["m.0.weight"]
    with pytest.raises(BlobError, match=r"m.0.weight is float32"):
        load(saved, {"m": nn.Sequential(nn.Linear(3, 2))}, strict=False)


def test_an_optimizer_can_be_loaded_without_its_module():
    """Parameters that nothing names are matched by their place."""
    source, target = trained(1), trained(2)
    saved = save(source)
    load(saved.only("optimizer"), {"optimizer": target["optimizer"]})
    pairs = zip(source["optimizer"].state.values(), target["optimizer"].state.values(), strict=True)
    assert all(same(left, right) for left, right in pairs)


def test_parameters_that_only_the_optimizer_holds_come_back():
    """Their content is part of the optimizer's blob."""
    weights = [nn.Parameter(torch.full((2,), float(value))) for value in (1, 2)]
    saved = save({"o": torch.optim.SGD(weights[:1], lr=0.1)})
    load(saved, {"o": torch.optim.SGD(weights[1:], lr=0.5)})
    assert weights[1].tolist() == [1.0, 1.0]


def test_state_that_belongs_to_no_parameter_comes_back():
    """An optimizer may keep state under a name of its own."""
    optimizers = [torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1) for _ in range(2)]
    optimizers[0].state["step"] = {"n": 3, "mean": torch.ones(2)}
    load(save({"o": optimizers[0]}), {"o": optimizers[1]})
    assert same(optimizers[1].state["step"], {"n": 3, "mean": torch.ones(2)})


def test_group_options_that_the_checkpoint_does_not_know_keep_their_defaults():
    """A newer torch adds options to groups; an older epoch still loads."""
    source, target = trained(1), trained(2)
    del source["optimizer"].param_groups[0]["maximize"]
    load(save(source), target)
    assert target["optimizer"].param_groups[0]["maximize"] is False
    assert target["optimizer"].param_groups[0]["betas"] == (0.9, 0.999)


def test_an_object_that_refuses_its_state_is_named():
    """A failure after objects have changed is of its own type."""

    class Picky(Tally):
        def load_state_dict(self, state):
            raise ValueError("not mine")

    with pytest.raises(PartiallyLoadedError, match=r"'t' refused its stored state \(ValueError: not mine\)"):
        load(save({"t": Tally({})}), {"t": Picky({})})


def test_a_value_that_refers_to_nothing_is_damage_found_before_a_change():
    """A tree whose tensor is not there is noticed while planning."""
    saved = save({"t": Tally({"x": torch.ones(1)})})
    del saved.specs["t.x"]
    with pytest.raises(DamagedError, match=r"'t' refers to tensor 't.x', which the checkpoint lacks"):
        plan(saved, {"t": Tally({})})


def test_objects_that_only_init_makes_are_refused_with_the_remedy():
    """A resumed run skips init, so only tensors and values may come from there."""
    objects = {"model": nn.Linear(1, 1), "total": torch.ones(1), "best": 0.5, "late": Tally({})}
    check_recreatable(objects, {"model", "late"})
    with pytest.raises(BlobError, match=r"'late' \(Tally\) was put .*factory"):
        check_recreatable(objects, {"model"})
