"""SNG-10, SNG-11 and SNG-13: what an imported model is, can be extended by, and which files are read."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

onnx = pytest.importorskip("onnx")

import numpy as np  # noqa: E402
import onnx_models as made  # noqa: E402
from onnx import numpy_helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

import torchrelay  # noqa: E402
from torchrelay import OnnxModule, from_onnx  # noqa: E402
from torchrelay.errors import UsageError  # noqa: E402
from torchrelay.models.onnx.importer import executor  # noqa: E402

X = torch.from_numpy(made.random(3, 4))


def referred(proto: Any, x: torch.Tensor) -> torch.Tensor:
    """What onnx's own slow evaluator says."""
    return torch.from_numpy(np.asarray(ReferenceEvaluator(proto).run(None, {"x": x.numpy()})[0]))


@pytest.mark.parametrize("source", ["path", "bytes", "proto", "string"])
def test_sng_10_from_a_file_bytes_or_a_proto(source: str, tmp_path: Path) -> None:
    """The answers are those of the file, on batches of other sizes too; keys are the initializer names."""
    proto = made.mlp()
    path = made.saved(proto, tmp_path / "mlp.onnx")
    given = {"path": path, "bytes": path.read_bytes(), "proto": proto, "string": str(path)}[source]
    model = from_onnx(given)
    assert set(model.state_dict()) == {one.name for one in proto.graph.initializer}
    for x in (X, X[:1]):
        torch.testing.assert_close(model(x), referred(proto, x))
    assert model.signature.inputs[0].shape == ("batch", 4)
    torch.testing.assert_close(model(x=X), model(X))


def test_sng_10_parameters_train_move_and_copy() -> None:
    """Floats are parameters that a step changes, integers buffers; `.to` and deepcopy reach all of them."""
    model = from_onnx(made.normed())
    assert {name for name, _ in model.named_parameters()} == {
        *("conv.weight", "conv.bias", "bn.weight", "bn.bias"),
    }
    assert {"bn.mean", "bn.var", "shape", "ratio"} <= set(dict(model.named_buffers()))
    other = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train()
    model(torch.randn(2, 1, 4, 4)).square().sum().backward()
    optimizer.step()
    changed = {
        name for name, one in model.state_dict().items() if not torch.equal(one, other.state_dict()[name])
    }
    assert {"conv.weight", "bn.weight", "bn.mean", "bn.var"} <= changed
    assert other(torch.randn(2, 1, 4, 4)).shape == (2, 3)
    moved = other.to(torch.float64)
    assert moved(torch.randn(2, 1, 4, 4, dtype=torch.float64)).dtype == torch.float64
    assert other.to("meta")(torch.empty(5, 1, 4, 4, dtype=torch.float64, device="meta")).shape == (5, 3)


def test_sng_10_train_and_eval_are_those_of_torch() -> None:
    """Batch normalization and dropout follow the mode, to the bit as torch's own layers do."""
    imported = from_onnx(made.normed())
    assert not imported.training
    conv, bn = nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3)
    with torch.no_grad():
        conv.weight.copy_(imported.state_dict()["conv.weight"])
        conv.bias.copy_(imported.state_dict()["conv.bias"])
    x = torch.randn(4, 1, 4, 4)
    for training in (True, False):
        bn.train(training)
        imported.train(training)
        (value,) = [imported(x, outputs=("n",))]
        torch.testing.assert_close(value, bn(conv(x)), rtol=0, atol=0)
        torch.testing.assert_close(imported.state_dict()["bn.var"], bn.running_var, rtol=0, atol=0)
    zeros = [int((imported.train(mode)(x, outputs=("d",)) == 0).sum()) for mode in (True, False)]
    assert zeros[0] > 20
    assert zeros[1] == 0


