"""`torchrelay launch` as a process of its own, bounded in time; what it starts is warm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torchrun import clean_environment, interruptible
from warm import CLIENT, PLACE, server

import torchrelay

JOB = Path(__file__).with_name("launched_job.py")
_MAIN = "import sys; sys.executable = sys.argv.pop(1); from torchrelay.__main__ import main; sys.exit(main())"


def warm_python(folder: Path) -> Path:
    """A program that is called like Python and starts programs as forks of one that has imported torch."""
    path = folder / "warm python"
    if not path.exists():
        path.write_text(f'#!/bin/sh\n[ "$1" = -u ] && shift\nexec "{sys.executable}" -I -S "{CLIENT}" "$@"\n')
        path.chmod(0o755)
    return path


def warm_environment(folder: Path) -> dict[str, str]:
    """What a launch needs for its ranks to be warm."""
    return clean_environment({PLACE: server(), "PYTHON_EXEC": str(warm_python(folder))})


class Launch:
    """A launch on this machine that runs; use as a context manager, so that it never outlives the test."""

    def __init__(self, folder: Path, *words: str, env: Mapping[str, str] | None = None) -> None:
        self._said = folder / f"said.{len(list(folder.glob('said.*')))}"
        command = [sys.executable, "-c", _MAIN, str(warm_python(folder)), "launch", *words]
        with self._said.open("w") as said, interruptible():
            self.process = subprocess.Popen(
                command, cwd=folder, env=warm_environment(folder) | dict(env or {}), stdout=said, stderr=said
            )

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()  # its agents and ranks end with it
        self.process.wait(60)

    @property
    def said(self) -> str:
        """What was printed until now."""
        return self._said.read_text()

    def wait(self, secs: float = 100) -> int:
        """The exit code; raises AssertionError when it takes longer."""
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(secs)
        raise AssertionError(f"the launch still runs after {secs} s:\n{self.said}")


def launched(folder: Path, *words: str, env: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Launch and wait for the end: the exit code, and what was said."""
    with Launch(folder, *words, env=env) as launch:
        return launch.wait(), launch.said


def wait_for(path: Path, secs: float = 100) -> None:
    """Wait until a file is there."""
    end = time.monotonic() + secs
    while not path.exists():
        assert time.monotonic() < end, f"no {path} within {secs} s"
        time.sleep(0.05)


def status(run: Path) -> dict[str, Any]:
    """What the run says of itself."""
    found: dict[str, Any] = json.loads((run / "status.json").read_text())
    return found


def weights(run: Path) -> dict[str, torch.Tensor]:
    """All tensors of the newest epoch."""
    return torchrelay.open_checkpoint(run).load_tensors("*")


def gone(pid: int) -> bool:
    """Whether a process has ended."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True
