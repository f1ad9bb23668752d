"""Real programs: a user's mistake is one line on stderr, no traceback, and the right exit code."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from pathlib import Path

import pytest
from bad_input import flip, run_program, shard, tree

from torchrelay.errors import UsageError
from torchrelay.runners.training.plan import parse_options

PROGRAM = """
import sys
import torch
from torchrelay import Job, JobRunner, max_epochs

job = Job("program", blobs=dict(w=torch.zeros(3), config=CONFIG))

@job.epoch
def train(ctx):
    print("epoch", ctx.epoch, flush=True)
    EPOCH

job.stop_when(max_epochs(2))
JobRunner(job, WHERE).main()
"""


PLAIN = """
import signal
import torch
import torchrelay

signal.signal(signal.SIGINT, signal.default_int_handler)
with torchrelay.Run("plain", dict(w=torch.zeros(1))) as run:
    for _ in run.epochs(2):
        for _ in run.steps(range(2)):
            BODY
"""
JOB_WITH_STEPS = """
import signal
import torch
from torchrelay import Job, JobRunner, max_epochs

signal.signal(signal.SIGINT, signal.default_int_handler)
job = Job(blobs=dict(w=torch.zeros(1)))

@job.epoch
def train(ctx):
    for _ in ctx.steps(range(2)):
        signal.raise_signal(signal.SIGINT)

job.stop_when(max_epochs(2))
JobRunner(job, "plain job").train()
"""


def program(config: str = "{}", epoch: str = "pass", where: str = "'run'") -> str:
    return PROGRAM.replace("CONFIG", config).replace("EPOCH", epoch).replace("WHERE", where)


def one_line(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """Exactly one line on stderr, from torchrelay, with these words."""
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("torchrelay: ")
    for word in words:
        assert word in line, line


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of two epochs."""
    folder = tmp_path_factory.mktemp("finished")
    done = run_program(program(), cwd=folder)
    assert (done.returncode, done.stdout) == (0, "epoch 1\nepoch 2\n"), done.stderr
    return folder


@pytest.mark.parametrize("text", ["-1", "1e3", "+5", "abc", "", "1.0", "٣", "9" * 5000, "last", "0x1"])
def test_an_epoch_on_the_command_line_that_is_none(text: str) -> None:
    """Whatever is no whole number from 0 is refused with what to write; a long one is not repeated."""
    for arguments in ([f"--resume-from-epoch={text}"], ["--resume-from-epoch", text]):
        with pytest.raises(UsageError) as caught:
            parse_options(arguments)
        assert "--resume-from-epoch" in str(caught.value) and "whole number" in str(caught.value)
        assert len(str(caught.value)) < 200 and caught.value.exit_code == 2


def test_a_missing_value_and_an_unknown_mode() -> None:
    """The option and what it takes are named."""
    with pytest.raises(UsageError, match=r"--resume-from-epoch.*one argument"):
        parse_options(["--resume-from-epoch"])
    with pytest.raises(UsageError, match=r"--resume.*'auto', 'must', 'never'"):
        parse_options(["--resume", "maybe"])


@pytest.mark.parametrize("option", ["--resume-from-epok", "--resume_from_epoch", "--resume-from-epochs=2"])
def test_a_rewind_that_is_mistyped(option: str) -> None:
    """It is refused, because without it the run would go on from its newest epoch in silence."""
    with pytest.raises(UsageError, match=r"unknown option --resume.*did you mean --resume-from-epoch\?"):
        parse_options([option, "2"])