def test_sng_10_all_unsupported_operators_at_once() -> None:
    """One error names every operator that cannot be imported and how often, inner graphs included."""
    inner = onnx.helper.make_graph(
        [made.node("Nonsense", "x", "z")], "inner", [], [onnx.helper.make_tensor_value_info("z", 1, None)]
    )
    nodes = [
        made.node("StringNormalizer", "x", "a"),
        made.node("Foo", "a", "b", domain="my.own"),
        made.node("Foo", "b", "c", domain="my.own"),
        made.node("Relu", "c", "d"),
        made.node("If", "d", "y", then_branch=inner, else_branch=inner),
    ]
    with pytest.raises(UsageError) as caught:
        from_onnx(made.model(nodes, {}, {"x": [1]}, ["y"]))
    for words in ("3 operators", "StringNormalizer (1 time)", "my.own.Foo (2 times)", "Nonsense (2 times)"):
        assert words in str(caught.value)
    assert "Relu" not in str(caught.value)


ODD = [
    "a",
    "a.b",
    ".c",
    "d..e",
    "forward",
    "train",
    "x/y:0",
    "0",
    "weight",
    "of_file.x",
    "run",
    "é",
    "val_3",
    "_paths",
    "f.",
]


def test_sng_10_names_that_attributes_cannot_have() -> None:
    """Any name is a state dict key, alone and inside of a parent, strict loading included."""
    nodes = [made.node("Sum", " ".join(ODD), "s"), made.node("Add", "s x", "y")]
    proto = made.model(
        nodes, {name: made.random(2, seed=at) for at, name in enumerate(ODD)}, {"x": [2]}, ["y"]
    )
    one, other = from_onnx(proto), from_onnx(proto)
    assert set(one.state_dict()) == set(ODD)
    assert len(list(one.parameters())) == len(ODD)
    with torch.no_grad():
        for parameter in one.parameters():
            parameter.mul_(2)
    other.load_state_dict(one.state_dict())
    torch.testing.assert_close(other(torch.zeros(2)), one(torch.zeros(2)))
    parent = nn.ModuleDict({"inside": one})
    assert set(parent.state_dict()) == {f"inside.{name}" for name in ODD}
    parent.load_state_dict(parent.state_dict())


class Extended(OnnxModule):
    """The body of a file with a head of our own, on what its last operator took."""

    def __init__(self, source: Any) -> None:
        super().__init__(source, drop_last=1, freeze=("body.0.bias",))
        self.top = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        active, hidden = super().forward(x, aux=("hidden",))
        return self.top(torch.cat([active, hidden], 1))


def test_sng_11_a_subclass_trains_as_configured(tmp_path: Path) -> None:
    """Imported and new parameters change in one step, frozen ones do not; both are saved and loaded."""
    model = Extended(made.mlp())
    assert set(model.state_dict()) == {"body.0.weight", "body.0.bias", "top.weight", "top.bias"}
    before = copy.deepcopy(model.state_dict())
    model(X).square().sum().backward()
    torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1).step()
    changed = {name for name, one in model.state_dict().items() if not torch.equal(one, before[name])}
    assert changed == {"body.0.weight", "top.weight", "top.bias"}
    torchrelay.save_blobs(str(tmp_path / "blobs"), {"model": model})
    other = Extended(made.mlp())
    torchrelay.load_into(str(tmp_path / "blobs"), {"model": other})
    torch.testing.assert_close(other(X), model(X), rtol=0, atol=0)


def test_sng_11_values_by_name_and_cuts() -> None:
    """`aux` follows the outputs; `outputs` cuts at a value; `drop_last` counts operators."""
    model = from_onnx(made.mlp())
    y, hidden, active = model(X, aux=("hidden", "active"))
    torch.testing.assert_close(torch.relu(hidden), active)
    torch.testing.assert_close(y, model(X))
    torch.testing.assert_close(model(X, outputs=("hidden",)), hidden)
    torch.testing.assert_close(model(X, drop_last=1), active)
    torch.testing.assert_close(model(X, drop_last=2), hidden)
    assert model.values() == ("hidden", "active", "y")
    with pytest.raises(UsageError, match="similar names: 'hidden'"):
        model(X, aux=("hiden",))
    for count in (3, -1):
        with pytest.raises(UsageError, match="drop_last"):
            model(X, drop_last=count)
    cut = from_onnx(made.mlp(), outputs=("hidden",))
    assert set(cut.state_dict()) == {"body.0.weight", "body.0.bias"}
    with pytest.raises(UsageError, match="was cut"):
        cut(X, outputs=("y",))


