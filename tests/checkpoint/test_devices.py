"""What a load makes anew goes to the device that it was saved on, where this process has one.

Where there is no GPU, `torch.float64` stands for what lay on one, and the meta device for that of the load.
`scripts/gpu-check` runs the whole on a real one.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from keeps import Keeps

from torchrelay import Job, JobRunner, LocalSession, max_epochs, open_checkpoint
from torchrelay.checkpoint.format.manifest import codec
from torchrelay.checkpoint.save import capture
from torchrelay.checkpoint.state import leaf, tensor_memory
from torchrelay.checkpoint.state.restore import container
from torchrelay.errors import DamagedError

GOLDEN = Path(__file__).resolve().parent.parent / "golden"


def on_device() -> torch.Tensor:
    return torch.ones(3, dtype=torch.float64)


@pytest.fixture()
def saved_on_device(monkeypatch) -> None:
    """What is of type float64 lies on `cuda`, as far as saves see."""

    def device_of(role: leaf.Role, tensor: torch.Tensor) -> str | None:
        held = role in (leaf.Role.TENSOR, leaf.Role.PARAMETER)
        return "cuda" if held and tensor.dtype == torch.float64 else None

    for module in (leaf, capture):
        monkeypatch.setattr(module, "device_of", device_of)


def train(run: Path) -> dict[str, Any]:
    """A run of one epoch; again it loads the last one."""
    blobs: dict[str, Any] = {
        "keeps": Keeps(), "held": {"place": torch.zeros(3, dtype=torch.float64), "list": [torch.zeros(2)]},
    }  # fmt: skip
    job = Job("devices", blobs=blobs)

    @job.init
    def init(ctx: Any) -> None:
        ctx["made"] = on_device()

    @job.epoch
    def epoch(ctx: Any) -> None:
        blobs["keeps"].kept = {"gpu": [on_device()], "cpu": torch.ones(2)}
        ctx["held"]["place"] = on_device()
        ctx["held"]["list"].append(torch.nn.Parameter(on_device()))

    job.stop_when(max_epochs(1))
    with LocalSession() as session:
        JobRunner(job, run, best=None, code=False).train(session)
        return {**blobs, "made": session.workspace()["made"]}


def devices(found: dict[str, Any]) -> dict[str, str]:
    kept, held = found["keeps"].kept, found["held"]
    tensors = {
        "state": kept["gpu"][0], "state cpu": kept["cpu"], "in place": held["place"], "item": held["list"][0],
        "gained": held["list"][1], "made": found["made"],
    }  # fmt: skip
    return {name: one.device.type for name, one in tensors.items()}


def test_new_tensors_go_to_the_gpu_that_they_were_saved_on(tmp_path, saved_on_device, monkeypatch):
    """State of objects, what containers gained or replaced, what `init` made; others go to the CPU."""
    train(tmp_path / "run")

    def device_for(spec: leaf.LeafSpec) -> torch.device | None:
        return None if spec.device is None else torch.device("meta")

    for module in (tensor_memory, container):
        monkeypatch.setattr(module, "device_for", device_for)
    assert devices(train(tmp_path / "run")) == {
        "state": "meta", "state cpu": "cpu", "in place": "meta", "item": "cpu", "gained": "meta",
        "made": "meta",
    }  # fmt: skip


def test_without_a_gpu_all_comes_to_the_cpu(tmp_path, saved_on_device):
    """An epoch of a GPU goes on in a process that computes on the CPU."""
    train(tmp_path / "run")
    found = train(tmp_path / "run")
    assert set(devices(found).values()) == {"cpu"}
    assert open_checkpoint(tmp_path / "run").load_tensors("held.*")["held.place"].device.type == "cpu"


def test_devices_are_counted_from_that_of_the_process(monkeypatch):
    """What lay on a rank's own GPU goes to that of the rank that loads it, around where there are fewer."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    spec = leaf.spec_of(leaf.Leaf("x", "x", leaf.Role.TENSOR, "main", torch.zeros(2)))
    homes = {
        name: tensor_memory.device_for(replace(spec, device=name))
        for name in (None, "cuda", "cuda:1", "cuda:3")
    }
    assert homes == {
        None: None, "cuda": torch.device("cuda:2"), "cuda:1": torch.device("cuda:3"),
        "cuda:3": torch.device("cuda:1"),
    }  # fmt: skip


def test_a_manifest_with_devices_reads_as_it_was_written():
    """The frozen sample with the column `device` says where leaves lay, and encodes to the same bytes."""
    data = (GOLDEN / "manifest_devices.json").read_bytes()
    made = codec.decode(data)
    assert {one.device for one in made.leaves} == {None, "cuda", "cuda:1"}
    assert codec.encode(made) == data


@pytest.mark.parametrize("wrong", [b'"cuda:x"', b'"../cuda"', b'["cuda"]', b"1", b'"cuda:12345"'])
def test_a_device_that_is_none_is_damage(wrong):
    """Nothing of a manifest's text reaches torch unless it is a device's name."""
    data = (GOLDEN / "manifest_devices.json").read_bytes()
    assert b'["cuda",[' in data
    with pytest.raises(DamagedError, match="device"):
        codec.decode(data.replace(b'["cuda",[', b"[" + wrong + b",["))
