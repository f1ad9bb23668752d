"""What users of SINGA type: states back into a model, one file for all, modes of programs, ONNX."""

from __future__ import annotations

import json
import warnings
import zipfile
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn

import torchrelay
from torchrelay.errors import BlobError, UsageError


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.norm = nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.two.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.two(self.one(x)))


class Sized(nn.Module):
    """A class that needs an argument, and does otherwise in training."""

    def __init__(self, size: int, *, noisy: bool = False) -> None:
        super().__init__()
        self.layer, self.noisy = nn.Linear(3, size), noisy

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Stepping(nn.Module):
    """A model with its own training step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 2), nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x))

    def train_one_batch(self, x: torch.Tensor, y: torch.Tensor, optimizer: torch.optim.Optimizer) -> float:
        loss = (self(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()


class Separable(nn.Sequential):
    """A convolution by channel and one by point, with batch normalisation."""

    def __init__(self) -> None:
        norm = nn.BatchNorm2d(4)
        super().__init__(
            nn.Conv2d(2, 2, 3, groups=2), nn.Conv2d(2, 4, 1), norm, nn.Flatten(), nn.Linear(16, 2)
        )


class Recurrent(nn.Module):
    """An RNN whose hidden values an LSTM reads."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.RNN(3, 4, batch_first=True), nn.LSTM(4, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x)[0])[0][:, -1]


class Helped(nn.Module):
    """Looks at its mode in another method."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.noise(x)

    def noise(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, 0.5, self.training)


class Noisy(nn.Module):
    """Looks at its mode by itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if self.training else x


def values(model: nn.Module) -> dict[str, Any]:
    return {name: one.tolist() for name, one in model.state_dict().items()}


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Tied()


@pytest.mark.parametrize("other", (Tied, lambda: torch.compile(Tied()), on_meta))
def test_states_go_back_into_a_model(other: Any) -> None:
    """`set_states(other, get_states(model))` makes the two equal, tied weights and statistics too."""
    torch.manual_seed(1)
    model, into = Tied(), other()
    model(torch.randn(8, 3)).sum().backward()
    torchrelay.set_states(into, torchrelay.get_states(model))
    bare = getattr(into, "_orig_mod", into)
    assert values(bare) == values(model) and bare.two.weight is bare.one.weight
    with torch.no_grad():
        bare.one.weight.add_(1)
    assert values(bare) != values(model), "values were copied"


def test_states_under_another_name_of_a_tied_tensor_fit() -> None:
    """All names of torch's own state dict may be given; two values for one tensor may not."""
    model, other = Tied(), Tied()
    torchrelay.set_states(other, model.state_dict())
    states = torchrelay.get_states(model)
    states["two.weight"] = states.pop("one.weight")
    torchrelay.set_states(other, states)
    assert values(other) == values(model)
    with pytest.raises(BlobError, match="another name of the same tensor"):
        torchrelay.set_states(other, {**model.state_dict(), "two.weight": torch.zeros(3, 3)})


def test_states_that_do_not_fit_change_nothing() -> None:
    """One error lists what is missing, unexpected, of another shape or type, and no tensor."""
    model = Tied()
    before = values(model)
    wrong = {"one.weight": torch.zeros(3, 3), "one.bias": torch.zeros(4), "two.bias": torch.zeros(3).half()}
    with pytest.raises(BlobError) as error:
        torchrelay.set_states(model, {**wrong, "three": torch.zeros(1), "norm.weight": 3})  # type: ignore[dict-item]
    parts = (
        "one.bias is float32[4]",
        "two.bias is float16[3]",
        "three is not a state",
        "norm.weight is a int",
    )
    for part in (*parts, "norm.bias is missing"):
        assert part in str(error.value), part
    assert values(model) == before
    with pytest.raises(UsageError, match="as returned by get_states"):
        torchrelay.set_states(model, [1])  # type: ignore[arg-type]


def test_an_archive_tells_what_goes_in_and_out(tmp_path: Path) -> None:
    """After `compile` the states' file has the signature, for other programs and for people."""
    model = nn.Linear(3, 2)
    torchrelay.save_states(tmp_path / "bare.zip", model)
    torchrelay.compile(model, torch.randn(4, 3))
    torchrelay.save_states(tmp_path / "model.zip", model)
    assert "input       input float32[batch, 3]" in torchrelay.summary(tmp_path / "model.zip")
    assert "input " not in torchrelay.summary(tmp_path / "bare.zip")
    with zipfile.ZipFile(tmp_path / "model.zip") as archive:
        assert json.loads(archive.read("manifest.json"))["signature"]["inputs"][0]["shape"] == ["batch", 3]
    assert torchrelay.load_states(tmp_path / "model.zip", nn.Linear(3, 2)) == {}


