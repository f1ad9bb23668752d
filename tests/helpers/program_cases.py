"""A small program for tests of the verbs, typed in this process or in one of its own."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torchrun import clean_environment

from torchrelay.metadata.experiments import RunStore

SMALL = """\
import torch
import torchrelay


class Line(torchrelay.Program):
    max_epochs = 2
    batch_size = 8
    runs_dir = "../runs"

    def make_data(self):
        x = torch.arange(32.0).reshape(16, 2) / 32
        return {"train": (x, x.sum(1, keepdim=True)), "val": (x[:8], x[:8, :1]), "test": (x[8:], x[8:, :1])}

    def make_model(self):
        return torch.nn.Linear(2, 1)

    def make_criterion(self):
        return torch.nn.MSELoss()

    # more


torchrelay.main(Line)
"""


@dataclass(frozen=True)
class Typed:
    """What became of a command."""

    rc: int
    out: str
    err: str


class Script:
    """A program in a directory of its own, beside its runs."""

    def __init__(self, directory: Path, capsys: pytest.CaptureFixture[str], text: str = SMALL) -> None:
        self.directory, self._capsys = directory, capsys
        self.path = directory / "source" / "line.py"
        self.path.parent.mkdir()
        self.path.write_text(text)

    def __call__(self, *words: str, env: dict[str, str] | None = None) -> Typed:
        """Type it: the script runs as `__main__` in this process, from the directory above it."""
        before = Path.cwd()
        self._capsys.readouterr()
        try:
            os.chdir(self.directory)
            with (
                mock.patch.object(sys, "argv", [str(self.path), *words]),
                mock.patch.object(sys, "path", [str(self.path.parent), *sys.path]),
                mock.patch.dict(os.environ, env or {}),
            ):
                runpy.run_path(str(self.path), run_name="__main__")
            rc = -1
        except SystemExit as end:
            rc = end.code if isinstance(end.code, int) else 1
        finally:
            os.chdir(before)
        return Typed(rc, *self._capsys.readouterr())

    def more(self, text: str) -> None:
        """Add to the class."""
        self.path.write_text(self.path.read_text().replace("    # more\n", f"    {text}\n\n    # more\n"))

    @property
    def runs(self) -> list[Path]:
        """Its run directories, the oldest first."""
        return [run.path for run in RunStore(self.directory / "runs" / "line").runs()]

    @property
    def run(self) -> Path:
        """The only one."""
        (found,) = self.runs
        return found


def start(script: Path, *words: str, cwd: Path, env: dict[str, str] | None = None) -> subprocess.Popen[Any]:
    """Type it in a process of its own."""
    command: Sequence[str] = [sys.executable, str(script), *words]
    return subprocess.Popen(command, cwd=cwd, env=clean_environment(env), stderr=subprocess.PIPE, text=True)


def tree(directory: Path) -> dict[str, bytes]:
    """Every file below a directory with its bytes, but for what Python compiles."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
