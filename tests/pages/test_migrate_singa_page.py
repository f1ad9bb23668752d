"""docs/guides/migrate-singa.md is true: its programs run, each as a script, and print what the page shows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/guides/migrate-singa.md").read_text()
BLOCKS = re.findall(
    r"(?<!-->\n)^```python\n(.*?)^```\n\n(?:```text\n(.*?)^```)?", PAGE, re.MULTILINE | re.DOTALL
)
FILES = {text[2:].split(".py")[0]: text for text, _ in BLOCKS if text.startswith("# ")}
PROGRAMS = [(text, shown) for text, shown in BLOCKS if not text.startswith("# ")]


def test_the_page_has_its_programs() -> None:
    """All python but the words of SINGA is run, or is a file that another program imports."""
    assert len(BLOCKS) == PAGE.count("```python") - 1 == 5
    assert [*FILES] == ["net", "extended"] and all(shown for _, shown in PROGRAMS)


@pytest.mark.parametrize(("program", "shown"), PROGRAMS, ids=("states", "package", "onnx"))
def test_a_program_prints_what_the_page_shows(tmp_path: Path, program: str, shown: str) -> None:
    """Each program stands for itself, in a folder of its own."""
    (tmp_path / "program.py").write_text(program)
    for name, text in FILES.items():
        (tmp_path / f"{name}.py").write_text(text)
    command = [sys.executable, "-W", "error::UserWarning:__main__", "program.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, shown), done.stderr
