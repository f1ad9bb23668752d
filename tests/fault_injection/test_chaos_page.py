"""tests/chaos/README.md is true: its example runs as a user's test, and it names what there is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from torchrelay.chaos.builtin import KINDS
from torchrelay.chaos.faults import ERRNOS
from torchrelay.chaos.strikes import COLUMNS

PAGE = (Path(__file__).resolve().parents[1] / "chaos/README.md").read_text()
PLUGIN = "torchrelay.chaos.pytest_plugin"


def run_test(tmp_path: Path, program: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "test_mine.py").write_text(program)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", PLUGIN, str(tmp_path)],
        cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip


@pytest.mark.slow
def test_the_example_runs(tmp_path: Path) -> None:
    """The example passes as it stands; where it overwrites the file in place, kills are found to lose it."""
    program = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[0]
    done = run_test(tmp_path, program)
    assert done.returncode == 0, done.stdout + done.stderr
    careless = program.replace('root / "new", "w"', 'root / "state", "w"').replace(
        '        os.rename(root / "new", root / "state")\n', ""
    )
    assert careless != program
    done = run_test(tmp_path, careless)
    assert done.returncode == 1 and "Verdict.LOST" in done.stdout, done.stdout + done.stderr


def test_the_page_names_what_there_is() -> None:
    """Kinds, errors and columns on the page are those of the code."""
    for name in (*KINDS, *COLUMNS[1:-1]):
        assert f"`{name}`" in PAGE or f"| {name} |" in PAGE or f"`{name}`," in PAGE, name
    for name in ERRNOS:
        assert name in PAGE


def test_the_plug_in_is_light() -> None:
    """Every pytest run loads the plug-in, so it imports neither torch nor the trials."""
    code = f"import sys, {PLUGIN}; print('torch' in sys.modules, 'torchrelay.chaos.processes' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100
    )
    assert done.stdout.strip() == "False False"


def test_the_old_name_of_the_plug_in_still_works(tmp_path: Path) -> None:
    """`-p` with the name that it had below `runners` gives the fixture, and says the new one."""
    (tmp_path / "test_mine.py").write_text("def test_it(chaos):\n    assert chaos.calls\n")
    old = "torchrelay.runners.chaos.pytest_plugin"
    done = subprocess.run(
        [sys.executable, "-W", "default", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", old, "."],
        cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == 0 and f"{old} is {PLUGIN} now" in said, said
