"""docs/packages.md is true: its programs and commands run in their order, as they stand."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/packages.md").read_text()


def run(*words: str) -> int:
    """A program of the page in this process, so that torch need not be imported again and again."""
    try:
        with (
            mock.patch.object(sys, "argv", list(words)),
            mock.patch.object(sys, "path", [str(Path.cwd()), *sys.path]),
        ):
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.mark.filterwarnings("ignore:unclosed file")
def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every program and command of the page ends well, one after another."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```(python|console)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 8
    for language, text in blocks:
        if language == "python" and '"torch" not in sys.modules' in text:
            command = [sys.executable, "-c", text]
            subprocess.run(command, check=True, timeout=100, env={**os.environ, "OMP_NUM_THREADS": "1"})
        elif language == "python":
            Path("program.py").write_text(text)
            assert run("program.py") == 0
        for line in text.splitlines() if language == "console" else ():
            python, *words = shlex.split(line.removeprefix("$ "))
            assert python == "python"
            assert run(*words) == 0
    assert {"model.zip", "model.pkg", "line.pkg", "states.safetensors"} <= set(os.listdir())
