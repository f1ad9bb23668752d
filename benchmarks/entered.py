"""Count the files of the package whose functions run in a save and in a resume of one tensor.

    python benchmarks/entered.py [--list]

A file counts when a Python function in it was called, in any thread, as `sys.setprofile` sees it. The save is
a later one of a manager in use. The resume is `train(resume_from_epoch=1)` of a new runner, up to its first
task.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from pathlib import Path
from types import CodeType, FrameType

import torch

import torchrelay

ROOT = str(Path(torchrelay.__file__).parent) + "/"


class Entered:
    """The functions of the package that are called between `start` and `stop`."""

    def __init__(self) -> None:
        self.functions: set[CodeType] = set()

    def start(self) -> None:
        threading.setprofile(self._look)
        sys.setprofile(self._look)

    def stop(self) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _look(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            self.functions.add(frame.f_code)

    @property
    def files(self) -> list[str]:
        """The files that hold these functions, below the package."""
        return sorted({code.co_filename.removeprefix(ROOT) for code in self.functions})


def count(folder: str) -> dict[str, Entered]:
    """Train two epochs, save a third by hand, and resume from the first."""
    found = {"save": Entered(), "resume": Entered()}
    total = torch.zeros(4)
    job = torchrelay.Job("entered", blobs=dict(total=total))

    @job.epoch
    def add() -> None:
        found["resume"].stop()
        total.add_(1)

    job.stop_when(torchrelay.max_epochs(2))
    manager = torchrelay.MultiNodeCheckpointManager(folder)
    with torchrelay.LocalSession() as session:
        torchrelay.JobRunner(job, manager).train(session)
        found["save"].start()
        session.run(manager.save(3))
        found["save"].stop()
        runner = torchrelay.JobRunner(job, torchrelay.MultiNodeCheckpointManager(folder))
        found["resume"].start()
        runner.train(session, resume_from_epoch=1)
    return found


def main() -> None:
    """Print a line for each, with `--list` also the files."""
    parser = argparse.ArgumentParser(description="Count the files that a save and a resume run through.")
    parser.add_argument("--list", action="store_true", help="name the files, too")
    listed = parser.parse_args().list
    with tempfile.TemporaryDirectory() as folder:
        for name, entered in count(f"{folder}/checkpoints").items():
            print(f"{name}: {len(entered.files)} files, {len(entered.functions)} functions")
            if listed:
                print(*entered.files, sep="\n")


if __name__ == "__main__":
    main()
