"""Runs of which files were written by somebody else, verbs that meet, signals that come too late."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from program_cases import Script

from torchrelay.jobs.config.config import load_config
from torchrelay.jobs.config.tree import ConfigError
from torchrelay.metadata.code.capture import command
from torchrelay.metadata.experiments import Identity, ProgramRecord, RunStore
from torchrelay.metadata.lineage import LineageStage, StageRecord, capture, stages_of
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.runners.monitoring.status import Standing, standing
from torchrelay.runners.programs.run_selection import Chosen, RunInfo, TrainRequest, choose_to_train, made_run
from torchrelay.runners.session.stop_requests import Requests, nothing_follows, signals_ask
from torchrelay.tools.cli.main import main

RUN = {"format": {"major": 1, "minor": 0, "features": []}, "job": "j", "uuid": "u", "created": 1.0}
NOTE = {"program": "p", "origin": "o", "code_id": "a" * 64, "config_id": None, "created": 1.0}
STATUS = {"state": "FINISHED", "epoch": 3, "stop": ["max_epochs"]}
RESULT = {"epoch": 3, "time": 1.0, "metrics": {"loss": 0.5}, "values": {}}
ODD = [True, 7, "\x1b[31m\u202e", [[1]], {"a": {}}, [{"code_id": 5}], None]


def written(run: Path, **changes: dict[str, Any]) -> Path:
    """A run directory of small files, some fields of which are changed."""
    files = {"run": RUN, "program": NOTE, "status": STATUS, "results/test-e00000003-aaaaaaaaaaaa": RESULT}
    for name, content in files.items():
        path = run / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**content, **changes.get(name.partition("/")[0], {})}))
    return run


@pytest.mark.parametrize(
    ("file", "field"),
    [("program", "amended"), ("program", "message"), ("status", "stop"), ("results", "metrics")],
)
def test_runs_ls_and_show_survive_any_value_in_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, field: str
) -> None:
    """A field that is no list, table or text is passed over or named: no traceback, no escape sequence."""
    for number, value in enumerate(ODD):
        run = written(tmp_path / f"run{number}", **{file: {field: value}})
        for words in (["ls"], ["ls", "--json"], ["show"], ["show", "--json"]):
            main(["runs", *words[:1], str(run), *words[1:]])
            told = capsys.readouterr()
            assert "Traceback" not in told.err and "\x1b" not in told.out + told.err


def stage(upstream: Path) -> LineageStage:
    return LineageStage("expert", StageRecord("up@1", str(upstream), "j", "u", 1, 0), [], upstream)


def test_a_run_below_a_folder_of_its_upstream_is_captured_once(tmp_path: Path) -> None:
    """What the capture itself writes is no part of what it copies."""
    upstream = written(tmp_path / "up")
    run = upstream / "config" / "below"
    run.mkdir(parents=True)
    (upstream / "config" / "resolved.yaml").write_text("seed: 1\n")
    capture(run, [stage(upstream)])
    copied = sorted(one.name for one in (run / "lineage").rglob("*") if one.is_file())
    assert copied == ["resolved.yaml", "run.json", "stage.json"]


def test_pipes_links_and_huge_files_of_an_upstream_are_left_out_by_name(tmp_path: Path) -> None:
    """A capture waits for no pipe, follows no link, and reads no file that is larger than any of ours."""
    upstream = written(tmp_path / "up")
    (upstream / "config").mkdir()
    os.mkfifo(upstream / "config" / "pipe")
    (upstream / "config" / "link").symlink_to("/etc/passwd")
    (upstream / "config" / "loop").symlink_to("loop")
    with (upstream / "config" / "huge").open("wb") as file:
        file.truncate(1 << 40)
    run = tmp_path / "run"
    run.mkdir()
    capture(run, [stage(upstream)])
    (known,) = stages_of(run)
    assert known.files == ("run.json",)
    assert known.record["left_out"] == [f"config/{one}" for one in ("huge", "link", "loop", "pipe")]


def test_passwords_in_the_command_are_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a start was typed with is kept as run.json keeps it: without passwords of URLs."""
    monkeypatch.setattr(sys, "argv", ["train.py", "--sql", "postgresql://me:hunter2@db/x"])
    assert command()["argv"] == ["train.py", "--sql", "postgresql://me:***@db/x"]


