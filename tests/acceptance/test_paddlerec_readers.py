"""Readers, places of weights and kinds of layers that configurations in PaddleRec's words have."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from lifecycle_cases import ROWS, command, run, written
from torchrun import clean_environment, torchrun

from torchrelay import open_checkpoint

INDEXED = """\
import torch

class Reader:
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return torch.full((2,), float(index)), torch.tensor(float(index))
"""
SPARSE = """\
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, hyper_parameters):
        super().__init__()
        self.words = nn.Embedding(4, 1, sparse=True)

    def forward(self, batch):
        return self.words((batch[0][:, 0] * 4).long()).squeeze(1)

    def loss(self, outputs, batch):
        return (outputs - batch[1]).square().mean()
"""
KILLED = """\
import os, signal
from torchrelay.lifecycle import Network as Base

class Network(Base):
    def build(self, context):
        super().build(context)
        model, folder = context.phases["a"].model, context.workspace
        plain, steps = model.loss, []

        def loss(outputs, batch):
            steps.append(1)
            if len(steps) == 5 and not os.path.exists(f"{folder}/killed"):
                open(f"{folder}/killed", "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(outputs, batch)

        model.loss = loss
"""


def samples_of(folder: Path) -> list[int]:
    """How many samples inference has seen in each epoch."""
    return [json.loads(line)["samples"] for line in (folder / "out/metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("words", "samples"),
    [
        (["data_converter=indexed.py"], 6),
        (["reader_class_name=Other"], ROWS),
        (["data_path=[data/2.txt,data]"], 4 + ROWS),
        (["data_path=data/2.txt"], 4),
    ],
)
def test_readers_and_places_of_data_in_every_form(tmp_path, words, samples):
    """Indexed readers, classes of another name, files, directories and lists of both give all samples."""
    written(tmp_path)
    (tmp_path / "indexed.py").write_text(INDEXED)
    if "Other" in words[0]:
        reader = tmp_path / "reader.py"
        reader.write_text(reader.read_text().replace("class Reader", "class Other"))
    given = [f"{'+' if one.startswith('reader') else ''}dataset.d.{one}" for one in words]
    run(tmp_path, *given, mode=["train1", "infer1"])
    assert samples_of(tmp_path) == [samples] * 3


def test_a_reader_is_given_the_keys_of_its_dataset(tmp_path):
    """Keys of one's own in a dataset reach the constructor of its reader."""
    written(tmp_path)
    reader = tmp_path / "reader.py"
    takes = "class Reader:\n    def __init__(self, dataset):\n        assert dataset.extra['window'] == 5\n"
    reader.write_text(reader.read_text().replace("class Reader:\n", takes))
    assert run(tmp_path, "+dataset.d.window=5")["train1"] == 2


@pytest.mark.parametrize("form", ["run", "run/checkpoints", "steps/epoch_2_step_2.safetensors"])
def test_weights_come_from_a_run_its_checkpoints_or_a_file_of_a_step(tmp_path, form):
    """`init_model_path` takes a run's directory, its checkpoints, and a file of `save_step_path`."""
    run(tmp_path, "runner.train1.save_step_interval=2", "runner.train1.save_step_path=steps")
    run(tmp_path, f"runner.train1.init_model_path={form}", "runner.train1.save_checkpoint_path=next")
    begun, last = (open_checkpoint(tmp_path / name, epoch) for name, epoch in (("next", 0), ("run", 2)))
    same = torch.equal(
        *(one.load_tensors("a.model.line.weight")["a.model.line.weight"] for one in (begun, last))
    )
    assert same is not form.startswith("steps"), "the file is of a step before the last one"


@pytest.mark.ranks
def test_sparse_embeddings_are_trained_on_two_ranks(tmp_path):
    """`nn.Embedding(sparse=True)` trains with gloo, is saved, and evaluated by one process."""
    written(tmp_path)
    (tmp_path / "model.py").write_text(SPARSE)
    done = torchrun(Path("-m"), "torchrelay", "run", "-m", "config.yaml", warm=True, ranks=2, cwd=tmp_path)
    assert done.rc == 0, str(done)
    name = "a.model.words.weight"
    first, last = (open_checkpoint(tmp_path / "run", at).load_tensors(name)[name] for at in (0, 2))
    assert not torch.equal(first, last)
    run(tmp_path, mode=["infer1"])
    assert samples_of(tmp_path) == [ROWS] * 3


@pytest.mark.ranks
def test_a_process_that_was_killed_is_continued_on_two_ranks(tmp_path):
    """SIGKILL in the second epoch of one process: the same configuration goes on there on two ranks."""
    written(tmp_path)
    (tmp_path / "mine.py").write_text(KILLED)
    words = ["run", "-m", "config.yaml", "-o", "runner.train1.network_class_path=mine.py"]
    killed = subprocess.run(
        command(*words), cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=100
    )
    assert killed.returncode == -9 and open_checkpoint(tmp_path / "run").epoch == 1, killed.stderr
    done = torchrun(Path("-m"), "torchrelay", *words, warm=True, ranks=2, cwd=tmp_path)
    assert done.rc == 0 and "resuming from epoch 1" in done.out + done.err, done
    saved = open_checkpoint(tmp_path / "run")
    assert saved.epoch == 2 and saved.nodes == ("trainer_0", "trainer_1")
