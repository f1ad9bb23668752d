"""Configurations for tests: a right one with its files, and how one is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torchrelay.jobs.config.config import Config, load_config
from torchrelay.jobs.config.tree import ConfigError

RIGHT = """\
workspace: "."
mode: [train1, infer1]
runner:
- name: train1
  class: single_train
  device: cpu
  epochs: 10
  save_checkpoint_interval: 2
  save_checkpoint_path: "increment"
  print_interval: 10
  phases: [phase1]
  startup_class_path: "{workspace}/your_startup.py"
- name: infer1
  class: infer
  init_model_path: "increment"
  phases: phase1
phase:
- name: phase1
  model: "{workspace}/model.py"
  dataset_name: d
dataset:
- name: d
  batch_size: 5
  type: DataLoader
  data_path: "{workspace}/data"
  data_converter: "{workspace}/reader.py"
  tags: [x, y]
hyper_parameters:
  optimizer:
    class: Adam
    learning_rate: 1e-3
  lr: 0.1
  sparse_feature_number: 1000001
"""
FILES = ("model.py", "reader.py", "your_startup.py")


def written(folder: Path, text: str = RIGHT) -> Path:
    """A configuration file with the class files of RIGHT beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        (folder / name).touch()
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def read(
    folder: Path, text: str = RIGHT, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> Config:
    """What the text is, read from a file in `folder`; no environment unless one is given."""
    return load_config(written(folder, text), overrides, environ or {})


def problems(
    folder: Path, text: str = RIGHT, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> list[str]:
    """What is wrong with the text, as `line:column path: message`; `-o` before the line for an override."""
    try:
        read(folder, text, overrides, environ)
    except ConfigError as error:
        return [str(one).replace(f"{folder}/config.yaml:", "").replace("command line:", "-o ")
                for one in error.problems]  # fmt: skip
    return []
