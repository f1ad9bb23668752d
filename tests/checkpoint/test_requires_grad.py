"""Which parameters learn is part of the state of a run, and the program's own business elsewhere."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from torchrelay import Job, JobRunner, max_epochs, open_checkpoint
from torchrelay.checkpoint.format.manifest import codec
from torchrelay.errors import DamagedError

GOLDEN = Path(__file__).resolve().parent.parent / "golden"


def start(run: Path, epochs: int, unfrozen_at: int = 3, **options: Any) -> tuple[torch.nn.Module, list[Any]]:
    """A program that freezes the backbone when it builds the model, and trains it from an epoch on."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = Job("frozen", blobs=dict(model=model, optimizer=optimizer))
    learning: list[Any] = []

    @job.epoch
    def train(ctx: Any) -> None:
        if ctx.epoch == unfrozen_at:
            model[0].requires_grad_(True)
            model[1].bias.requires_grad_(False)
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        learning.append([name for name, one in model.named_parameters() if one.requires_grad])

    job.stop_when(max_epochs(epochs))
    JobRunner(job, run, best=None, **options).train()
    return model, learning


def test_what_was_unfrozen_while_training_is_so_after_a_resume(tmp_path: Path) -> None:
    """A run cut after every epoch trains the same parameters to the same bits, and says where they differ."""
    whole, learning = start(tmp_path / "whole", 5)
    seen = []
    for epochs in range(1, 6):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model, now = start(tmp_path / "cut", epochs)
        seen += now
        lines = [str(one.message) for one in caught if "requires_grad" in str(one.message)]
        assert len(lines) == (1 if epochs > 3 else 0)
        assert not lines or "model.0.weight, model.0.bias, model.1.bias is as it was saved" in lines[0]
    assert seen == learning
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_load_into_another_model_leaves_requires_grad_alone(tmp_path: Path) -> None:
    """Fine-tuning: what the program froze stays frozen, whatever the checkpoint had."""
    start(tmp_path / "run", 4)
    other = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)).requires_grad_(False)
    open_checkpoint(tmp_path / "run").load({"model": other})
    assert not any(one.requires_grad for one in other.parameters())


def test_the_manifest_says_which_are_frozen(tmp_path: Path) -> None:
    """A column of the frozen rows; where a writer did not say it nothing is known; odd rows are damage."""
    start(tmp_path / "run", 2)
    manifest = open_checkpoint(tmp_path / "run").manifest
    frozen = {leaf.name: leaf.frozen for leaf in manifest.leaves if leaf.role == "parameter"}
    assert frozen == {
        "model.0.bias": True,
        "model.0.weight": True,
        "model.1.bias": False,
        "model.1.weight": False,
    }
    data = codec.encode(manifest)
    assert codec.decode(data) == manifest
    assert b'"frozen":[' in data
    key = data[data.index(b'"frozen":') : data.index(b',"group"')]
    silent = codec.decode(data.replace(key + b",", b""))
    assert {leaf.frozen for leaf in silent.leaves} == {None}
    with pytest.raises(DamagedError):
        codec.decode(data.replace(key, b'"frozen":[99]'))


def test_the_frozen_sample_is_read_and_written_alike() -> None:
    """The manifest of a frozen sample says of each parameter whether it had a gradient."""
    data = (GOLDEN / "manifest_frozen.json").read_bytes()
    manifest = codec.decode(data)
    assert {leaf.name for leaf in manifest.leaves if leaf.frozen} == {"model.body", "model.tied"}
    assert {leaf.name for leaf in manifest.leaves if leaf.frozen is None} >= {"model.mean", "total"}
    assert {leaf.frozen for leaf in manifest.leaves if leaf.role == "parameter"} == {True, False}
    assert codec.encode(manifest) == data


def test_references_to_earlier_epochs_say_what_is_frozen_now(tmp_path: Path) -> None:
    """A parameter that is frozen between two epochs, and whose bytes stay, is stored as it is now."""
    start(tmp_path / "run", 4, unfrozen_at=2, keep_every=1)
    by_epoch = {
        epoch: {
            leaf.name: leaf.frozen
            for leaf in open_checkpoint(tmp_path / "run", epoch=epoch).manifest.leaves
            if leaf.role == "parameter"
        }
        for epoch in (1, 2, 4)
    }
    assert by_epoch[1]["model.1.bias"] is False
    assert by_epoch[2]["model.1.bias"] is by_epoch[4]["model.1.bias"] is True
    assert by_epoch[1]["model.0.weight"] is True
    assert by_epoch[2]["model.0.weight"] is False