def test_sng_11_a_dropped_operator_leaves_values_not_weights_or_sizes() -> None:
    """What is left open is what depends on the content of the input: no transposed weight, no shape."""
    nodes = [
        made.node("Relu", "x", "h"),
        made.node("Transpose", "w", "wt"),
        made.node("MatMul", "h wt", "m"),
        made.node("Shape", "m", "s"),
        made.node("Reshape", "m s", "y"),
    ]
    proto = made.model(nodes, {"w": made.random(2, 4)}, {"x": ["n", 4]}, ["y"])
    graph = from_onnx(proto)._graph
    assert executor.ends_without(graph, 1) == ("m",)
    assert executor.ends_without(graph, 3) == ("h",)


def test_sng_11_what_is_not_needed_is_not_run() -> None:
    """An operator that would fail does not run where nobody wants its value."""
    nodes = [
        made.node("Relu", "x", "h"),
        made.node("Reshape", "h shape", "bad"),
        made.node("Gemm", "bad w", "y"),
    ]
    proto = made.model(nodes, {"shape": np.array([7, 7, 7]), "w": made.random(7, 7)}, {"x": ["n", 4]}, ["y"])
    model = from_onnx(proto)
    assert model(X, outputs=("h",)).shape == (3, 4)
    with pytest.raises(UsageError, match="Reshape 'Reshape_bad' failed on"):
        model(X)


def test_what_is_given_by_mistake_is_told() -> None:
    """An array for a tensor, one text for patterns, more operators than there are: each with what helps."""
    model = from_onnx(made.mlp())
    with pytest.raises(UsageError, match="the input 'x' is a ndarray: expected a tensor"):
        model(X.numpy())
    with pytest.raises(UsageError, match="not a str"):
        from_onnx(made.mlp(), freeze="body.*")
    with pytest.raises(UsageError, match="expected 0 to "):
        model(X, drop_last=99)


def test_sng_11_freeze_by_patterns() -> None:
    """Patterns freeze and unfreeze; one that names nothing is an error that names what there is."""
    model = from_onnx(made.mlp(), freeze=("body.*",))
    assert {name for name, one in model.named_parameters() if one.requires_grad} == {
        "head/weight",
        "head/bias",
    }
    model.unfreeze("*.bias")
    assert model.get_parameter("body.0.bias").requires_grad
    with pytest.raises(UsageError, match="'nothing' matches no parameter"):
        model.freeze("nothing")
    with pytest.raises(UsageError, match="'body' is taken"):
        model.body = nn.Linear(1, 1)


@pytest.mark.parametrize("opset", [6, 7, 11, 13, 28])
def test_sng_13_operator_sets_from_old_to_new(opset: int) -> None:
    """Old sets are converted or run as they were meant."""
    proto = made.model(
        [made.node("Gemm", "x w b", "g"), made.node("Softmax", "g", "y")],
        {"w": made.random(4, 3), "b": made.random(3)},
        {"x": [3, 4]},
        ["y"],
        opset,
    )
    wanted = torch.softmax(X @ torch.from_numpy(made.random(4, 3)) + torch.from_numpy(made.random(3)), 1)
    torch.testing.assert_close(from_onnx(proto)(X), wanted)


def test_sng_13_what_is_too_new_is_refused() -> None:
    """An operator set or file version that nobody knows yet is a clear error, never run as an older one."""
    with pytest.raises(UsageError, match="operator set 99; torchrelay knows up to 28"):
        from_onnx(made.mlp(opset=99))
    proto = made.mlp()
    proto.ir_version = 99
    with pytest.raises(UsageError, match="IR version 99"):
        from_onnx(proto)


def test_sng_13_external_data(tmp_path: Path) -> None:
    """Weights in a file beside the model are found by its path, or by folder= for a proto."""
    proto, path = made.mlp(), tmp_path / "model.onnx"
    onnx.save_model(
        copy.deepcopy(proto), str(path), save_as_external_data=True, location="w.bin", size_threshold=0
    )
    torch.testing.assert_close(from_onnx(path)(X), referred(proto, X))
    bare = onnx.load(str(path), load_external_data=False)
    torch.testing.assert_close(from_onnx(bare, folder=tmp_path)(X), referred(proto, X))
    with pytest.raises(UsageError, match="give folder="):
        from_onnx(bare)


