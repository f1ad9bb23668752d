"""How runs end and begin again: the tail, limits, resume modes, exit tasks after a failure."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from stage import warned
from torchrun import clean_environment
from warm import PLACE, server, warmed

from torchrelay import (
    Job,
    JobRunner,
    LocalSession,
    MultiNodeCheckpointManager,
    RunResult,
    StopAnswer,
    Task,
    TaskGroup,
    UploadTaskGroupBuilder,
    max_epochs,
)
from torchrelay.errors import NoProvableEpochError, TaskFailedError, UnknownEpochError, UsageError
from torchrelay.metadata.run_directory import RunDirectory


@dataclass
class Program:
    """A user's script, started anew by every call: what it does is in `events`."""

    run: Path
    epochs: int = 3
    fails: str = ""
    events: list[str] = field(default_factory=list)

    def __call__(self, fails: str = "", **options: object) -> RunResult:
        self.fails = fails
        self.events.clear()
        job = Job("ending")
        job.setup(self.part("setup"))
        job.init(lambda ws: ws.update(n=torch.zeros(1)))
        job.init(self.part("init"))
        job.epoch(lambda ctx: self.part(f"epoch {ctx.epoch}")())
        job.download(self.part("download"))
        job.exit(self.part("exit"))
        job.exit(self.part("cleanup"), on_failure=True)
        job.stop_when(max_epochs(self.epochs))
        train = {name: options.pop(name) for name in ("resume_from_epoch", "again") if name in options}
        runner = JobRunner(job, self.run, upload_task_group_builder=Upload(self), **options)
        return runner.train(LocalSession(), **train)

    def part(self, name: str):
        def do() -> None:
            self.events.append(name)
            if name == self.fails:
                raise OSError(f"{name} failed")

        return do


class Upload(UploadTaskGroupBuilder):
    def __init__(self, program: Program) -> None:
        self.program = program

    def build(self, epoch: int, checkpoint_manager) -> TaskGroup:
        group = TaskGroup(name="upload")
        Task(self.program.part(f"upload {epoch}"), group=group)
        return group


EPOCHS = ["epoch 1", "epoch 2", "epoch 3"]
TAIL = ["upload 3", "download", "exit", "cleanup"]


@pytest.fixture
def program(tmp_path: Path) -> Program:
    return Program(tmp_path / "run")


@pytest.mark.parametrize(
    ("fails", "left"),
    [("upload 3", TAIL), ("download", TAIL[1:]), ("exit", TAIL[2:]), ("cleanup", TAIL[2:])],
)
def test_the_tail_resumes_at_the_first_part_that_is_not_done(program, fails, left):
    """After a failure in upload, download or exit the same command runs only what is left, and no epoch."""
    with pytest.raises(TaskFailedError, match=f"{fails} failed"):
        program(fails)
    assert program.events[:5] == ["setup", "init", *EPOCHS]
    result = program()
    assert result == 3 and result.status == "FINISHED"
    assert program.events == ["setup", *left]
    assert RunDirectory(program.run).status()["state"] == "FINISHED"


def test_a_tail_that_fails_again_keeps_what_was_done(program):
    """What an earlier start finished is remembered over several failures."""
    for fails, ran in (("download", TAIL[1:2]), ("download", TAIL[1:2]), ("exit", TAIL[1:3])):
        with pytest.raises(TaskFailedError):
            program(fails)
        assert [event for event in program.events if event in TAIL[:3]][-len(ran) :] == ran
    program()
    assert program.events == ["setup", *TAIL[2:]]


