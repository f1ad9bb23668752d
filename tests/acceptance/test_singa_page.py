"""Statements of docs/guides/migrate-singa.md that no other test runs, row by row."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torchrun import clean_environment

import torchrelay

PAGE = (Path(__file__).resolve().parents[2] / "docs/guides/migrate-singa.md").read_text()
BLOCKS: list[str] = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def block(*words: str) -> str:
    """The one block of the page that has all of these words."""
    (found,) = [one for one in BLOCKS if all(word in one for word in words)]
    return found


def typed(folder: Path, text: str) -> str:
    """What a program prints in a process of its own, in this folder."""
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=folder, env=clean_environment(),
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_package_of_an_extended_model_needs_nothing_beside_it(tmp_path: Path) -> None:
    """Another process, in a folder with the package alone, trains imported and new parameters."""
    (tmp_path / "made").mkdir()
    (tmp_path / "made/extended.py").write_text(block("# extended.py"))
    before, elsewhere = block("from extended import Extended").split("\nelsewhere = ")
    typed(tmp_path / "made", before)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "made/extended.pkg").rename(tmp_path / "elsewhere/extended.pkg")
    program = f"import torch, torchrelay\nelsewhere = {elsewhere}"
    program += "\nprint(sorted(name.split('.')[0] for name, _ in elsewhere.named_parameters()))\n"
    assert typed(tmp_path / "elsewhere", program) == "True\n['0', '0', 'head', 'head']\n"


def test_nothing_is_compiled_by_a_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither `load_states` nor `load` calls torch.compile, though the saved model was compiled."""
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    torchrelay.compile(model, torch.randn(4, 3), graph=True)
    torchrelay.save_states(tmp_path / "states.zip", model)
    torchrelay.save(tmp_path / "model.pkg", nn.Sequential(nn.Linear(3, 2)), torch.randn(4, 3))

    def refuse(*values: object, **named: object) -> None:
        raise AssertionError("compiled")

    monkeypatch.setattr(torch, "compile", refuse)
    monkeypatch.setattr(nn.Module, "compile", refuse)
    fresh = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    torchrelay.load_states(tmp_path / "states.zip", fresh)
    assert fresh(torch.ones(1, 3)).shape == torchrelay.load(tmp_path / "model.pkg")(torch.ones(1, 3)).shape


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_is_that_of_torch(training: bool) -> None:
    """`compile` leaves a model in the mode in which it is."""
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).train(training)
    torchrelay.compile(model, torch.randn(4, 3))
    assert model.training is training and all(one.training is training for one in model.modules())


def test_inputs_are_plain_tensors_that_are_copied_into() -> None:
    """`tensor.copy_` changes what a compiled or an imported model is called with."""
    pytest.importorskip("onnx")
    model = nn.Linear(3, 2)
    x, new = torch.zeros(4, 3), torch.randn(4, 3)
    torchrelay.compile(model, x)
    imported = torchrelay.from_onnx(torchrelay.to_onnx(model, x))
    assert not torch.allclose(model(x), model(new))
    x.copy_(new)
    assert torch.equal(model(x), model(new))
    torch.testing.assert_close(imported(x), model(new))


def test_a_model_and_its_states_hold_no_pickle(tmp_path: Path) -> None:
    """Archives and packages are zips whose members are JSON, text, ONNX or safetensors."""
    import zipfile

    model = nn.Sequential(nn.Linear(3, 2))
    torchrelay.save_states(
        tmp_path / "a.zip", model, aux_states={"n": 1, "t": torch.ones(2), "d": {"x": "y"}}
    )
    torchrelay.save(tmp_path / "b.pkg", model, torch.randn(4, 3))
    for name in ("a.zip", "b.pkg"):
        with zipfile.ZipFile(tmp_path / name) as archive:
            for member in archive.namelist():
                assert not archive.read(member).startswith(
                    (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
                )
                assert not member.endswith((".pkl", ".pickle", ".pt"))
    assert list(torchrelay.load_states(tmp_path / "a.zip", model)) == ["n", "t", "d"]
    assert list(torchrelay.get_states(model)) == list(model.state_dict())