def test_sng_13_more_than_2_gib_in_one_file(tmp_path: Path) -> None:
    """A tensor behind the first 4 GiB of a (sparse) file beside the model is read where it lies."""
    weight = made.random(2, 4)
    tensor = numpy_helper.from_array(weight, "w")
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    at = 2**32 + 4096
    for key, value in (("location", "big.bin"), ("offset", str(at)), ("length", "32")):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value
    with (tmp_path / "big.bin").open("wb") as file:
        file.truncate(at + 32)
        file.seek(at)
        file.write(weight.tobytes())
    proto = made.model([made.node("Gemm", "x w", "y", transB=1)], {"w": tensor}, {"x": [3, 4]}, ["y"])
    path = made.saved(proto, tmp_path / "model.onnx")
    torch.testing.assert_close(from_onnx(path)(X), X @ torch.from_numpy(weight).t())


def test_sizes_follow_integer_buffers() -> None:
    """Sizes in initializers are read again after they were changed or loaded, not remembered for ever."""
    proto = made.model(
        [made.node("Reshape", "x shape", "y")], {"shape": np.array([4, 3])}, {"x": [3, 4]}, ["y"]
    )
    model = from_onnx(proto)
    assert model(X).shape == (4, 3)
    model.load_state_dict({"shape": torch.tensor([2, 6])})
    assert model(X).shape == (2, 6)


def test_a_file_made_for_training_begins_so() -> None:
    """A dropout that the file switches on has the module begin in train mode; eval switches it off."""
    nodes = [made.node("Dropout", "x share on", "y")]
    stored = {"share": np.float32(0.9), "on": np.array(True)}
    model = from_onnx(made.model(nodes, stored, {"x": [3, 4]}, ["y"]))
    assert model.training
    assert (model(torch.ones(100)) == 0).any()
    assert torch.equal(model.eval()(X), X)


def test_sizes_are_known_without_a_run() -> None:
    """A model that never ran can be traced, also after its sizes have changed."""
    proto = made.model(
        [made.node("Reshape", "x shape", "y")], {"shape": np.array([4, 3])}, {"x": [3, 4]}, ["y"]
    )
    model = from_onnx(proto)
    assert torch.export.export(copy.deepcopy(model), (X,)).module()(X).shape == (4, 3)
    model.load_state_dict({"shape": torch.tensor([2, 6])})
    assert torch.export.export(model, (X,)).module()(X).shape == (2, 6)


def test_functions_of_a_model_are_inlined() -> None:
    """Functions that a file defines itself are run as what they consist of."""
    function = onnx.helper.make_function(
        "my", "Twice", ["a"], ["b"], [made.node("Add", "a a", "b")], [onnx.helper.make_opsetid("", 20)]
    )
    proto = made.model(
        [made.node("Twice", "x", "y", domain="my")], {}, {"x": [3, 4]}, ["y"], functions=[function]
    )
    proto.opset_import.append(onnx.helper.make_opsetid("my", 1))
    torch.testing.assert_close(from_onnx(proto)(X), 2 * X)


def test_graphs_inside_of_graphs_train() -> None:
    """A loop whose body uses weights of the graph around it passes gradients to them."""
    info = onnx.helper.make_tensor_value_info
    body = onnx.helper.make_graph(
        [made.node("MatMul", "h w", "h2"), made.node("Identity", "go", "go2")],
        "body",
        [info("i", 7, []), info("go", 9, []), info("h", 1, None)],
        [info("go2", 9, []), info("h2", 1, None)],
    )
    proto = made.model(
        [made.node("Loop", "trips - x", "y", body=body)],
        {"w": made.random(4, 4), "trips": np.array(3)},
        {"x": [3, 4]},
        ["y"],
    )
    model = from_onnx(proto)
    w = torch.from_numpy(made.random(4, 4))
    torch.testing.assert_close(model(X), X @ w @ w @ w)
    model(X).sum().backward()
    assert model.w.grad is not None
    assert model.w.grad.abs().sum() > 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert copy.deepcopy(model)(X).shape == (3, 4)