def test_one_file_has_a_model_and_the_states_of_its_training(tmp_path: Path) -> None:
    """`save(aux_states=)` takes tensors, `load_states` and `open_package().aux()` give them back."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    given = {"epoch": 3, "opt": optimizer.state_dict(), "t": torch.ones(2)}
    package = torchrelay.save(tmp_path / "p", model, torch.ones(1, 3), aux_states=given)
    other = nn.Linear(3, 2)
    for aux in (package.aux(), torchrelay.load_states(tmp_path / "p", other)):
        assert aux["epoch"] == 3 and aux["t"].tolist() == [1, 1]
        torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9).load_state_dict(aux["opt"])
    assert values(other) == values(model) == values(torchrelay.load(tmp_path / "p"))
    with pytest.raises(BlobError, match=r"metadata\.t is a tensor.*aux_states"):
        torchrelay.save(tmp_path / "q", model, torch.ones(1, 3), metadata={"t": torch.ones(1)})
    with pytest.raises(UsageError, match="is the name of a state"):
        torchrelay.save(tmp_path / "q", model, torch.ones(1, 3), aux_states={"weight": 1})
    assert not (tmp_path / "q").exists()


@pytest.mark.parametrize(
    ("model", "named"),
    (
        (nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)), "1 (Dropout)"),
        (nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), "1 (BatchNorm1d)"),
        (nn.Sequential(nn.Linear(3, 3), Noisy()), "1 (Noisy)"),
        (nn.Sequential(nn.Linear(3, 3), Helped()), "1 (Helped)"),
        (nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), "dropout (Dropout)"),
    ),
)
def test_a_program_says_what_would_stand_still(tmp_path: Path, model: nn.Module, named: str) -> None:
    """`train()` of a program is refused, by the names of the parts; so is that of a module around it."""
    inputs = torch.randn(4, 2, 4) if "Transformer" in type(model).__name__ else torch.randn(4, 3)
    torchrelay.save(tmp_path / "p", model, inputs)
    loaded = torchrelay.load(tmp_path / "p")
    for one in (loaded, nn.Sequential(loaded)):
        with pytest.raises(UsageError, match="stand still in training") as error:
            one.train()
        assert named in str(error.value)
    assert not loaded.eval().training


def test_a_program_that_has_one_mode_trains(tmp_path: Path) -> None:
    """A model that does the same in both modes trains as its program, dropout of 0 included."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0), nn.GELU(), nn.LayerNorm(3))
    torchrelay.save(tmp_path / "p", model, torch.randn(4, 3))
    loaded = torchrelay.load(tmp_path / "p").train()
    loaded(torch.randn(4, 3)).sum().backward()
    assert loaded.training and all(one.grad is not None for one in loaded.parameters())


@pytest.mark.parametrize(("operator", "still"), (("Relu", False), ("Dropout", True)))
def test_a_program_of_an_onnx_model_knows_its_operators(tmp_path: Path, operator: str, still: bool) -> None:
    """Dropout of an imported file stands still in a program; a file without such operators trains."""
    ends = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", 3]) for name in "xy"]
    node = onnx.helper.make_node(operator, ["x"], ["y"])
    proto = onnx.helper.make_model(onnx.helper.make_graph([node], "g", ends[:1], ends[1:]))
    torchrelay.save(tmp_path / "p", torchrelay.from_onnx(proto), torch.randn(4, 3), source=False)
    loaded = torchrelay.load(tmp_path / "p")
    if not still:
        assert loaded.train().training
        return
    with pytest.raises(UsageError, match="stand still in training"):
        loaded.train()


def test_a_package_of_an_earlier_version_trains_with_a_warning(tmp_path: Path) -> None:
    """Such a package does not say what stands still, so that it is said instead of refused."""
    torchrelay.save(tmp_path / "new", nn.Linear(3, 3), torch.randn(4, 3))
    with zipfile.ZipFile(tmp_path / "new") as new, zipfile.ZipFile(tmp_path / "old", "w") as old:
        for name in new.namelist():
            data = new.read(name)
            if name == "manifest.json":
                manifest = json.loads(data)
                del manifest["package"]["still"]
                data = json.dumps(manifest).encode()
            old.writestr(name, data)
    loaded = torchrelay.load(tmp_path / "old")
    with pytest.warns(UserWarning, match="stand still"):
        assert loaded.train().training


