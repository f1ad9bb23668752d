"""Statements of docs/guides/migrate-flammable.md that no other test runs, row by row."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from program_cases import Script, start
from served import wait_until
from test_flammable_server import server

import torchrelay


@pytest.fixture
def line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Script:
    return Script(tmp_path, capsys)


def test_a_comment_of_amend_stays(line: Script) -> None:
    """`amend --message` is kept with the amendment, beside the comment of `train`."""
    assert line("train", "--max-epochs", "1", "--message", "first").rc == 0
    line.more("note = 1")
    assert line("amend", "--message", "a better plot").rc == 0
    note = json.loads((line.run / "program.json").read_text())
    assert (note["message"], note["amended"][0]["message"]) == ("first", "a better plot")
    assert "first" in line("status").out


def test_a_run_has_a_time_and_five_letters(line: Script) -> None:
    """A run lies in `runs/<script>/<YYYYMMDD-HHMMSS>-<5 letters>`."""
    assert line("train", "--max-epochs", "1").rc == 0
    assert line.run.parent == line.directory / "runs/line"
    assert re.fullmatch(r"\d{8}-\d{6}-[a-z]{5}", line.run.name)


@pytest.mark.parametrize(
    ("words", "env", "where"),
    [
        ((), {}, "source/runs/line"),
        (("--runs", "typed"), {"TORCHRELAY_RUNS": "said"}, "typed/line"),
        ((), {"TORCHRELAY_RUNS": "said"}, "said/line"),
    ],
)
def test_the_library_is_never_asked_for(
    line: Script, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], env: dict[str, str], where: str
) -> None:
    """Runs lie beside the script, or where an option or a variable says, and nobody is asked."""
    line.path.write_text(line.path.read_text().replace('    runs_dir = "../runs"\n', ""))
    monkeypatch.setattr(sys, "stdin", None)
    assert line("train", *words, "--max-epochs", "1", env=env).rc == 0
    assert len(list((line.directory / where).glob("2*"))) == 1


def test_a_class_names_its_directory(line: Script) -> None:
    """`name = "..."` in the class takes the place of the script's name."""
    line.more('name = "other"')
    assert line("train", "--max-epochs", "1").rc == 0
    assert len(list((line.directory / "runs/other").glob("2*"))) == 1


def test_steps_that_nobody_wrote_are_cross_entropy_and_adamw(line: Script) -> None:
    """The criterion is cross-entropy and the optimizer AdamW, where the class has none of its own."""

    class Plain(torchrelay.Program):
        def make_data(self) -> dict[str, Any]:
            return {"train": (torch.zeros(4, 2), torch.zeros(4).long())}

        def make_model(self) -> torch.nn.Module:
            return torch.nn.Linear(2, 2)

    assert type(Plain().criterion) is torch.nn.CrossEntropyLoss
    assert type(Plain().optimizer) is torch.optim.AdamW


def test_other_data_are_measured_by_hand(line: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """`program.test_on(data)` gives the numbers of any data, by the weights as they are."""
    monkeypatch.syspath_prepend(str(line.path.parent))
    monkeypatch.delitem(sys.modules, "line", raising=False)
    import line as script  # type: ignore[import-not-found]

    program = script.Line()
    x = torch.ones(3, 2)
    with torch.no_grad():
        y = program.model(x)
    assert program.test_on((x, y)) == {"loss": 0.0} and program.test_on((x, y + 2)) == {"loss": 4.0}


@pytest.mark.parametrize(("epoch", "means"), [("1", 1), ("last", 3), ("best", 2)])
def test_any_epoch_is_a_model_file(line: Script, epoch: str, means: int) -> None:
    """Every epoch is a checkpoint: `test --epoch` takes a number, `last` or `best`."""
    line.more("best = ('val/rank', 'max')")
    line.more("def measure(self, o, t): return {'rank': float(self.now == 2)}")
    line.more("def validate(self, ctx): self.now = ctx.epoch; super().validate(ctx)")
    line.more("def test(self, data=None): self.now = 0; return super().test(data)")
    assert line("train", "--max-epochs", "3").rc == 0
    told = line("test", "--epoch", epoch)
    assert told.rc == 0 and f"epoch {means} of" in told.out
    assert [torchrelay.open_checkpoint(line.run, n).epoch for n in range(4)] == [0, 1, 2, 3]


def test_own_data_come_back_and_own_numbers_are_read_later(line: Script) -> None:
    """`more_state()` is there again when a run goes on, and `ctx.log` makes a number of the run."""
    line.more("def __init__(self): self.seen = {'n': 0}")
    line.more("def more_state(self): return {'seen': self.seen}")
    line.more(
        "def after_epoch(self, ctx):\n        self.seen['n'] += 1\n"
        "        ctx.log('train/seen', self.seen['n'])"
    )
    assert line("train", "--max-epochs", "1").rc == 0
    assert line("train", "--max-epochs", "3").rc == 0
    assert [row["seen"] for row in torchrelay.metric_rows(line.run, "train")] == [1, 2, 3]
    assert torchrelay.open_checkpoint(line.run).metrics["train/seen"] == 3


def test_numbers_of_steps_become_one_in_any_of_these_ways(line: Script) -> None:
    """`reductions` knows mean, last, min, max, sum and all, and takes a function; a sum is over samples."""
    ways = ("mean", "last", "min", "max", "sum", "all")
    line.more(f"reductions = {{one: one for one in {ways}}} | {{'own': lambda values: len(values)}}")
    line.more(
        "def iteration(self, batch):\n        self.n = getattr(self, 'n', 0) + 1\n"
        f"        return dict.fromkeys({(*ways, 'own')}, float(self.n))"
    )
    assert line("train", "--max-epochs", "1").rc == 0
    (row,) = torchrelay.metric_rows(line.run, "train")
    found = {one: row[one] for one in (*ways, "own")}
    steps, samples = [1, 2], 8
    assert found == {
        "mean": 1.5, "last": 2, "min": 1, "max": 2, "sum": sum(steps) * samples, "all": steps, "own": 2,
    }  # fmt: skip


def test_a_past_run_is_restored_by_epoch(line: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """`Class.restored(run)` takes "best" or a number behind the run."""
    line.more("best = ('train/n', 'min')")
    line.more("def after_epoch(self, ctx): ctx.log('train/n', ctx.epoch)")
    assert line("train", "--max-epochs", "3").rc == 0
    kind = torchrelay.load_code(line.run).import_module("line").Line
    for wish, epoch in (((), 3), (("best",), 1), ((2,), 2)):
        stored = torchrelay.open_checkpoint(line.run, epoch).load_tensors("model.*")["model.weight"]
        assert torch.equal(kind.restored(line.run, *wish).model.state_dict()["weight"], stored)


@pytest.mark.ranks
def test_a_running_training_is_served(line: Script) -> None:
    """`server` answers with the newest saved epoch while a training of the run goes on."""
    line.more("def after_epoch(self, ctx):\n        import time\n        time.sleep(100 * (ctx.epoch == 2))")
    training = start(line.path, "train", "--max-epochs", "3", cwd=line.directory)
    try:
        wait_until(lambda: any(torchrelay.metric_rows(run, "train") for run in line.runs), 90)
        with server(line.directory, str(line.path), "server") as (client, _, _):
            answer = client.post("/predict", json={"sample": [1.0, 2.0]})
            assert answer.status_code == 200 and answer.json()["epoch"] == 1 and training.poll() is None
    finally:
        training.kill()
        training.communicate(timeout=100)
