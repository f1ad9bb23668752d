"""What checkpoints do for stages, whether or not there are any (ALF-9, 13, 15)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from stages import Net, filled, run_stage, values
from torch import nn

from torchrelay import InitFrom, Upstream, open_checkpoint
from torchrelay.errors import BlobError
from torchrelay.tools.cli.main import main


class Tied(nn.Module):
    """Two layers with one weight, and a child that knows its parent."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.first.parent = [self]  # type: ignore[assignment]


def test_alf_9_shared_parameters_are_saved_once_and_stay_shared(tmp_path: Path) -> None:
    """Of tied weights one is stored, also of kept ones; a load and a warm start leave them tied."""
    run_stage(tmp_path / "a", {"model": filled(Tied(), 0)}, epochs=1, step=0.5)
    stored = {leaf.name: leaf.alias_of for leaf in open_checkpoint(tmp_path / "a").leaves}
    assert stored["model.second.weight"] == "model.first.weight"
    model = Tied()
    run_stage(
        tmp_path / "b",
        {"net": model},
        epochs=1,
        step=0,
        upstream={"a": Upstream(tmp_path / "a", keep="model")},
        init_from=InitFrom("a", "net", "model"),
    )
    assert model.first.weight is model.second.weight
    found = values(tmp_path / "b")
    assert found["net.second.weight"] == found["upstream.a.model.second.weight"] == 0.5
    fresh = Tied()
    open_checkpoint(tmp_path / "b").load({"net": fresh})
    assert fresh.first.weight is fresh.second.weight
    assert fresh.first.weight[0, 0].item() == 0.5
    sizes = {blob.name: blob.bytes for blob in open_checkpoint(tmp_path / "b").blobs.values()}
    assert sizes["net"] == sizes["upstream.a.model"] == (9 + 3 + 3) * 4


def test_alf_13_the_key_tree_is_shown_without_reading_tensors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`ckpt show` lists names, types and shapes of all or what lies below a prefix, of damaged shards too."""
    run_stage(tmp_path / "a", {"model": Net()}, epochs=1)
    for shard in (tmp_path / "a/checkpoints").rglob("*.safetensors"):
        data = bytearray(shard.read_bytes())
        data[-64:] = bytes(64)
        shard.write_bytes(data)
    assert main(["ckpt", "show", f"{tmp_path}/a@0", "--leaves"]) == 0
    shown = capsys.readouterr().out
    for name, shape in (("encoder.weight", "3x4"), ("head.bias", "2")):
        line = next(line for line in shown.splitlines() if line.startswith(f"model.{name} "))
        assert "float32" in line and shape in line.split()
    assert main(["ckpt", "show", f"{tmp_path}/a@0", "--leaves", "--blobs", "model.head", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {leaf["name"] for leaf in told["blobs"]} == {"model.head.weight", "model.head.bias"}


def test_alf_15_what_is_left_out_is_recorded(tmp_path: Path) -> None:
    """By pattern or by scope; the manifest says what a save left out, and a load names the pattern."""
    run_stage(tmp_path / "a", {"model": Net()}, epochs=1, exclude="model.head")
    ckpt = open_checkpoint(tmp_path / "a")
    assert not [leaf.name for leaf in ckpt.leaves if leaf.name.startswith("model.head")]
    assert ckpt.facts.selection.why_not("model.head.weight")
    with pytest.raises(BlobError, match=r"model\.head\.weight \(the save left it out: .*model\.head"):
        ckpt.load({"model": Net()})


def test_alf_15_a_blob_can_opt_out(tmp_path: Path) -> None:
    """A transient blob is in no checkpoint."""
    from torchrelay import Job, JobRunner, LocalSession, max_epochs

    job = Job("x", blobs={"model": Net()})
    job.blobs(cache=torch.zeros(3), scope="transient")
    job.epoch(lambda ctx: None)
    job.stop_when(max_epochs(1))
    JobRunner(job, tmp_path / "a").train(LocalSession())
    assert "cache" not in open_checkpoint(tmp_path / "a").blobs
