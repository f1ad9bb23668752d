"""How a run stands: one answer, whichever verb is asked."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torchrun import clean_environment

from torchrelay.__main__ import main
from torchrelay.checkpoint.log.lease import process_here
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.runners.monitoring.status import Standing, standing

PROGRAM = """
import time, torch
from torchrelay import Job, JobRunner, max_epochs
job = Job("struck", blobs=dict(w=torch.zeros(3)))
@job.epoch
def train(ctx):
    if ctx.epoch == 2: print("inside", flush=True); time.sleep(100)
job.stop_when(max_epochs(3))
JobRunner(job, "runs/struck", code=False).main()
"""


def told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, str]:
    capsys.readouterr()
    main(list(words))
    done = capsys.readouterr()
    return done.out, done.err


def all_verbs(capsys: pytest.CaptureFixture[str], run: str, store: str) -> list[str]:
    """What each verb says of a run, errors included."""
    verbs = (("ls", run), ("ls", store), ("show", run), ("runs", "ls", store), ("top", run), ("status", run))
    return ["".join(told(capsys, *words)) for words in verbs]


@pytest.fixture
def killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose process was killed in its second epoch."""
    monkeypatch.chdir(tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], env=clean_environment(), stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "inside\n"
        assert standing(tmp_path / "runs/struck").word == "running"
    finally:
        process.kill()
        process.communicate(timeout=60)
    return tmp_path / "runs/struck"


def test_after_a_kill_all_verbs_say_interrupted(killed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """When the process is gone on this host no verb calls the run running, and none claims anything else."""
    for text in all_verbs(capsys, "runs/struck", "runs"):
        assert "interrupted" in text and "running" not in text, text
    for words in (("ls", "runs"), ("top", "runs"), ("runs", "ls", "runs")):
        (line,) = json.loads(told(capsys, *words, "--json")[0])["runs"]
        assert line["state"].lower() == "interrupted"
    assert json.loads(told(capsys, "show", "runs/struck", "--json")[0])["stands"] == "interrupted"
    assert json.loads(told(capsys, "status", "runs/struck", "--json")[0])["state"] == "interrupted"


def test_of_another_host_only_the_silence_is_said(killed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run of another host is called neither running nor dead: for how long it left no sign is said."""
    for name in ("status.json", "live.json"):
        if (killed / name).exists():
            old = json.loads((killed / name).read_text())
            old |= {key: time.time() - 190 for key in ("updated", "time") if key in old}
            old |= {"host": "elsewhere", "boot_id": "another"} if name == "status.json" else {}
            (killed / name).write_text(json.dumps(old))
    for text in all_verbs(capsys, "runs/struck", "runs"):
        assert "no sign of life for 3 min" in text and "interrupted" not in text, text


def test_a_number_that_another_process_has_now_is_no_sign_of_life(tmp_path: Path) -> None:
    """The process is known by its start, not by its number; its own notes do not count it as gone."""
    run = RunDirectory(tmp_path)
    run.write_status("RUNNING", epoch=1, **process_here())
    assert standing(tmp_path).word == "running"
    run.write_status("RUNNING", epoch=1, **{**process_here(), "pid_start": "1"})
    assert standing(tmp_path).word == "interrupted"
    run.write_status("RUNNING", epoch=1, host=socket.gethostname(), pid=2**22 - 1)  # as older ones noted it
    assert standing(tmp_path).word == "interrupted"
    run.write_status("RUNNING", epoch=1, **{**process_here(), "pid": 2**22 - 1, "pid_namespace": "another"})
    assert standing(tmp_path).word == "running", "in another container the number means another process"


def test_a_finished_run_would_resume_nowhere(killed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`ckpt why` promises a resume of a run that was cut, and none of a run that is over."""
    assert "the next launch would resume from epoch 1" in told(capsys, "ckpt", "why", "runs/struck")[0]
    shorter = PROGRAM.replace("time.sleep(100)", "pass").replace("max_epochs(3)", "max_epochs(2)")
    done = subprocess.run([sys.executable, "-c", shorter], env=clean_environment(), timeout=100, check=False)
    assert done.returncode == 0
    assert "the next launch would train nothing" in told(capsys, "ckpt", "why", "runs/struck")[0]
    assert standing(killed).word == "finished"


def test_a_long_reason_is_cut_where_it_is_one_line():
    """A refusal that lists a hundred leaves does not fill the screen of `ls`; the reason itself is whole."""
    long = Standing("failed", "BlobError: " + "differs: model.0.weight " * 100)
    assert len(str(long)) < 230
    assert str(long).endswith(" ...)")
    assert len(long.why) > 2000