def test_a_source_that_nobody_could_run_is_warned_of(tmp_path: Path) -> None:
    """A class that needs arguments is said at the save, not at the load elsewhere."""
    with pytest.warns(UserWarning, match=r"cannot rebuild the model from its source.*give constructor="):
        torchrelay.save(tmp_path / "a", Sized(2), torch.ones(1, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torchrelay.save(tmp_path / "b", Sized(2), torch.ones(1, 3), constructor=((2,), {}))
        torchrelay.save(tmp_path / "c", Sized(2), torch.ones(1, 3), source=False)
    assert values(torchrelay.load(tmp_path / "b", trust_source=True)).keys() == {"layer.weight", "layer.bias"}


def test_an_export_takes_the_inputs_of_compile_and_gives_a_model(tmp_path: Path) -> None:
    """Without inputs those of `compile` count, without a path the ModelProto comes back."""
    model = nn.Linear(3, 2)
    with pytest.raises(UsageError, match="give example inputs"):
        torchrelay.to_onnx(model)
    torchrelay.compile(model, torch.randn(4, 3), dynamic={"input": {0: "rows"}})
    proto = torchrelay.to_onnx(model)
    onnx.checker.check_model(proto)
    assert proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "rows"
    done = torchrelay.to_onnx(model, path=tmp_path / "net.onnx")
    assert done.signature.inputs[0].shape == ("rows", 3)
    x = torch.randn(5, 3)
    torch.testing.assert_close(torchrelay.from_onnx(proto)(x), model(x))


def test_training_info_is_left_out_with_a_warning() -> None:
    """What ONNX says of an optimizer is not used, and that is said once."""
    proto = torchrelay.to_onnx(nn.Linear(2, 2), torch.randn(1, 2))
    proto.training_info.add().algorithm.name = "adam"
    with pytest.warns(UserWarning, match="training_info"):
        torchrelay.from_onnx(proto)


def stepped(model: Any, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
    draw = torch.Generator().manual_seed(count)
    batches = [(torch.randn(4, 3, generator=draw), torch.randn(4, 2, generator=draw)) for _ in range(count)]
    return [model.train_one_batch(x, y, optimizer) for x, y in batches]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.1)


def test_a_whole_model_and_its_states_give_the_same_losses(tmp_path: Path) -> None:
    """`save` and `save_states`, then `load`, `load_states` and `compile`: `train_one_batch` goes on alike."""
    model = Stepping()
    optimizer = adam(model)
    stepped(model, optimizer, 2)
    torchrelay.save(tmp_path / "model", model, torch.randn(4, 3))
    stepped(model, optimizer, 3)
    torchrelay.save_states(tmp_path / "states", model, {"opt": optimizer.state_dict()})
    loaded = torchrelay.load(tmp_path / "model", trust_source=True)
    aux = torchrelay.load_states(tmp_path / "states", loaded)
    torchrelay.compile(loaded.train(), torch.randn(4, 3))
    other = adam(loaded)
    other.load_state_dict(aux["opt"])
    assert stepped(loaded, other, 4) == stepped(model, optimizer, 4)
    assert values(loaded) == values(model)


@pytest.mark.parametrize(
    ("make", "shape"), ((Separable, (5, 2, 4, 4)), (Recurrent, (5, 6, 3)), (Stepping, (5, 3)))
)
def test_layers_of_every_kind_come_back_and_train_alike(tmp_path: Path, make: Any, shape: Any) -> None:
    """Separable convolutions, RNN, LSTM, batch normalisation: from an archive, and from ONNX, as in torch."""
    torch.manual_seed(2)
    model, other = make(), make()
    x = torch.randn(*shape)
    model(x)
    torchrelay.save_states(tmp_path / "states", model)
    torchrelay.load_states(tmp_path / "states", other)
    assert values(other) == values(model)
    imported = torchrelay.from_onnx(torchrelay.to_onnx(model, x)).train()
    losses: list[list[float]] = [[], []]
    for at, one in enumerate((model.train(), imported)):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for _ in range(4):
            loss = one(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[at].append(loss.item())
    assert losses[0][-1] < losses[0][0] and losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.parametrize("opset", (11, 12))
def test_an_operator_set_that_torch_cannot_write_is_refused(tmp_path: Path, opset: int) -> None:
    """Sets of SINGA's time are no longer written; the error says which set comes out, and no file is left."""
    with pytest.raises(UsageError, match=f"opset={opset}: .* instead; choose another"):
        torchrelay.to_onnx(nn.Linear(3, 2), torch.randn(1, 3), tmp_path / "m.onnx", opset=opset)
    assert not list(tmp_path.iterdir())
