"""Modules as ONNX files: same answers in any size, nothing of the module touched, or one error."""

from __future__ import annotations

import importlib
import importlib.util
import json

import pytest
import torch
from torch import nn

from torchrelay import to_onnx
from torchrelay.errors import UsageError
from torchrelay.jobs.runtime import Signature, TensorSpec
from torchrelay.runners.artifacts.rebuild import typed_inputs

onnx = pytest.importorskip("onnx", reason="needs onnx: pip install -e '.[onnx]'")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs onnxruntime: pip install -e '.[onnx]'")

made = importlib.import_module("torchrelay.models.onnx.exporter.to_onnx")


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2)

    def forward(self, image):
        return self.out(torch.relu(self.norm(self.conv(image))).mean((2, 3)))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.words, self.layers = nn.Embedding(20, 8), nn.TransformerEncoder(layer, 1)

    def forward(self, tokens):
        found = self.layers(self.words(tokens))
        return {"logits": found @ self.words.weight.t(), "first": found[:, 0]}


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.out = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x):
        found, last = self.lstm(x)
        return self.out(found[:, -1]), last


def perceptron():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 2))


WORDS = torch.randint(0, 20, (3, 5))
STANDARD = {
    "mlp": (perceptron, torch.randn(1, 4), True, ["output"], [7, 4]),
    "convolutions": (Convolutions, torch.randn(3, 3, 6, 6), True, ["output"], [5, 3, 6, 6]),
    "transformer": (Transformer, WORDS, {"tokens": {0: "batch", 1: "time"}}, ["logits", "first"], [2, 9]),
    "lstm": (Recurrent, torch.randn(2, 5, 3), True, ["output_0", "output_1_0", "output_1_1"], [6, 5, 3]),
}


def answers(path, **inputs):
    session = onnxruntime.InferenceSession(str(path))
    found = session.run(None, {name: one.numpy() for name, one in inputs.items()})
    return dict(zip([one.name for one in session.get_outputs()], map(torch.from_numpy, found), strict=True))


def trained(model, x):
    """A step, so that statistics and weights are nobody's defaults."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    leaves = torch.utils._pytree.tree_leaves(model(x.repeat_interleave(2, 0)))
    sum(leaf.square().mean() for leaf in leaves).backward()
    optimizer.step()
    return model


@pytest.mark.parametrize("kind", STANDARD)
def test_sng_9_the_standard_models_go_out(tmp_path, kind):
    """The file answers as torch in a size that nobody compared; its initializers are the module's states."""
    make, x, dynamic, outputs, other = STANDARD[kind]
    model = trained(make(), x).train()
    done = to_onnx(model, x, tmp_path / "m.onnx", dynamic=dynamic)
    assert model.training and len(done.compared) == 2 and done.difference < 1e-4
    proto = onnx.load(done.path)
    onnx.checker.check_model(proto, full_check=True)
    states = {name: one for name, one in model.state_dict().items() if "num_batches" not in name}
    stored = {one.name: torch.tensor(onnx.numpy_helper.to_array(one)) for one in proto.graph.initializer}
    assert all(torch.equal(stored[name], one) for name, one in states.items())
    assert [one.name for one in done.signature.outputs] == outputs
    assert done.signature.inputs[0].shape[0] == "batch"
    more = torch.randint(0, 20, other) if x.dtype == torch.int64 else torch.randn(other)
    found = answers(done.path, **{done.signature.inputs[0].name: more})
    with torch.no_grad():
        wanted = torch.utils._pytree.tree_leaves(model.eval()(more))
    for one, name in zip(wanted, outputs, strict=True):
        torch.testing.assert_close(found[name], one, rtol=1e-3, atol=1e-4)


class Several(nn.Module):
    """Named, nested and constant inputs; outputs that are inputs, or twice the same."""

    def forward(self, batch, *, mask, scale=2.0, flag=None):
        total = batch["x"] * scale + mask
        return {"total": total, "same": (total, batch["x"]), "none": None}


