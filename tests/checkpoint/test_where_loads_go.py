"""`device=`, ties and the reports of loads, of epochs and of blob files alike."""

from __future__ import annotations

import pytest
import torch
from epochs import Writing, parameter, value

from torchrelay import load_blobs, load_into, open_checkpoint, save_blobs

WEIGHT = torch.arange(6.0).reshape(2, 3)


@pytest.fixture
def both(tmp_path):
    """One state as an epoch and as a file: a tied pair and a tensor of its own; loaders of tensors."""
    with Writing(tmp_path / "run") as writing:
        tied = [parameter("m.a", WEIGHT), parameter("m.b", WEIGHT, alias_of="m.a")]
        writing.save(0, [*tied, parameter("m.c", WEIGHT + 1), value("v", {"n": 1})])
    module = torch.nn.Module()
    module.a = module.b = torch.nn.Parameter(WEIGHT.clone())
    module.c = torch.nn.Parameter(WEIGHT + 1)
    save_blobs(tmp_path / "file", {"m": module, "v": {"n": 1}})
    return {
        "epoch": open_checkpoint(tmp_path / "run").load_tensors,
        "file": lambda names, **options: load_blobs(tmp_path / "file", names, **options),
    }


@pytest.mark.parametrize("of", ["epoch", "file"])
@pytest.mark.parametrize("device", [None, "cpu", torch.device("meta")])
def test_tensors_go_to_the_device_and_ties_stay_ties(both, of, device):
    """Names of one stored tensor get one tensor, wherever it goes."""
    found = both[of]("m", device=device)
    assert set(found) == {"m.a", "m.b", "m.c"}
    assert {one.device for one in found.values()} == {torch.device(device or "cpu")}
    assert found["m.a"] is found["m.b"] or found["m.a"].data_ptr() == found["m.b"].data_ptr() != 0
    assert found["m.c"] is not found["m.a"]


@pytest.mark.parametrize("of", ["epoch", "file"])
def test_an_alias_alone_has_its_content(both, of):
    """Asked for by its second name, a tied tensor comes with its bytes, under new names too."""
    assert torch.equal(both[of]("m.b")["m.b"], WEIGHT)
    assert torch.equal(both[of](["m.b", "m.c"], rename={"m.b": "x"})["x"], WEIGHT)


def test_a_report_names_both_sides(tmp_path):
    """Without `strict` the result says what was loaded, what the epoch lacked, and what nobody took."""
    with Writing(tmp_path) as writing:
        writing.save(0, [parameter("m.a", WEIGHT), parameter("m.old", WEIGHT)])
    module = torch.nn.Module()
    module.a, module.new = torch.nn.Parameter(torch.zeros(2, 3)), torch.nn.Parameter(torch.zeros(1))
    result = open_checkpoint(tmp_path).load({"m": module}, strict=False)
    assert (result.loaded, result.missing, result.unexpected) == (("m.a",), ("m.new",), ("m.old",))
    assert result.bytes_read > WEIGHT.nbytes and torch.equal(module.a, WEIGHT)


class Wrapped(torch.Tensor):
    """A subclass that hides its content: it has no memory of its own, and does not name its parts."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


@pytest.mark.parametrize(
    "strange",
    [
        lambda: Wrapped(torch.zeros(2, 3)),
        lambda: torch.nested.as_nested_tensor([torch.zeros(3), torch.zeros(3)]),
        lambda: torch.zeros(2, 3).to_sparse(),
    ],
    ids=["wrapped", "nested", "sparse"],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_container_whose_tensor_cannot_be_written_gets_another_one(tmp_path, strange):
    """As with every tensor of another form: what stands there is not asked for what it does not have."""
    save_blobs(tmp_path / "kept", {"kept": {"x": torch.ones(2, 3), "n": 1}})
    kept = {"x": strange(), "n": 0}
    load_into(tmp_path / "kept", {"kept": kept})
    assert type(kept["x"]) is torch.Tensor and kept["n"] == 1
    assert torch.equal(kept["x"], torch.ones(2, 3))
