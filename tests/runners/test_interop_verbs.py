"""`torchrelay export` and `import` as commands: their help, and mistakes of their users."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from torchrun import clean_environment
from warm import PLACE, server, warmed


def test_help_needs_no_torch() -> None:
    """The verbs' help is printed without importing torch."""
    for verb in ("export", "import"):
        code = (
            "import sys; from torchrelay.runners.commands.command_line import main\n"
            f"try: main([{verb!r}, '--help'])\n"
            "except SystemExit: print('torch' in sys.modules)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True
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
            warmed(["-m", "torchrelay", *words]), cwd=tmp_path, capture_output=True, text=True, timeout=100,
            check=False, env=clean_environment({PLACE: server()}),
        )  # fmt: skip
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1
