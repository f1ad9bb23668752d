"""FSDP2, HSDP and TP x FSDP2 on 4 ranks resume bit for bit; 2 ranks and one process read what 4 wrote."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrun import REPOSITORY, torchrun

from torchrelay import LocalSession, open_checkpoint

PROGRAM = REPOSITORY / "tests/programs/sharded.py"
KINDS = ("fsdp", "hsdp", "tp")
pytestmark = [pytest.mark.slow, pytest.mark.ranks, pytest.mark.timeout(300)]


def program() -> Any:
    spec = importlib.util.spec_from_file_location("sharded_program", PROGRAM)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of every kind on 4 ranks, and one of a plain network in this process."""
    folder = tmp_path_factory.mktemp("sharded")
    done = torchrun(PROGRAM, "exact", str(folder), *KINDS, warm=True, ranks=4, cwd=folder, timeout_secs=200)
    assert done.rc == 0, str(done)
    with LocalSession() as session:
        plain = program().run(session, folder / "plain", "plain", 4)
    (folder / "plain.json").write_text(json.dumps(plain))
    return folder


@pytest.fixture(scope="module")
def told(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "exact-4-fsdp.json").read_text()))


@pytest.fixture(scope="module")
def read_by_two(folder: Path) -> dict[str, Any]:
    """What 2 ranks of FSDP2 start from, in copies of all runs."""
    copies = folder / "on-two"
    for name in (*KINDS, "plain"):
        shutil.copytree(folder / name, copies / name)
    arguments = ("reads", str(copies), "fsdp", *KINDS, "plain")
    done = torchrun(PROGRAM, *arguments, warm=True, ranks=2, cwd=copies, timeout_secs=200)
    assert done.rc == 0, str(done)
    return dict(json.loads((copies / "reads-2-fsdp.json").read_text()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_trains_to_the_same_bits(told, kind):
    """Two epochs and two more by new objects are four epochs, parameters and optimizer state alike."""
    one = told[kind]
    assert one["after"][0] == one["before"][-1]
    assert one["before"] + one["after"][1:] == one["once"]


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_read_what_four_wrote(told, read_by_two, kind):
    """FSDP2 on 2 ranks starts from exactly the state in which any mesh of 4 ended."""
    assert read_by_two[kind] == told[kind]["after"][-1]


def test_fsdp_reads_a_plain_checkpoint(folder, read_by_two):
    """What one process saved from a plain network starts FSDP2 on 2 ranks."""
    assert read_by_two["plain"] == json.loads((folder / "plain.json").read_text())[-1]


@pytest.mark.parametrize("kind", KINDS)
def test_one_process_reads_what_four_ranks_wrote(folder, told, kind):
    """Without torch.distributed a plain network and its optimizer take the whole state."""
    module = program()
    model = module.Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    found = open_checkpoint(folder / kind)
    found.load({"model": model, "optimizer": optimizer})
    assert module.state_of(model, optimizer) == told[kind]["after"][-1]
    loaded = found.load_tensors("model.up.weight")["model.up.weight"]
    assert type(loaded) is torch.Tensor
    assert torch.equal(loaded, model.up.weight)
    assert {leaf.scope for leaf in found.leaves if leaf.name == "model.up.weight"} == {"sharded"}
    layouts = {leaf.layout for leaf in found.manifest.leaves if leaf.scope == "sharded"}
    assert layouts
    assert not torch.distributed.is_initialized()


def test_meshes_that_differ_in_names_alone_are_saved_beside_stages(tmp_path):
    """Equal meshes are several objects then, and ranks hear of each other's leaves: their plans agree."""
    program = REPOSITORY / "tests/programs/named_meshes.py"
    done = torchrun(program, str(tmp_path), warm=True, ranks=2, cwd=tmp_path, timeout_secs=100)
    assert done.rc == 0, str(done)
    assert open_checkpoint(tmp_path / "run").epoch == 2
