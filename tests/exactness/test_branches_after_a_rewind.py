"""An epoch written into a command survives crashes: the branch that it began is continued."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from killing import Kill, fired
from torchrun import REPOSITORY, clean_environment
from warm import PLACE, server, warmed

import torchrelay
from torchrelay import Context, Job, JobRunner, LocalSession, max_epochs, open_checkpoint
from torchrelay.runners.training import startup

PROGRAM = REPOSITORY / "tests/programs/branching.py"
KILLED = -9


class Program:
    """Calls of one program in one folder, each a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, label: str, *arguments: str, kill: Kill | None = None) -> str:
        kills = json.dumps([] if kill is None else [[kill.epoch, kill.step, kill.rank]])
        command = warmed([str(PROGRAM), str(self.folder), label, kills, *arguments])
        env = clean_environment({"PYTHONPATH": str(REPOSITORY / "tests/helpers"), PLACE: server()})
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == (0 if kill is None else KILLED), done
        assert kill is None or kill.name in fired(self.folder / "kills")
        return done.stderr

    def epochs(self, label: str) -> list[int]:
        """The epochs that a call began, in order."""
        lines = (self.folder / "epochs.txt").read_text().split("\n")
        return [int(line.split()[1]) for line in lines if line.split()[:1] == [label]]

    def labels(self, epoch: int | str) -> list[str]:
        """Which calls an epoch on disk descends from."""
        return open_checkpoint(self.folder / "run", epoch=epoch).value("labels")


@pytest.mark.slow
def test_the_same_command_continues_the_branch_it_began(tmp_path: Path) -> None:
    """Killed in a new epoch, the same command goes on there; `--again` rewinds once more."""
    program = Program(tmp_path)
    program("whole")
    rewind = ("--resume-from-epoch", "2")
    program("killed", *rewind, kill=Kill(5, 2, 0))
    assert program.epochs("killed") == [3, 4, 5], "old epochs 5 and 6 exist, and are not chosen"
    program("killed-again", *rewind, "--again", kill=Kill(4, 3, 0))
    assert program.epochs("killed-again") == [3, 4], "--again rewinds, although the branch could go on"
    said = program("continued", *rewind)
    assert program.epochs("continued") == [4, 5, 6], said
    assert "begun by the same request" in said
    assert (tmp_path / "continued.txt").read_text() == (tmp_path / "whole.txt").read_text()
    program("over", *rewind)
    assert program.epochs("over") == [3, 4, 5, 6], "the epochs of the branch were over: it rewinds"

    labels = {
        "6,branch=0": ["whole"] * 6,
        "4,branch=1": ["whole"] * 2 + ["killed"] * 2,
        "6,branch=2": ["whole"] * 2 + ["killed-again"] + ["continued"] * 3,
        6: ["whole"] * 2 + ["over"] * 4,
        2: ["whole"] * 2,
    }
    assert {epoch: program.labels(epoch) for epoch in labels} == labels, "abandoned branches can be read"


class Abandoned(Exception):
    """Ends an attempt in the middle, as a crash would."""


def attempt(
    folder: Path, monkeypatch: pytest.MonkeyPatch, process: str, crash_in: int | None = None, **how: object
) -> list[int]:
    """One attempt of the toy, played as if in a process of its own; returns the epochs it began."""
    monkeypatch.setattr(startup, "_PROCESS", process)
    began: list[int] = []
    job = Job("branching", blobs={"total": torch.zeros(1)})

    @job.epoch
    def grow(ctx: Context) -> None:
        began.append(ctx.epoch)
        ctx["total"].add_(1)
        if ctx.epoch == crash_in:
            raise Abandoned

    job.stop_when(max_epochs(6))
    try:
        with LocalSession() as session:
            JobRunner(job, folder).train(session, **how)
    except torchrelay.RelayError:
        assert crash_in == began[-1]
    return began


def test_a_crash_after_a_rewind_goes_on_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request is remembered across processes, whatever old epochs exist and wherever the crash is."""
    assert attempt(tmp_path, monkeypatch, "a") == [1, 2, 3, 4, 5, 6]
    assert attempt(tmp_path, monkeypatch, "b", crash_in=5, resume_from_epoch=2) == [3, 4, 5]
    assert attempt(tmp_path, monkeypatch, "c", crash_in=5, resume_from_epoch=2) == [5]
    assert attempt(tmp_path, monkeypatch, "d", crash_in=3, resume_from_epoch=2, again=True) == [3]
    assert attempt(tmp_path, monkeypatch, "e", crash_in=4, resume_from_epoch=2) == [3, 4]
    assert attempt(tmp_path, monkeypatch, "f") == [4, 5, 6], "without a request: the newest of the branch"
    assert attempt(tmp_path, monkeypatch, "g", resume_from_epoch=2) == [3, 4, 5, 6], "its epochs were over"


def test_another_request_rewinds_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the very request that began the branch continues it."""
    attempt(tmp_path, monkeypatch, "a")
    attempt(tmp_path, monkeypatch, "b", crash_in=5, resume_from_epoch=2)
    assert attempt(tmp_path, monkeypatch, "c", crash_in=5, resume_from_epoch=3) == [4, 5]
    assert attempt(tmp_path, monkeypatch, "d", resume_from_epoch=2) == [3, 4, 5, 6]


def test_every_call_of_one_process_rewinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within one process `resume_from_epoch` always rewinds, also after a failure in the middle."""
    attempt(tmp_path, monkeypatch, "a")
    for _ in range(2):
        assert attempt(tmp_path, monkeypatch, "b", crash_in=5, resume_from_epoch=2) == [3, 4, 5]
    for _ in range(2):
        assert attempt(tmp_path, monkeypatch, "b", resume_from_epoch=2) == [3, 4, 5, 6]


def test_abandoned_epochs_are_readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`open_checkpoint(run, epoch="6,branch=0")` reads what a rewind has left behind; "last" does not."""
    attempt(tmp_path, monkeypatch, "a")
    attempt(tmp_path, monkeypatch, "b", crash_in=4, resume_from_epoch=2)
    assert open_checkpoint(tmp_path, epoch="6,branch=0").load_tensors("total")["total"].item() == 6
    assert open_checkpoint(tmp_path, epoch="last").position.epoch == 3
    with pytest.raises(torchrelay.RelayError, match="6"):
        open_checkpoint(tmp_path, epoch=6)
