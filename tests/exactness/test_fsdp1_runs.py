"""FSDP1 on 4 ranks resumes bit for bit; 2 ranks and one process read what 4 wrote."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torchrun import REPOSITORY, torchrun

import torchrelay
from torchrelay import open_checkpoint

PROGRAM = REPOSITORY / "tests/programs/fsdp1.py"
KINDS = ("fsdp", "flat", "hybrid")
pytestmark = [pytest.mark.slow, pytest.mark.ranks, pytest.mark.timeout(300)]


def program() -> Any:
    spec = importlib.util.spec_from_file_location("fsdp1_program", PROGRAM)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of every kind on 4 ranks."""
    folder = tmp_path_factory.mktemp("fsdp1")
    done = torchrun(PROGRAM, "exact", str(folder), warm=True, ranks=4, cwd=folder, timeout_secs=200)
    assert done.rc == 0, str(done)
    return folder


@pytest.fixture(scope="module")
def told(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "exact-4.json").read_text()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_trains_to_the_same_bits(told, kind):
    """With original or flat parameters, with replicas of shards, asynchronous or not."""
    one = told[kind]
    assert one["after"][0] == one["before"][-1]
    assert one["before"] + one["after"][1:] == one["once"]


def test_two_ranks_read_what_four_wrote(folder, told):
    """FSDP1 on 2 ranks starts from exactly the state in which 4 ended."""
    copies = folder / "on-two"
    for kind in KINDS:
        shutil.copytree(folder / kind, copies / kind)
    done = torchrun(PROGRAM, "reads", str(copies), *KINDS, warm=True, ranks=2, cwd=copies, timeout_secs=200)
    assert done.rc == 0, str(done)
    read = json.loads((copies / "reads-2.json").read_text())
    assert read == {kind: told[kind]["after"][-1] for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_one_process_reads_what_four_ranks_wrote(folder, told, kind):
    """Without torch.distributed the state goes into a plain module, or comes as tensors."""
    module = program()
    model = module.Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    found = open_checkpoint(folder / kind)
    found.load({"net": torchrelay.fsdp_state(model, optimizer)})
    assert module.state_of(model, optimizer) == told[kind]["after"][-1]
    weights = found.load_tensors("net.model", rename={"net.model.": ""})
    model.load_state_dict(weights)
    assert {leaf.scope for leaf in found.leaves if leaf.name == "net.model.up.weight"} == {"sharded"}


def test_every_rank_writes_its_shards(folder):
    """No rank holds or writes the whole."""
    files = sorted(folder.glob("fsdp/checkpoints/data/e00000004-*/*.safetensors"))
    assert len(files) == 4
    sizes = []
    for file in files:
        with safe_open(file, "pt") as shard:
            sizes.append(sum(shard.get_tensor(key).nbytes for key in shard.keys() if key.startswith("net.")))  # noqa: SIM118
    assert max(sizes) < 0.5 * sum(sizes)


def test_what_cannot_be_stored_is_refused_with_the_remedy(tmp_path):
    """The bare module, and shards that say no mesh."""
    done = torchrun(PROGRAM, "refused", str(tmp_path), warm=True, ranks=2, cwd=tmp_path, timeout_secs=100)
    assert done.rc == 0, str(done)
    told = json.loads((tmp_path / "refused-2.json").read_text())
    assert "register torchrelay.fsdp_state(module, optimizer)" in told["bare"]
    assert "device_mesh=init_device_mesh" in told["no mesh"]