def test_sng_9_several_inputs_and_outputs_keep_their_names(tmp_path):
    """Arguments and keys are the names; sizes have names, too; the file tells them by itself."""
    given = {"batch": {"x": torch.randn(3, 2)}, "mask": torch.randn(3, 2)}
    done = to_onnx(Several(), given, tmp_path / "m.onnx", metadata={"labels": "a,b"})
    spec = ("batch", 2), "float32"
    inputs = (TensorSpec("batch.x", *spec), TensorSpec("mask", *spec))
    outputs = tuple(TensorSpec(name, *spec) for name in ("total", "same_0", "same_1"))
    assert done.signature == Signature(inputs, outputs)
    said = {one.key: one.value for one in onnx.load(done.path).metadata_props}
    assert Signature.from_json(json.loads(said["torchrelay.signature"])) == done.signature
    assert said["labels"] == "a,b"
    found = answers(done.path, **{"batch.x": torch.ones(1, 2), "mask": torch.ones(1, 2)})
    assert [one.tolist() for one in found.values()] == [[[3, 3]], [[3, 3]], [[1, 1]]]


class Counting(nn.Module):
    """Counts its calls, and has a computed weight, which deepcopy alone refuses."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.weight = nn.Parameter(torch.randn(2))
        self.computed = self.weight * 2

    def forward(self, x):
        self.calls += 1
        return x * self.weight


class Deciding(Counting):
    def forward(self, x):
        if super().forward(x).sum() > 0:
            return x
        return -x


@pytest.mark.parametrize("kind", [Counting, Deciding])
def test_sng_9_the_model_stays_as_it_was(tmp_path, capfd, kind):
    """Mode, gradients, buffers, weights, random streams and the terminal, after success as after failure."""
    model = nn.Sequential(kind(), nn.Dropout())
    model[1].eval()
    model[0].weight.requires_grad_(False)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    stream = torch.get_rng_state()
    try:
        to_onnx(model, torch.randn(3, 2, generator=torch.Generator()), tmp_path / "m.onnx")
        assert kind is Counting
    except UsageError as error:
        assert kind is Deciding
        assert "test_onnx_out.py" in str(error) and "torch.where" in str(error) and "\n" not in str(error)
        assert not list(tmp_path.iterdir())
    assert model[0].training and not model[1].training and not model[0].weight.requires_grad
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), stream)
    assert capfd.readouterr() == ("", "")


class Odd(nn.Module):
    def __init__(self, work):
        super().__init__()
        self.weight, self.work = nn.Parameter(torch.ones(2)), work

    def forward(self, x):
        return self.work(x)


REFUSED = {
    "answers differ": (Odd(lambda x: x + torch.rand_like(x)), {}, "differs by up to"),
    "no operator": (Odd(lambda x: torch.linalg.svd(x)[1]), {}, "_linalg_svd has no equivalent in ONNX"),
    "no tensor": (Odd(lambda x: (x, 3)), {}, "returns 3 as 'output_1'"),
    "nothing": (Odd(lambda x: None), {}, "returns no tensor"),
    "a size as a number": (Odd(lambda x: x.reshape(3, 2)), {}, "fails with the inputs .batch 2."),
    "one name for both": (Odd(lambda x: x), {"output_names": ["x"]}, "give input_names="),
    "too few names": (Odd(lambda x: x), {"input_names": []}, "give 1 different names"),
    "no such input": (Odd(lambda x: x), {"dynamic": {"y": {0: "batch"}}}, "known are x"),
    "no such dimension": (Odd(lambda x: x), {"dynamic": {"x": {2: "batch"}}}, "has 2 dimensions"),
    "no name": (Odd(lambda x: x), {"dynamic": {"x": {0: "a size"}}}, "invalid size name"),
    "a bad tolerance": (Odd(lambda x: x), {"rtol": -1}, "numbers >= 0"),
    "metadata": (Odd(lambda x: x), {"metadata": {"a": 1}}, "must be strings"),
    "no module": (3, {}, "not a torch.nn.Module"),
    "an operator set": (nn.Linear(2, 1), {"opset": 99}, "opset=99: .* instead; choose another"),
    "no values": (nn.LazyLinear(2), {}, "no values yet"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_go_out_is_one_line_and_no_file(tmp_path, case):
    """The thing and the remedy; nothing is left where the file would be."""
    model, options, said = REFUSED[case]
    with pytest.raises(UsageError, match=said) as caught:
        to_onnx(model, torch.randn(3, 2), tmp_path / "m.onnx", **options)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_an_example_without_values_is_refused(tmp_path):
    """An input on the meta device is an error of one line, as a model there is."""
    with pytest.raises(UsageError, match="give examples with values"):
        to_onnx(nn.Linear(2, 1), torch.empty(3, 2, device="meta"), tmp_path / "m.onnx")


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    """With the command that installs it."""
    monkeypatch.setattr(
        "torchrelay.models.onnx.exporter.to_onnx.find_spec",
        lambda name: None if name == "onnxscript" else importlib.util.find_spec(name),
    )
    with pytest.raises(UsageError, match=r"need onnxscript: pip install onnx onnxscript onnxruntime"):
        to_onnx(nn.Linear(2, 2), torch.ones(3, 2), tmp_path / "m.onnx")


def test_many_weights_lie_beside_the_file(tmp_path, monkeypatch):
    """The pair is replaced whole and nothing of the old one stays; a taken name is refused."""
    path, x = tmp_path / "deep" / "m.onnx", torch.randn(3, 2)
    monkeypatch.setattr(made, "EXTERNAL_FROM_BYTES", 0)
    to_onnx(nn.Linear(2, 300), x, path)
    first = {one.name for one in path.parent.iterdir()}
    with pytest.raises(UsageError, match="exists already"):
        to_onnx(nn.Linear(2, 300), x, path)
    model = nn.Linear(2, 300)
    done = to_onnx(model, x, path, overwrite=True, dynamic=False)
    second = {one.name for one in path.parent.iterdir()}
    assert len(first) == len(second) == 2 and first & second == {"m.onnx"}
    assert path.stat().st_size < model.weight.nbytes < done.bytes
    torch.testing.assert_close(answers(path, input=x)["output"], model(x).detach())


def test_a_url_gets_the_same_file(monkeypatch):
    """An object store has the file and the weights beside it; a taken name is refused there, too."""
    import fsspec

    x, url = torch.randn(3, 2), "memory://onnx-out/m.onnx"
    monkeypatch.setattr(made, "EXTERNAL_FROM_BYTES", 0)
    to_onnx(nn.Linear(2, 300), x, url)
    with pytest.raises(UsageError, match="exists already"):
        to_onnx(nn.Linear(2, 300), x, url)
    store = fsspec.filesystem("memory")
    names = sorted(store.ls("/onnx-out", detail=False))
    assert len(names) == 2 and names[0] == "/onnx-out/m.onnx"
    assert onnx.load_from_string(store.cat_file(names[0])).graph.initializer[0].external_data
    store.rm("/onnx-out", recursive=True)


def test_inputs_as_texts():
    """Types, sizes and their names; anything else is refused by what it was."""
    tensors, dynamic = typed_inputs(["x=float32[batch,2]", "tokens=int64[batch,time=7]", "one=bool[]"])
    assert [list(one.shape) for one in tensors.values()] == [[3, 2], [3, 7], []]
    assert dynamic == {"x": {0: "batch"}, "tokens": {0: "batch", 1: "time"}, "one": {}}
    for text in ("x", "x=float32", "x=float[2", "x=nothing[2]", "x=float32[0]", "x=float32[a b]"):
        with pytest.raises(UsageError, match="--input"):
            typed_inputs([text])
