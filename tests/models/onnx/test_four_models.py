"""The four standard models: out by torch, in, extended, trained with DDP, resumed, out again."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrun import REPOSITORY, torchrun

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")

from torchrelay import from_onnx, open_checkpoint  # noqa: E402

PROGRAM = REPOSITORY / "tests/programs/imported_onnx.py"


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.head = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.max_pool2d(torch.relu(self.bn(self.conv(x))), 2).flatten(1))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 16), nn.Linear(16, 3)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embed(x)).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def program() -> Any:
    spec = importlib.util.spec_from_file_location("imported_onnx_program", PROGRAM)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def exported(model: nn.Module, x: torch.Tensor) -> Any:
    """A ModelProto of torch's exporter, the batch free."""
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shapes = ({0: torch.export.Dim("batch")},)
        made = torch.onnx.export(model.eval(), (x,), dynamo=True, dynamic_shapes=shapes, verbose=False)
    assert made is not None
    return made.model_proto


@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_sng_10_four_models_go_out_in_are_trained_and_go_out_again(tmp_path: Path) -> None:
    """All four are trained on 2 ranks, resumed bit for bit, and answer alike in onnxruntime."""
    ours = program()
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    models = dict(mlp=mlp, convolution=Convolution(), transformer=Transformer(), lstm=Recurrent())
    for name, model in models.items():
        proto = exported(model, ours.batch(name, 4, 0))
        onnx.save(proto, str(tmp_path / f"{name}.onnx"))
        imported = from_onnx(tmp_path / f"{name}.onnx")
        assert set(imported.state_dict()) == {one.name for one in proto.graph.initializer}
        for rows in (4, 7):
            x = ours.batch(name, rows, rows)
            torch.testing.assert_close(imported(x), model(x))
    done = torchrun(PROGRAM, str(tmp_path), warm=True, ranks=2, cwd=tmp_path, timeout_secs=240)
    assert done.rc == 0, str(done)
    assert done.out.count("resumed to the same bits") == 2 * len(models)
    for name in models:
        trained = ours.extended(name, tmp_path)
        open_checkpoint(str(tmp_path / "runs" / name), epoch=2).load({"model": trained})
        again = exported(trained, ours.batch(name, 4, 0)).SerializeToString()
        runtime = onnxruntime.InferenceSession(again, providers=["CPUExecutionProvider"])
        for rows in (4, 7):
            x = ours.batch(name, rows, rows)
            (found,) = runtime.run(None, {runtime.get_inputs()[0].name: x.numpy()})
            torch.testing.assert_close(torch.from_numpy(found), trained(x).detach(), rtol=1e-4, atol=1e-5)
