"""docs/serving.md is true: its programs and commands run as they stand, its options are those there are."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from served import wait_until
from torchrun import clean_environment

from torchrelay.jobs.runtime import Signature
from torchrelay.runners.programs.request import RequestLimits
from torchrelay.tools.cli.main import whole_parser
from torchrelay.tools.serving.app import description
from torchrelay.tools.serving.handlers import Served

PAGE = (Path(__file__).resolve().parents[2] / "docs/serving.md").read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
LINES = re.findall(r"^\$ (.*)$", PAGE, re.MULTILINE)
PORT = "8331"


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    with (folder / "out.log").open("a") as out:
        return subprocess.Popen(
            [sys.executable, *words], cwd=folder, env=clean_environment(None), text=True,
            stdout=out, stderr=subprocess.STDOUT,
        )  # fmt: skip


@pytest.mark.ranks
def test_the_page_runs(tmp_path: Path) -> None:
    """The training, the server at another port, each question by curl, and the client of tensors."""
    assert len(PROGRAMS) == 2 and LINES[0] == "python served.py" and LINES[1].endswith(f"--port {PORT}")
    (tmp_path / "served.py").write_text(PROGRAMS[0])
    (tmp_path / "client.py").write_text(PROGRAMS[1])
    log = tmp_path / "out.log"
    assert start(tmp_path, "served.py").wait(90) == 0, log.read_text()
    words = shlex.split(LINES[1].replace(f"--port {PORT}", "--port 0"))
    server = start(tmp_path, "-m", *words)
    try:
        wait_until(lambda: "serving" in log.read_text() or server.poll() is not None, 90)
        found = re.search(r"serving epoch 2 of served at (http://127\.0\.0\.1:(\d+))/", log.read_text())
        assert found, log.read_text()
        if shutil.which("curl"):
            answers = [_asked(line.replace(PORT, found[2])) for line in LINES[2:]]
            assert [sorted(one) for one in answers[1:]] == [
                ["epoch", "result"],
                ["epoch", "results"],
                ["epoch", "status"],
            ]
            assert answers[0]["run"] == "served" and len(answers[2]["results"]) == 2
        assert start(tmp_path, "client.py", found[1]).wait(90) == 0, log.read_text()
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    finally:
        server.kill()
        server.wait(60)


def _asked(line: str) -> dict[str, object]:
    done = subprocess.run(shlex.split(line), capture_output=True, text=True, timeout=60, check=True)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_what_the_page_says_of_options_and_paths() -> None:
    """Every option that is named exists, with the default told; every path is in the document."""
    defaults = {"--max-delay-ms": 2.0, "--max-batch": 16, "--drain": 30.0, "--port": int(PORT)}
    chosen = vars(whole_parser().parse_args(["serve", "x"]))
    for name in set(re.findall(r"`(--[a-z-]+)", PAGE)) - {"--run"}:
        key = name.removeprefix("--").replace("-", "_")
        assert key in chosen, name
        assert chosen[key] == defaults.get(name, chosen[key])
    limits = RequestLimits()
    assert (limits.body_bytes, limits.json_bytes, limits.held_bytes) == (16 << 20, 2 << 20, 64 << 20)
    assert (limits.depth, limits.samples, limits.queue, limits.secs) == (16, 256, 2048, 30.0)
    assert limits.elements == 4 << 20
    signature = Signature.from_json(json.loads(PAGE.split("```json\n")[1].split("```")[0]))
    document = description(Served("x", None, signature=signature), limits, token=True)  # type: ignore[arg-type]
    assert all(f"`{path}`" in PAGE for path in document["paths"])
    assert document["security"] == [{"token": []}]
