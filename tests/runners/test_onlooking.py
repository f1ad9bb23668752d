"""Verbs that look at a run write nothing into it, and whoever writes there never notices."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import kept_job
import pytest

from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.storage.local import LocalStorage

Told = Callable[..., tuple[int, str, str]]
VERBS = (
    "ls RUN",
    "show RUN",
    "verify RUN",
    "stats RUN",
    "status RUN",
    "top RUN --once",
    "report RUN -o PAGE",
    "diff RUN@1 RUN@2",
    "find-bad RUN",
    "ckpt ls RUN",
    "ckpt show RUN@last",
    "ckpt why RUN",
    "ckpt du RUN",
    "ckpt verify RUN",
    "ckpt repair RUN --dry-run",
    "runs ls RUNS",
    "runs show RUN",
)


def files_of(run: Path) -> dict[str, tuple[int, bytes]]:
    """Every file with the time of its last change and its bytes."""
    return {
        str(path.relative_to(run)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(run.rglob("*"))
        if path.is_file()
    }


@pytest.mark.timeout(200)
def test_looking_changes_no_file_and_fences_nobody(tmp_path: Path, told: Told) -> None:
    """All verbs while the job trains, and again while it is held, when nobody else could change a file."""
    runs = tmp_path / "runs"
    run = runs / "run"
    command = [sys.executable, kept_job.__file__, str(run), json.dumps([0.1] * 5000), "0.2", "{}"]
    writer = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def look() -> None:
        for verb in VERBS:
            given = {"RUN": str(run), "RUNS": str(runs), "PAGE": str(tmp_path / "page.html")}
            words = verb.split()
            for name, value in given.items():
                words = [
                    value + word.removeprefix(name) if word.split("@")[0] == name else word for word in words
                ]
            code, out, err = told(*words)
            assert code == 0, (verb, out, err)

    try:
        end = time.monotonic() + 60
        while not list(run.glob("checkpoints/log/*5.json")):
            assert writer.poll() is None and time.monotonic() < end
            time.sleep(0.05)
        look()
        os.kill(writer.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, writer.pid, os.WSTOPPED)
        before = files_of(run)
        look()
        assert files_of(run) == before
        os.kill(writer.pid, signal.SIGCONT)
        (run / "STOP").touch()
        _, err = writer.communicate(timeout=100)
    finally:
        writer.kill()
        writer.communicate()
    assert writer.returncode == 0, err
    view = open_log(LocalStorage(run / "checkpoints"))
    assert view.generation == 0 and view.state.released, (
        "it was the only writer from its first record to its last"
    )