@pytest.mark.parametrize("option", ["--time-limt", "--time_limit=3s", "--max-attemps", "--agai"])
def test_another_option_that_is_mistyped(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It may be the program's own, so it is left alone, but not in silence."""
    parse_options([option, "3s"])
    assert f"unknown option {option.partition('=')[0]}; did you mean --" in capsys.readouterr().err


def test_options_of_the_program_are_left_alone() -> None:
    """Also such as begin alike."""
    options = parse_options(["--gain", "2", "--resume-from-step", "7", "--resume-optimizer", "-h", "data"])
    assert options == parse_options([])


def test_help_that_the_program_does_not_answer(finished: Path) -> None:
    """The options are shown, nothing is trained."""
    before = tree(finished / "run")
    done = run_program(program(), "--help", cwd=finished)
    assert done.returncode == 0 and "--resume-from-epoch N" in done.stdout, done.stderr
    assert tree(finished / "run") == before


def test_an_unknown_epoch(finished: Path) -> None:
    """The epochs that exist are listed; the run is as before."""
    before = tree(finished / "run")
    done = run_program(program(), "--resume-from-epoch", "7", cwd=finished)
    one_line(done, 2, "epoch 7", "0, 1, 2")
    assert (done.stdout, tree(finished / "run")) == ("", before)


def test_an_epoch_that_is_no_number(finished: Path) -> None:
    """As a user types it."""
    before = tree(finished / "run")
    one_line(run_program(program(), "--resume-from-epoch", "1e3", cwd=finished), 2, "'1e3'", "whole number")
    assert tree(finished / "run") == before


def test_a_blob_that_cannot_be_stored(tmp_path: Path) -> None:
    """The path inside the blob; nothing is created."""
    done = run_program(program(config="{'optim': {'fn': [1, 2, print]}}"), cwd=tmp_path)
    one_line(done, 2, "config.optim.fn[2]")
    assert (done.stdout, [path.name for path in tmp_path.iterdir()]) == ("", ["program.py"])


@pytest.mark.parametrize(
    ("script", "code", "line"),
    [
        (program(where="''"), 2, "program.py:14: UsageError: the run directory is an empty path"),
        (
            program().replace('"program"', '"other"').replace(".main()", ".train()"),
            2,
            "program.py:14: UsageError: .* holds a run of job 'program', not 'other'",
        ),
        ("import torchrelay\ntorchrelay.open_checkpoint('none')", 2, "program.py:2: UsageError: none is not"),
        (
            PLAIN.replace("BODY", "signal.raise_signal(signal.SIGINT)"),
            75,
            "stopped by Ctrl-C; the same command",
        ),
        (JOB_WITH_STEPS, 75, "stopped by Ctrl-C; the same command"),
    ],
    ids=["constructor", "another job", "reader", "Ctrl-C in a Run", "Ctrl-C in a job"],
)
def test_a_plain_script_ends_as_main_does(finished: Path, script: str, code: int, line: str) -> None:
    """Its last line is the sentence of the error, with the program's line for a mistake; no traceback."""
    done = run_program(script, cwd=finished)
    assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
    assert re.match(f"torchrelay: (/.*/)?{line}", done.stderr.splitlines()[-1])


def test_a_plain_script_shows_the_traceback_of_its_own_code(tmp_path: Path) -> None:
    """The last lines are those of Python, without files of torchrelay."""
    done = run_program(PLAIN.replace("BODY", "[][3]"), cwd=tmp_path)
    assert done.returncode == 1 and done.stderr.endswith("IndexError: list index out of range\n")
    assert ", line 10, in <module>" in done.stderr and "run.py" not in done.stderr


def test_a_file_where_the_run_directory_should_be(tmp_path: Path) -> None:
    """It is looked at when training starts: one line."""
    (tmp_path / "run").write_text("mine")
    one_line(run_program(program(), cwd=tmp_path), 2, "the run directory", "is a file")


def test_ctrl_c(tmp_path: Path) -> None:
    """One line says that it was that, no traceback; code and status say it alike, and the run resumes."""
    # A shell that starts tests in the background has them ignore the signal: the program hears it anyhow.
    heard = "signal.signal(signal.SIGINT, signal.default_int_handler)"
    interrupt = f"import os, signal; {heard}; ctx.epoch == 2 and os.kill(os.getpid(), signal.SIGINT)"
    done = run_program(program(epoch=interrupt), cwd=tmp_path)
    assert done.returncode == 130 and "Traceback" not in done.stderr
    assert "I r0/1 interrupted in epoch 2; the same command resumes" in done.stderr
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["exit_code"], status["error"]) == (130, "KeyboardInterrupt")
    done = run_program(program(), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "epoch 2\n")


def test_a_damaged_epoch_that_was_asked_for(finished: Path) -> None:
    """Code 5, file, epoch and remedy; on automatic resume a warning and code 0."""
    flip(shard(finished / "run", 2), 60)
    done = run_program(program(), "--resume-from-epoch", "2", cwd=finished)
    one_line(done, 5, "epoch 2", "trainer_0.2.main.safetensors", "never replaced")
    done = run_program(program().replace("max_epochs(2)", "max_epochs(3)"), cwd=finished)
    assert (done.returncode, done.stdout) == (0, "epoch 2\nepoch 3\n")
    assert "epoch 2 is damaged" in done.stderr


def test_a_task_that_raises(tmp_path: Path) -> None:
    """That is no mistake in words: the traceback of the user's code is shown, once, with code 1."""
    done = run_program(program(epoch="[][3]"), cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("IndexError: list index out of range") >= 1
    assert "[][3]" in done.stderr and "epoch 1" in done.stdout


def test_saves_that_always_fail(tmp_path: Path) -> None:
    """Warnings for each, then one line and code 5."""
    done = run_program(
        program(epoch="ctx['config'] = {'fn': print}").replace("max_epochs(2)", "max_epochs(9)"), cwd=tmp_path
    )
    assert done.returncode == 5
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("torchrelay: SaveFailedError: 3 saves failed in a row")
    assert "config.fn" in done.stderr.splitlines()[-1]


def test_options_that_the_program_has_parsed_are_the_program_s(monkeypatch):
    """Beside a parser of its own `--resume` means what the program says; TORCHRELAY_ARGS reaches us."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume")
    parser.add_argument("--time-limit", type=int)
    words = ["--resume", "weights.pt", "--time-limit", "7"]
    kept = parser.parse_args(words)
    assert parse_options(words) == parse_options([])
    assert parse_options([*words, "--max-attempts", "3"]).max_attempts == 3, "what it has not stays ours"
    monkeypatch.setenv("TORCHRELAY_ARGS", "--resume must --resume-from-epoch 4")
    options = parse_options(words)
    assert (options.resume, options.epoch, options.time_limit_secs) == ("must", 4, None)
    del kept
    assert parse_options(["--resume", "never"]).resume == "never", "the command line comes last"
    monkeypatch.setenv("TORCHRELAY_ARGS", "--resume perhaps")
    with pytest.raises(UsageError, match="perhaps"):
        parse_options([])


def test_a_rewind_that_the_program_s_parser_takes_is_told(capsys):
    """A program whose own parser has `--resume-from-epoch` gets one line that says what helps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume-from-epoch", type=int)
    words = ["--resume-from-epoch=3"]
    kept = parser.parse_args(words)
    assert parse_options(words).epoch is None
    assert "nothing is rewound: pass JobRunner" in capsys.readouterr().err
    parse_options(words, rewinds=True)
    parse_options([])
    assert not capsys.readouterr().err
    del kept
    assert parse_options(words).epoch == 3


def test_examples_leave_the_options_of_main_to_main():
    """No parser of an example takes `--resume-from-epoch`, which their own pages tell people to give."""
    examples = sorted((Path(__file__).parents[2] / "examples").rglob("*.py"))
    assert examples
    assert not [one for one in examples if '"--resume-from-epoch"' in one.read_text()]