def test_a_process_that_dies_in_the_tail_is_continued(tmp_path):
    """A death without any farewell between download and exit: only exit is left."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, torchrelay\n"
        "from torchrelay import Job, JobRunner, max_epochs\n"
        "job = Job('dies')\n"
        "job.setup(lambda: print('setup'))\n"
        "job.epoch(lambda: print('epoch'))\n"
        "job.download(lambda: print('download', flush=True))\n"
        "job.exit(lambda: os._exit(9) if 'die' in sys.argv else print('exit'))\n"
        "job.stop_when(max_epochs(2))\n"
        "print(repr(JobRunner(job, 'run').train()))\n"
    )
    env = clean_environment({PLACE: server()})

    def start(*args: str) -> subprocess.CompletedProcess[str]:
        command = warmed([str(script), *args])
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100)

    died = start("die")
    assert died.returncode == 9 and died.stdout.split() == ["setup", "epoch", "epoch", "download"], died
    again = start()
    assert again.returncode == 0 and again.stdout.split()[:2] == ["setup", "exit"], again
    assert again.stdout.split("\n")[2].startswith("RunResult(2, status='FINISHED'"), again


def test_a_finished_run_says_so_and_is_only_set_up(program, capsys):
    """Setup, as at every start, and nothing else; the result has epoch, stop reason and commit."""
    first = program()
    capsys.readouterr()
    result = program()
    assert program.events == ["setup"]
    assert result == 3 and result.committed == 3 and result.stop == first.stop
    assert "already finished at epoch 3" in capsys.readouterr().err
    assert RunDirectory(program.run).status()["state"] == "FINISHED"


def test_raising_max_epochs_continues(program):
    """A finished run goes on from its last epoch to the new limit and through a tail of its own."""
    program()
    program.epochs = 5
    assert program() == 5
    assert program.events == ["setup", "epoch 4", "epoch 5", "upload 5", *TAIL[1:]]


def test_lowering_max_epochs_ends_at_once(program):
    """A run that is beyond today's limit trains no epoch; its tail runs if it has not."""
    with pytest.raises(TaskFailedError):
        program("epoch 3")
    program.epochs = 1
    assert program() == 2
    assert program.events == ["setup", "upload 2", *TAIL[1:]]
    assert program() == 2 and program.events == ["setup"]


def test_must_refuses_an_empty_directory(program):
    """resume="must" starts nothing where nothing was committed, and continues where something was."""
    with pytest.raises(NoProvableEpochError):
        program(resume="must")
    assert program.events == []
    with pytest.raises(TaskFailedError):
        program("epoch 2")
    assert program(resume="must") == 3
    assert program.events == ["setup", "epoch 2", "epoch 3", *TAIL]


def test_never_begins_anew(program):
    """resume="never" starts from scratch, says that the epochs there are abandoned, and keeps them."""
    program()
    with warned() as texts:
        assert program(resume="never") == 3
    assert any("from scratch" in text for text in texts)
    assert program.events == ["setup", "init", *EPOCHS, *TAIL]
    with pytest.raises(UsageError, match="contradicts"):
        program(resume="never", resume_from_epoch=1)


def test_an_explicit_epoch_is_continued_by_the_same_command_unless_again(program):
    """In one process every call rewinds; its tail is run for the new branch."""
    program()
    for _ in range(2):
        assert program(resume_from_epoch=2) == 3
        assert program.events == ["setup", "epoch 3", *TAIL]


def test_exit_tasks_with_on_failure_run_after_a_failure(program):
    """A task of the exit group with on_failure=True runs after a failed epoch; the others do not."""
    with pytest.raises(TaskFailedError, match="epoch 2 failed"):
        program("epoch 2")
    assert program.events == ["setup", "init", "epoch 1", "epoch 2", "cleanup"]
    assert RunDirectory(program.run).status()["state"] == "FAILED"


def test_save_initial_false_leaves_epoch_0_out(program):
    """Epoch 0 is not committed, the others are."""
    program(save_initial=False)
    manager = MultiNodeCheckpointManager(program.run / "checkpoints")
    assert [bool(manager.files("trainer_0", epoch)) for epoch in range(4)] == [False, True, True, True]
    with pytest.raises(UnknownEpochError, match="there are: 1, 2, 3"):
        program(resume_from_epoch=0)


def test_a_stop_verdict_is_asked_once(tmp_path):
    """A condition that said stop is not asked again by a start that only has the tail left."""
    asked: list[int] = []

    class Twice:
        name, rule, limit = "twice", "any", False

        def ask(self, ctx) -> StopAnswer:
            asked.append(ctx.epoch)
            return StopAnswer(ctx.epoch == 2, "twice is enough")

    def start(fail: bool) -> RunResult:
        job = Job("asked")
        job.epoch(lambda: None)
        job.exit(lambda: 1 / 0 if fail else None)
        job.stop_when(Twice())
        return JobRunner(job, tmp_path / "run").train(LocalSession())

    with pytest.raises(TaskFailedError):
        start(fail=True)
    assert start(fail=False) == 2
    assert asked == [1, 2]
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["state"] == "FINISHED" and "twice is enough" in status["stop"][0]
