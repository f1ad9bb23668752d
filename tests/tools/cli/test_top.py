"""`torchrelay top`: what it shows of runs that go, end, vanish or are damaged; without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from terminals import Terminal, controls
from torchrun import clean_environment, interruptible

from torchrelay.__main__ import main
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.runners.monitoring.status import look_at

SEEN = {
    "attempt": 1, "epoch": 3, "last_epoch": 9, "step": 1200, "steps": 3900, "total_steps": 9000,
    "unit": "steps", "per_sec": 41.2, "eta_secs": 753.0, "metrics": {"train/loss": 0.1234, "bad": "nan"},
    "ckpt": "ckpt e2 ok 4.1s", "doing": "saving epoch 2, 1 of 4 GB, 00:00:30 left",
}  # fmt: skip


def running(path: Path) -> RunDirectory:
    """A run as a job in its second attempt leaves it, with four ranks of which one is quiet."""
    run = RunDirectory(path)
    run.create("job", None, 4)
    run.write_status("RUNNING", epoch=2, attempt=1, generation=1, host="node1", pid=1)
    run.write_live(SEEN)
    run.log_event(1, "start", attempt=1)
    run.log_event(1, "warning", text="epoch 1 was NOT saved")
    nodes = [{"node": f"trainer_{rank}", "secs": {"write": rank + 0.5, "fsync": 1.0}} for rank in range(4)]
    save = {"kind": "checkpoint_save", "nodes": nodes, "slowest": "trainer_3"}
    (path / "metadata.jsonl").write_text(json.dumps(save) + "\n{torn")
    logs = path / "logs" / "attempt_1"
    logs.mkdir(parents=True)
    for rank in range(4):
        (logs / f"rank_{rank}.log").write_text("line\n")
    os.utime(logs / "rank_2.log", (time.time() - 200,) * 2)
    return run


def shown(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(["top", *words]) == code
    return capsys.readouterr().out


def test_a_running_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """State, place, rate, time to the end, newest save, slowest node, warnings and quiet ranks are told."""
    running(tmp_path / "one")
    out = shown(capsys, str(tmp_path / "one"), "--once")
    row = next(line for line in out.splitlines() if line.startswith("one "))
    for part in ("running", "3/9", "1200/3900", "41.2 steps/s", "00:12:33", "e2 ok 4.1s"):
        assert part in row
    for part in (
        *(
            "train/loss 0.1234",
            "bad nan",
            "slowest node trainer_3 4.5s",
            "1 warnings, the last: epoch 1 was NOT",
        ),
        *("no recent log lines from rank 2 of 4", "saving epoch 2, 1 of 4 GB"),
    ):
        assert part in out
    assert not controls(out)


def test_json_has_it_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--json is one object with a list of runs, also of one."""
    running(tmp_path / "one")
    (found,) = json.loads(shown(capsys, str(tmp_path), "--json"))["runs"]
    assert (found["name"], found["state"], found["epoch"], found["steps"]) == ("one", "RUNNING", 3, 3900)
    assert found["slowest"] == ["trainer_3", 4.5] and len(found["ranks"]) == 4


def test_a_job_that_went_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a run on another host that leaves no sign it is said for how long; that it runs is not claimed."""
    run = running(tmp_path / "one")
    for name in ("status.json", "live.json"):
        old = json.loads((run.path / name).read_text())
        old |= {key: old[key] - 600 for key in ("updated", "time") if key in old}
        (run.path / name).write_text(json.dumps(old))
    assert "no sign of life for 10 min" in shown(capsys, str(tmp_path))


def test_words_of_an_earlier_attempt_do_not_count(tmp_path: Path) -> None:
    """Until the new attempt has left its own word, the old one's step and rate are not shown as its."""
    run = running(tmp_path / "one")
    run.write_status("RUNNING", epoch=2, attempt=2, generation=2)
    look = look_at(run.path)
    assert (look.epoch, look.step, look.per_sec) == (2, None, None)


@pytest.mark.parametrize(
    "damage", ["{torn", "[]", '{"state": 3}', '{"state": "RUNNING", "epoch": "x"}', "\x00"]
)
def test_a_damaged_run_is_shown_as_one(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever lies in status.json, live.json and the lines, the other runs are shown and no traceback."""
    running(tmp_path / "good")
    bad = running(tmp_path / "bad").path
    for path in (bad / "status.json", bad / "live.json", bad / "events.1.jsonl", bad / "metadata.jsonl"):
        path.write_text(damage)
    out = shown(capsys, str(tmp_path), "--once")
    assert "1200/3900" in out and "\nbad " in out


def test_runs_that_come_and_go(tmp_path: Path) -> None:
    """On a terminal it is drawn again and again: a run that appears is there, one that vanishes is gone."""
    first = running(tmp_path / "runs" / "first").path
    command = [sys.executable, "-m", "torchrelay", "top", "runs", "--interval", "0.1"]
    with Terminal() as terminal:
        env = clean_environment({"TERM": "xterm"})
        with interruptible():
            top = subprocess.Popen(
                command, cwd=tmp_path, env=env, stdout=terminal.side, stderr=subprocess.STDOUT
            )
        try:
            terminal.wait_for("1 runs")
            running(tmp_path / "runs" / "second")
            terminal.wait_for("2 runs")
            first.rename(tmp_path / "elsewhere")
            before = len(terminal.drawn)
            wait_until(lambda: "1 runs" in terminal.drawn[before:])
            (tmp_path / "runs").rename(tmp_path / "gone")
            terminal.wait_for("0 runs")
            top.send_signal(2)
            assert top.wait(60) == 0
        finally:
            top.kill()
            top.wait()
        assert "Traceback" not in terminal.drawn and "\x1b[?25h" in terminal.drawn


def wait_until(true: Any, timeout_secs: float = 60) -> None:
    end = time.monotonic() + timeout_secs
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_one_rank_has_no_slowest_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where nobody waits for anybody no node is called slow."""
    run = RunDirectory(tmp_path / "alone")
    run.create("alone", None, 1)
    run.write_status("FINISHED", attempt=0, epoch=1, generation=0)
    (run.path / "logs/attempt_0").mkdir(parents=True)
    (run.path / "logs/attempt_0/rank_0.log").touch()
    save = {"kind": "checkpoint_save", "nodes": [{"node": "a", "secs": {"write": 2}}], "slowest": "a"}
    (run.path / "metadata.jsonl").write_text(json.dumps(save) + "\n")
    assert "slowest" not in shown(capsys, str(run.path))


def test_wrong_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A path that is not there is one line and 2; a directory without runs is told and is no error."""
    assert main(["top", str(tmp_path / "no")]) == 2
    assert "no does not exist: expected a run directory" in capsys.readouterr().err
    assert "no runs in" in shown(capsys, str(tmp_path))
    assert main(["top", str(tmp_path), "--interval", "soon"]) == 2
    assert "expected seconds" in capsys.readouterr().err


def test_it_needs_no_torch(tmp_path: Path) -> None:
    """Neither torch nor pickle is imported to watch runs."""
    running(tmp_path / "one")
    code = (
        f"import sys; from torchrelay.__main__ import main; main(['top', {str(tmp_path)!r}, '--once']); "
        "sys.exit(bool({'torch', 'pickle'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=100, check=False).returncode == 0
