"""docs/stores.md is true: its code and its commands run, on a server of S3."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from s3_server import moto, needs_s3
from surroundings import surroundings

from torchrelay.tools.cli.main import main

PAGE = (Path(__file__).resolve().parents[2] / "docs/stores.md").read_text()


@needs_s3
def test_the_code_and_the_commands_run() -> None:
    """The program saves and loads; each command after it ends well."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    commands = [shlex.split(line)[1:] for line in re.findall(r"^\$ (.*)$", PAGE, re.MULTILINE)]
    assert len(commands) == 6
    with moto() as served, surroundings(served.seen_at(served.port)):
        exec(compile(code, "docs/stores.md", "exec"), {})
        assert [main(command) for command in commands] == [0] * len(commands)
