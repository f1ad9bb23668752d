"""Warm programs of the tests behave as programs that a shell started."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from torchrun import clean_environment, runs, wait_for_the_end_of
from warm import PLACE, server, warmed


def begin(folder: Path, text: str, *words: str) -> subprocess.Popen[str]:
    """A program with pipes, in a folder."""
    (folder / "program.py").write_text(text)
    return subprocess.Popen(
        warmed(["program.py", *words]), cwd=folder, env=clean_environment({PLACE: server(), "TOLD": "it"}),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_a_program_has_its_words_folder_environment_and_streams(tmp_path: Path) -> None:
    """What it is told and what it says goes where it would go; its exit code is handed on."""
    text = (
        "import atexit, os, sys\natexit.register(print, 'left')\n"
        "print(sys.argv[1:], os.environ['TOLD'], os.path.basename(os.getcwd()), input(), __name__)\n"
        "print('wrong', file=sys.stderr)\nsys.exit(7)"
    )
    out, err = (program := begin(tmp_path, text, "a", "b")).communicate("typed\n", timeout=60)
    assert out == f"['a', 'b'] it {tmp_path.name} typed __main__\nleft\n" and err == "wrong\n"
    assert program.returncode == 7


@pytest.mark.parametrize(
    ("line", "code"), [("raise ValueError(1)", 1), ("import os; os.kill(os.getpid(), 9)", -9)]
)
def test_a_program_that_fails_or_is_killed_ends_so(tmp_path: Path, line: str, code: int) -> None:
    """An exception is code 1 with a traceback, a signal is a signal."""
    program = begin(tmp_path, line)
    _, err = program.communicate(timeout=60)
    assert program.returncode == code and ("ValueError" in err) == (code == 1)


def test_signals_are_passed_on_and_death_too(tmp_path: Path) -> None:
    """SIGTERM reaches the program; when whoever stands for it is killed, the program is."""
    text = "import os, signal\nprint(os.getpid(), flush=True)\nwhile True: signal.pause()"
    for sig in (signal.SIGTERM, signal.SIGKILL):
        with begin(tmp_path, text) as program:
            assert program.stdout is not None
            pid = int(program.stdout.readline())
            assert runs(pid)
            os.kill(program.pid, sig)
            assert program.wait(60) == -sig
            wait_for_the_end_of([pid], 60)
