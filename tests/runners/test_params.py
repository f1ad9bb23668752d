"""Hyper-parameters that a program passes as `params=` are recorded by each start, and change nothing else."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import torchrelay
from torchrelay.errors import UsageError
from torchrelay.metadata.code.capture import captures
from torchrelay.metadata.run_directory import command_words
from torchrelay.tools.cli.main import main


@dataclass
class Settings:
    lr: float = 0.1
    folder: Path = Path("runs/a")


def recorded(folder: Path, params: Any, epochs: int = 1) -> list[dict[str, Any] | None]:
    """What the starts of a run recorded, after one more start."""
    with torchrelay.Run(folder, dict(value=torch.zeros(1)), params=params, save_signal=None) as run:
        for _ in run.epochs(epochs):
            pass
    return [one["params"] for one in captures(folder)]


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        (None, None),
        ({}, {}),
        (argparse.Namespace(lr=0.1, hidden=[8, 8], name=None), {"lr": 0.1, "hidden": [8, 8], "name": None}),
        (Settings(), {"lr": 0.1, "folder": "runs/a"}),
        ({"model": {"depth": 2}, 3: True}, {"model": {"depth": 2}, "3": True}),
        ({"limit": float("inf"), "dtype": torch.float32}, {"limit": "inf", "dtype": "torch.float32"}),
        ({"db": "postgresql://me:secret@host/x"}, {"db": "postgresql://me:***@host/x"}),
        (
            {"apiKey": "x", "hub_token": "x", "aws": {"secret": ["x"]}},
            {"apiKey": "***", "hub_token": "***", "aws": {"secret": ["***"]}},
        ),
        (
            {"max_tokens": 5, "token": None, "eos_token": "</s>", "password": ""},
            {"max_tokens": 5, "token": None, "eos_token": "</s>", "password": ""},
        ),
    ],
)
def test_params_are_recorded_as_json(tmp_path: Path, given: Any, stored: Any) -> None:
    """Mappings, namespaces and dataclasses are stored by name; other values as text, without secrets."""
    assert recorded(tmp_path / "run", given) == [stored]


def test_secret_options_of_a_command_are_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value follows its option, or an equals sign; other options are kept."""
    given = ["train.py", "--api-key", "k", "--lr", "0.1", "--hub-token=t", "db.password=p", "--secret", "--x"]
    monkeypatch.setattr("sys.argv", given)
    masked = {2: "***", 5: "--hub-token=***", 6: "db.password=***"}
    assert command_words() == [masked.get(at, word) for at, word in enumerate(given)]


def test_show_prints_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`torchrelay show` has the hyper-parameters of the newest launch, nested ones in one line."""
    recorded(tmp_path / "run", {"lr": 0.1, "model": {"depth": 2}})
    assert main(["show", str(tmp_path / "run")]) == 0
    assert "params\n  lr     0.1\n  model  depth=2\nstatus\n" in capsys.readouterr().out
    assert main(["show", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["params"] == {"lr": 0.1, "model": {"depth": 2}}


def test_each_start_records_its_own(tmp_path: Path) -> None:
    """A resumed start may have others; a mapping that changes later is recorded as it was given."""
    assert recorded(tmp_path / "run", {"lr": 0.1}) == [{"lr": 0.1}]
    given = {"lr": 0.2}
    with torchrelay.Run(tmp_path / "run", dict(value=torch.zeros(1)), params=given) as run:
        given["lr"] = 9.0
        for _ in run.epochs(2):
            pass
    assert [one["params"] for one in captures(tmp_path / "run")] == [{"lr": 0.1}, {"lr": 0.2}]
    assert json.loads((tmp_path / "run/captured.1.json").read_text())["params"] == {"lr": 0.2}


class Unprintable:
    def __str__(self) -> str:
        raise ValueError("no text")


CYCLE: dict[str, Any] = {}
CYCLE["itself"] = CYCLE


@pytest.mark.parametrize(
    "given",
    [
        "lr=0.1",
        [1],
        Settings,
        {"data": "x" * (256 << 10)},
        {"lr": Unprintable()},
        {"n": 10**5000},
        pytest.param(CYCLE, id="cycle"),
    ],
    ids=lambda given: type(given).__name__,
)
def test_other_params_are_refused(tmp_path: Path, given: Any) -> None:
    """What has no names, or is data, is refused before the run begins."""
    with pytest.raises(UsageError, match="params"):
        recorded(tmp_path / "run", given)
    assert not (tmp_path / "run").exists()


def test_params_need_a_run_directory() -> None:
    """Without a run directory there is no place to record them."""
    with pytest.raises(UsageError, match="params and configuration belong to a run directory"):
        torchrelay.JobRunner(torchrelay.Job("a"), None, params={"lr": 1})
