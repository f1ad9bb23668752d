"""docs/interop.md is true: its programs and commands run in their order, as they stand."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

from torchrun import clean_environment
from warm import PLACE, server, warmed

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/interop.md").read_text()


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(
        warmed(command), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=60, check=False, env=clean_environment({PLACE: server()}),
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout}"
    return done.stdout


def test_the_page_runs(tmp_path: Path) -> None:
    """Every program and command of the page ends well, one after another."""
    blocks = re.findall(r"^```(python|console)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 7
    (tmp_path / "out").mkdir()
    for language, text in blocks:
        if language == "python":
            (tmp_path / "program.py").write_text(text)
            run(tmp_path, "program.py")
        for line in text.splitlines() if language == "console" else ():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            assert words[0] == "torchrelay"
            run(tmp_path, "-m", "torchrelay", *words[1:])


def test_help_needs_no_torch() -> None:
    """The verbs' help is printed without importing torch."""
    for verb in ("export", "import"):
        code = (
            "import sys; from torchrelay.runners.commands.command_line import main\n"
            f"try: main([{verb!r}, '--help'])\n"
            "except SystemExit: print('torch' in sys.modules)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
        )
        assert done.stdout.splitlines()[-1] == "False"


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    """An unknown type, a source that is not there, DCP without trust: exit code 2, no traceback."""
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp/.metadata").write_bytes(b"x")
    for words in (
        ["export", ".", "--to", "hf", "-o", "x", "--dtype", "nonsense"],
        ["import", "absent", "--from", "torch", "-o", "x"],
        ["import", "dcp", "--from", "dcp", "-o", "x"],
    ):
        done = subprocess.run(
            warmed(["-m", "torchrelay", *words]), cwd=tmp_path, capture_output=True, text=True, timeout=60,
            check=False, env=clean_environment({PLACE: server()}),
        )  # fmt: skip
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1