def test_a_run_that_others_began_meanwhile_is_not_moved_aside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two `train --retrain` at once the second refuses, instead of taking the first one's run away."""
    script = Script(tmp_path, capsys)
    assert script("train").rc == 0
    store = RunStore(tmp_path / "runs" / "line")
    (run,) = store.runs()
    real = RunStore.find

    def found_later(self: RunStore, wanted: str) -> Any:
        monkeypatch.setattr(RunStore, "find", real)
        found = real(self, wanted)
        self.begin_again(found, type(found.note)(**{**vars(found.note), "created": 9.0}), None, 1)
        return real(self, wanted)

    monkeypatch.setattr(RunStore, "find", found_later)
    told = script("train", "--retrain")
    assert (told.rc, "by another process" in told.err) == (4, True)
    assert sorted(one.name for one in (store.directory / ".retrained").iterdir()) == [f"{run.id}.1"]


@pytest.mark.parametrize("damage", ['{"program": 5}', "{", "\0" * 40])
def test_a_damaged_note_stops_no_verb_of_the_other_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    """Verbs go on with healthy runs and name the damaged one, which alone is refused when it is asked for."""
    script = Script(tmp_path, capsys)
    assert script("train", "--max-epochs", "1").rc == script("train", "--force", "--max-epochs", "1").rc == 0
    bad, good = script.runs
    (bad / "program.json").write_text(damage)
    for words in (
        ["status"], ["status", "--run", good.name], ["test"], ["train", "--max-epochs", "2"], ["amend"],
        ["test", "--run", good.name], ["train", "--retrain"], ["train", "--force"],
    ):  # fmt: skip
        told = script(*words)
        assert told.rc == (2 if words == ["amend"] else 0), (words, told)
        assert "Traceback" not in told.err
        if words[-1] != good.name or words[0] == "status":
            assert told.err.count(f"{bad.name} is skipped: ") == 1, (words, told.err)
    for words in (["status", "--run", bad.name], ["test", "--run", bad.name]):
        told = script(*words)
        assert told.rc not in (-1, 0) and f"{bad}/program.json is damaged" in told.err, (words, told)
    assert (bad / "program.json").read_text() == damage


def test_a_start_beside_a_running_one_changes_no_note(tmp_path: Path) -> None:
    """Limits of a start that is refused are not noted: they would count as reached later."""
    store = RunStore(tmp_path)
    note = ProgramRecord("p", "o", "a", None, 1.0, limits={"max_epochs": 2})
    run = store.create(note, None, 1)
    RunDirectory(run.path).write_status("RUNNING", pid=1, host=socket.gethostname(), epoch=1)
    assert standing(run.path).word == "running"
    wanted = ProgramRecord("p", "o", "a", None, 2.0, limits={"max_epochs": 9}, launch="x", message="m")
    made_run(store, wanted, Chosen("continue", run.id, "running"), None, 1)
    assert store.find(run.id).note == note


def test_the_choice_to_begin_again_remembers_which_run_it_saw() -> None:
    """The id stays when a run is begun again, so the time of its making goes with it."""
    identity = Identity("a", None)
    known = RunInfo("run", identity, Standing("finished"), created=5.0)
    assert choose_to_train(TrainRequest(identity, retrain=True), [known]).created == 5.0


def test_a_save_that_is_asked_for_after_the_end_kills_nothing() -> None:
    """Where the process ends after its training a late signal is ignored; else all is as it was before."""
    number, before = signal.SIGUSR2, signal.getsignal(signal.SIGUSR2)
    signal.signal(number, signal.SIG_DFL)
    try:
        with nothing_follows(), signals_ask(Requests(), number):
            pass
        os.kill(os.getpid(), number)
        again = Requests()
        with nothing_follows(), signals_ask(again, number):
            os.kill(os.getpid(), number)
            assert again.save_wanted
        signal.signal(number, signal.SIG_DFL)
        with signals_ask(Requests(), number):
            pass
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_a_variable_that_is_no_text_is_told(tmp_path: Path) -> None:
    """Bytes of the environment that no YAML can hold would make a resolved form that nobody can read."""
    (tmp_path / "m.py").write_text("")
    text = "hyper_parameters: {a: '${env:ODD}'}\nphase: [{name: p, model: m.py}]\n"
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match="ODD of the environment is not valid UTF-8"):
        load_config(tmp_path / "config.yaml", (), {"ODD": "caf\udce9"})
