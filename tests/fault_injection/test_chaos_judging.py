"""What counts as lost of a user's job, and when its device is copied."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from torchrelay.chaos.command import kept_at
from torchrelay.chaos.processes import await_stillness, members
from torchrelay.checkpoint.log.record import slot_path

BUSY = """
import os, threading
def work():
    while True:
        os.stat(".")
threading.Thread(target=work, daemon=True).start()
print("ready", flush=True)
work()
"""


def test_records_that_were_thinned_away_are_not_lost(tmp_path: Path) -> None:
    """Of 300 durable records the oldest 44 may be gone, but for the first; any other that is gone shows."""
    (tmp_path / "log").mkdir()
    for slot in (0, *range(45, 301)):
        (tmp_path / slot_path(slot)).write_bytes(b"{}")
    kept = kept_at(tmp_path, set(range(301)))
    assert sorted(kept.records) == [0, *range(45, 301)] and all(kept.records.values())
    (tmp_path / slot_path(45)).unlink()
    assert kept_at(tmp_path, set(range(301))).records[45] == b""


def test_a_stopped_group_stands_still_with_all_its_threads() -> None:
    """After the wait no thread of a process of the group runs, whatever it was doing."""
    process = subprocess.Popen(
        [sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        os.killpg(process.pid, signal.SIGSTOP)
        assert list(members(process.pid)) == [process.pid]
        await_stillness(process.pid, 60)
        threads = Path(f"/proc/{process.pid}/task").glob("*/stat")
        states = [path.read_text().rpartition(")")[2].split()[0] for path in threads]
        assert states == ["T", "T"]
    finally:
        process.kill()
        process.communicate()
