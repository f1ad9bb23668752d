"""A small configured run for tests: two numbers in, one out; each piece can be replaced."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from torchrelay.jobs.config.config import load_config
from torchrelay.lifecycle import ConfigResult, run_config

CONFIG = """\
workspace: "."
mode: [train1]
seed: 3
runner:
- name: train1
  device: cpu
  epochs: 2
  phases: [a]
  save_checkpoint_path: run
- name: infer1
  class: infer
  device: cpu
  phases: [a]
  init_model_path: run
  predictions_path: out/predictions.jsonl
  metrics_path: out/metrics.jsonl
phase:
- {name: a, model: model.py, dataset_name: d}
- {name: b, model: other/model.py, dataset_name: e}
dataset:
- {name: d, batch_size: 4, data_path: data, data_converter: reader.py}
- {name: e, batch_size: 3, data_path: data/1.txt, data_converter: reader.py}
hyper_parameters:
  optimizer: {class: sgd, learning_rate: 0.1}
  width: 2
"""
MODEL = """\
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, hyper_parameters):
        super().__init__()
        self.line = nn.Linear(hyper_parameters["width"], 1)

    def forward(self, batch):
        return self.line(batch[0]).squeeze(1)

    def loss(self, outputs, batch):
        return (outputs - batch[1]).square().mean()

    def metrics(self, outputs, batch):
        return {"bias": (outputs - batch[1]).mean()}

    def counts(self, outputs, batch):
        return {"squares": (outputs - batch[1]).square().sum(), "samples": len(outputs)}

    def metrics_of(self, counts):
        return {"rmse": (counts["squares"] / counts["samples"]).sqrt()}
"""
READER = """\
from pathlib import Path

import torch

class Reader:
    def read(self, path):
        for line in Path(path).read_text().splitlines():
            *x, y = map(float, line.split())
            yield torch.tensor(x), torch.tensor(y)
"""
ROWS = 11


def written(folder: Path, text: str = CONFIG) -> Path:
    """The configuration with its files; the data are 11 samples in two files."""
    for name, source in (
        ("config.yaml", text),
        ("model.py", MODEL),
        ("other/model.py", MODEL.replace("self.line", "self.tower")),
        ("reader.py", READER),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(source)
    (folder / "data").mkdir(exist_ok=True)
    draw = torch.Generator().manual_seed(1)
    lines = [f"{a:.3f} {b:.3f} {a - 2 * b:.3f}" for a, b in torch.rand(ROWS, 2, generator=draw).tolist()]
    (folder / "data/1.txt").write_text("\n".join(lines[:7]))
    (folder / "data/2.txt").write_text("\n".join(lines[7:]))
    return folder / "config.yaml"


def run(folder: Path, *overrides: str, text: str = CONFIG, mode: Sequence[str] | None = None) -> ConfigResult:
    """Write the configuration where it is not there yet, and run it in this process."""
    path = folder / "config.yaml"
    if not path.exists():
        written(folder, text)
    return run_config(load_config(path, overrides), mode)


def command(*words: str) -> list[str]:
    """The command line `torchrelay`."""
    return [sys.executable, "-m", "torchrelay", *words]
