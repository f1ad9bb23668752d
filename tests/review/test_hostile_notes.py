"""Notes of a run that somebody else wrote: the verbs that show them say what is wrong, or leave it out."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from torchrelay import Job, JobRunner, max_epochs
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.runners.monitoring.text import RankLog
from torchrelay.tools.cli.main import main

HUGE = "1" + "0" * 400
NUMBERS = ("NaN", "1e999", HUGE, "1e308", "true")
WORDS = ('"\\ud800"', '"\\u009b2J\\u001b[31m"', '"\\u0000"', "null", '{"a":' * 400 + "1" + "}" * 400)
VERBS = {
    "run": [["ls", ".."], ["show", "."], ["runs", "compare", ".", "."], ["ckpt", "show", ".@best"]],
    "status": [["ls", ".."], ["show", "."], ["runs", "compare", ".", "."], ["top", "."]],
    "live": [["top", "."]],
    "metrics": [["ls", ".."], ["runs", "compare", ".", "."], ["ckpt", "find-bad", ".", "--metric", "loss"]],
    "events": [["show", "."], ["top", "."]],
    "metadata": [["ckpt", "stats", "."], ["top", "."]],
    "stats": [["ckpt", "stats", "."], ["ls", "."]],
}
"""The verbs that read a file of notes, by its name."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six epochs."""
    job = Job("looked_at", blobs={"state": [0]})
    job.epoch(lambda ctx: ctx.log("loss", 1 / ctx.epoch))
    job.stop_when(max_epochs(6))
    path = tmp_path_factory.mktemp("made") / "run"
    JobRunner(job, path, best=("loss", "min")).train()
    seem_to_run(path)
    return path


def seem_to_run(path: Path) -> None:
    """Let it look as if it went on, so that all its notes are read."""
    run = RunDirectory(path)
    status = run.status()
    run.write_live(
        {"attempt": status["attempt"], "epoch": 6, "eta_secs": 1.5, "per_sec": 2.0, "metrics": {"loss": 1}}
    )
    del status["state"], status["updated"]
    run.write_status("RUNNING", **status)


@pytest.fixture
def run(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, and the current directory."""
    path = tmp_path / "runs" / "run"
    shutil.copytree(made, path)
    monkeypatch.chdir(path)
    return path


def said(capfd: pytest.CaptureFixture[str], *verb: str) -> tuple[int, str]:
    """The exit code and all that a verb printed, which never holds a control character."""
    code = main(list(verb))
    out, err = capfd.readouterr()
    for line in (out + err).splitlines():
        assert line.isprintable(), (verb, line)
    assert code in (0, 1, 2, 5), (verb, code, err)
    if "--json" in verb and code in (0, 1):
        json.loads(out, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    return code, out + err


def notes(run: Path) -> list[Path]:
    """Everything that verbs read of a run beside its log."""
    found = ["run.json", "status.json", "live.json", "metrics.0.jsonl", "events.0.jsonl", "metadata.jsonl"]
    return [*(run / name for name in found), *sorted(run.glob("checkpoints/data/*/stats.json"))[:1]]


@pytest.mark.parametrize("evil", [*NUMBERS, *WORDS], ids=lambda text: text[:12])
def test_no_value_in_notes_breaks_a_verb(evil: str, run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Whatever stands where notes had numbers, or words: no traceback, no escape, true JSON."""
    for path in notes(run):
        whole = path.read_text()
        texts = whole.splitlines() if path.suffix == ".jsonl" else [whole]
        path.write_text("".join(f"{spoiled(text, evil)}\n" for text in texts))
        for verb in VERBS[path.name.partition(".")[0]]:
            said(capfd, *verb)
            said(capfd, *verb, "--json")
        path.write_text(whole)


def test_a_pipe_in_the_place_of_notes_is_not_waited_for(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Notes that are pipes are refused, or told of nothing; no verb hangs."""
    for path in notes(run):
        path.unlink()
        os.mkfifo(path)
    for verb in [["ls", "."], ["ckpt", "show", "."], *VERBS["run"], *VERBS["metrics"]]:
        said(capfd, *verb)


def test_a_best_that_is_not_finite_is_none(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`ls` calls the same epoch best as `RUN@best` and `keep_best`, which know no infinite best."""
    lines = [json.loads(line) for line in (run / "metrics.0.jsonl").read_text().splitlines()]
    lines[2]["metrics"]["loss"] = "-inf"
    (run / "metrics.0.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert "loss=0.16667 (epoch 6)" in said(capfd, "ls", "..")[1]


def test_a_jump_on_a_branch_that_was_left_is_looked_for_there(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """`find-bad RUN@6,branch=0 --metric` finds the NaN of branch 0, of which the run's notes tell no more."""
    for bad in (True, False):
        job = Job("left", blobs={"state": [0]})
        job.epoch(lambda ctx, bad=bad: ctx.log("loss", math.nan if bad and ctx.epoch == 4 else 1.0))
        job.stop_when(max_epochs(6))
        JobRunner(job, tmp_path / "run").train(resume_from_epoch=None if bad else 2)
    code, text = said(capfd, "ckpt", "find-bad", f"{tmp_path}/run@6,branch=0", "--metric", "loss")
    assert code == 1 and "epoch 4: loss is nan" in text
    assert said(capfd, "ckpt", "find-bad", f"{tmp_path}/run", "--metric", "loss")[0] == 0


def test_live_json_is_never_written_through_a_link(run: Path, tmp_path: Path) -> None:
    """A link that somebody left under the temporary name is replaced; what it leads to stays."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (run / ".tmp-live").symlink_to(precious)
    RunDirectory(run).write_live({"epoch": 7})
    assert precious.read_text() == "mine"
    assert RunDirectory(run).live()["epoch"] == 7 and not (run / "live.json").is_symlink()


def test_a_pipe_in_the_place_of_a_log_holds_no_rank_up(tmp_path: Path) -> None:
    """A rank's own log that is a pipe which nobody reads costs its lines, and nothing else."""
    (tmp_path / "attempt_0").mkdir()
    os.mkfifo(tmp_path / "attempt_0" / "rank_0.log")
    log = RankLog(0, 1, "here")
    log.open(tmp_path, 0)
    log.line("nobody reads this")


def spoiled(text: str, evil: str) -> str:
    """A line in which every number is another one; where `evil` is no number, every word that is a value."""
    number = not evil.startswith(('"', "[", "n", "{"))

    def change(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: change(one) for key, one in value.items()}
        if isinstance(value, list):
            return [change(one) for one in value]
        hit = isinstance(value, (int, float)) if number else isinstance(value, (str, int, float))
        return "@EVIL@" if hit else value

    return json.dumps(change(json.loads(text))).replace('"@EVIL@"', evil)
