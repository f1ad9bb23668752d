"""`torchrelay chaos` as people type it: quick help, clear slips, the user's own job, campaigns."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from torchrelay.tools.cli.main import main

ROOT = Path(__file__).resolve().parent.parent.parent
CHAOS = [sys.executable, "-m", "torchrelay", "chaos"]
TRAIN = """
import sys, torch, torchrelay
from torchrelay import Job, JobRunner, max_epochs

tensor = torch.zeros(4)
job = Job("users", blobs=dict(tensor=tensor))

@job.epoch
def train(ctx):
    tensor.add_({step})

job.stop_when(max_epochs(2))
JobRunner(job, sys.argv[1], {options}).main([])
"""


def run(*words: object, code: int = 0) -> str:
    done = subprocess.run(
        [*CHAOS, *map(str, words)], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_help_is_quick() -> None:
    """The whole command line, chaos included, comes without torch."""
    code = "import sys, torchrelay.tools.cli.main as c, torchrelay.chaos.command"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; print('torch' in sys.modules)"], capture_output=True, check=True
    )
    assert done.stdout.strip() == b"False"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--kinds", "fire"], "choose from kill"),
        (["--scenarios", "second"], "there is no scenario 'second'"),
        (["--only", "kill@3"], "write the scenario too"),
        (["foo://bucket/run"], "cannot be opened"),
        (["memory://bucket/run"], "lives in one process"),
        (["nowhere"], "is not a directory"),
        (["--", "python", "train.py"], "must train into {run}"),
        (["--", "false", "{run}"], "fails undisturbed, with 1"),
        (["--", "false", "{run}"], "it printed nothing"),
        (["--", "no-such-program", "{run}"], "cannot be started: no-such-program: No such file"),
        (["--", "true", "{run}"], "leaves no"),
    ],
)
def test_mistakes_are_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A slip ends with 2 and says what to do."""
    assert main(["chaos", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_the_users_job(tmp_path: Path) -> None:
    """A user's program is killed, has flipped bits, loses power, and goes on every time."""
    (tmp_path / "train.py").write_text(TRAIN.format(step=1, options=""))
    words = ["--kinds", "kill,flip,power", "--trials", "1", "--seed", "3"]
    out = run(*words, "--json", "--", sys.executable, tmp_path / "train.py", "{run}")
    told = json.loads(out[out.index("{\n") : out.rindex("}") + 1])
    assert not told["findings"]
    assert sum(one["survived"] for one in told["kinds"].values()) == 3 - len(told["skipped"])


@pytest.mark.slow
def test_a_users_job_that_begins_anew(tmp_path: Path) -> None:
    """A program that throws its epochs away at every start has lost them, and the command says so."""
    (tmp_path / "train.py").write_text(TRAIN.format(step=1, options="resume='never'"))
    out = run("--only", "kill@190", "--", sys.executable, tmp_path / "train.py", "{run}", code=1)
    assert "lost  --only kill@190" in out and "were abandoned" in out


@pytest.mark.slow
def test_a_campaign_goes_on(tmp_path: Path) -> None:
    """A campaign that was stopped, its last line torn, begins with the next round."""
    state = tmp_path / "state.jsonl"
    came = {"survived": 20, "refused": 30, "lost": 0, "undetected": 0, "failed": 0}
    first = {"kind": "flip", "seed": 7, "tried": 50, "seconds": 1.0, "findings": [], "skipped": ""}
    first["came"] = came
    state.write_text(json.dumps(first) + '\n{"kind": "fl')
    program = [
        sys.executable,
        ROOT / "scripts/trials/chaos_campaign.py",
        "--only",
        "flip=150",
        "--state",
        state,
    ]
    done = subprocess.run(program, capture_output=True, text=True, timeout=110, check=True)
    rounds = [json.loads(line) for line in state.read_text().splitlines()]
    assert [one["seed"] for one in rounds] == [7, 8] and rounds[1]["tried"] >= 100
    assert all(sum(one["came"].values()) == one["tried"] for one in rounds)
    refused = came["refused"] + rounds[1]["came"]["refused"]
    assert rounds[1]["came"]["refused"] > 0 and f"| {refused} | 0 | 0 | 0 |" in done.stdout
