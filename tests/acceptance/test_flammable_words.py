"""What users of Flammable type: a run by its id, comments that stay, a train() of their own, samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from program_cases import Script

from torchrelay.metadata.experiments import newest_result, read_note, results
from torchrelay.runners.monitoring.status import standing

OWN = """def train(self, where=None, *, resume_from_epoch=None):
        print("own train in", where)
        {}"""


@pytest.fixture
def line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Script:
    return Script(tmp_path, capsys)


def test_a_run_goes_on_by_its_id(line: Script) -> None:
    """`train --run ID` continues that run, also behind a newer one of the same code."""
    assert line("train", "--max-epochs", "1").rc == 0
    older = line.run
    assert line("train", "--force", "--max-epochs", "2").rc == 0
    assert line("train", "--run", older.name).rc == 0
    assert [standing(one).epoch for one in line.runs] == [2, 2] and line.runs[0] == older
    refused = line("train", "--run", older.name)
    assert refused.rc == 2 and older.name in refused.err


def test_a_run_that_cannot_go_on_is_refused_by_its_id(line: Script) -> None:
    """An unknown id, one of other code, an id beside --force, and an option cut short end with 2."""
    assert line("train", "--max-epochs", "1").rc == 0
    unknown = line("train", "--run", "20200101-000000-aaaaa")
    assert unknown.rc == 2 and "the newest are" in unknown.err
    both = line("train", "--force", "--run", line.run.name)
    assert both.rc == 2 and "remove one of them" in both.err
    assert line("train", "--ru", line.run.name).rc == 2, "no option is guessed from its beginning"
    line.more("momentum = 1")
    changed = line("train", "--run", line.run.name)
    assert changed.rc == 2 and "code or configuration changed" in changed.err
    assert len(line.runs) == 1


def test_status_says_what_train_does(line: Script) -> None:
    """A run that was trained to a lower limit than the class says goes on, and `status` says so."""
    assert line("train", "--max-epochs", "1").rc == 0
    told = line("status", "--check")
    assert told.rc == 1 and "continues" in told.out and "max_epochs raised" in told.out
    assert line("train").rc == 0
    told = line("status", "--check")
    assert told.rc == 0 and f"refused, {line.run.name} has already trained this code" in told.out


def test_a_comment_stays_when_a_run_begins_again(line: Script) -> None:
    """`--retrain` keeps the message, and takes a new one where it is given."""
    assert line("train", "--message", "hello").rc == 0
    assert line("train", "--retrain").rc == 0
    assert read_note(line.run).message == "hello"
    assert line("train", "--retrain", "--message", "again").rc == 0
    assert read_note(line.run).message == "again"


@pytest.mark.parametrize(
    ("rest", "rc", "epochs"),
    (
        ("return super().train(where, resume_from_epoch=resume_from_epoch)", 0, 1),
        ("raise SystemExit(7)", 7, None),
        ("return None", 0, None),
    ),
)
def test_a_train_of_its_own_is_called(line: Script, rest: str, rc: int, epochs: int | None) -> None:
    """The verb calls the class's `train` with the run's directory; ours has what was typed."""
    line.more(OWN.format(rest))
    done = line("train", "--max-epochs", "1")
    assert done.rc == rc and f"own train in {line.run}" in done.out
    if epochs is not None:
        assert standing(line.run).epoch == epochs and standing(line.run).over


@pytest.mark.parametrize(
    ("name", "text"),
    (
        ("a.txt", "1 2\n"),
        ("a.csv", "1,2"),
        ("a.json", "[1, 2]"),
        ("b.json", "[1.0, 2.0]"),
        ("b.txt", "\n1 2\n\n"),
    ),
)
def test_one_row_of_numbers_is_one_sample(line: Script, name: str, text: str) -> None:
    """Text and JSON, whole numbers and fractions, give the same answer for a model of fractions."""
    assert line("train").rc == 0
    (line.directory / name).write_text(text)
    done = line("eval", str(line.directory / name), str(line.directory / "out.json"))
    assert done.rc == 0, done.err
    result = json.loads((line.directory / "out.json").read_text())
    (line.directory / "c.json").write_text("[1.0, 2.0]")
    assert line("eval", str(line.directory / "c.json"), str(line.directory / "ref.json")).rc == 0
    assert result == json.loads((line.directory / "ref.json").read_text()) and len(result) == 1


def test_whole_numbers_stay_whole_for_a_model_that_takes_them() -> None:
    """Tokens are whole numbers where the datasets have such."""
    import torchrelay

    class Words(torchrelay.Program):
        def make_data(self):
            return {"train": (torch.arange(8).reshape(4, 2), torch.zeros(4).long())}

        def make_model(self):
            return torch.nn.Embedding(8, 2)

    assert Words().decode_sample([1, 2]).dtype is torch.int64


def test_a_measurement_of_other_code_is_not_the_runs_own(line: Script) -> None:
    """`test --ignore` is kept beside the run's result, and `status` shows the run's own."""
    assert line("train").rc == 0
    own = json.loads(line("test", "--json").out)
    line.more("batch_size = 4")
    ignored = json.loads(line("test", "--ignore", "--json").out)
    assert own["own"] is True and ignored["own"] is False and own["code_id"] != ignored["code_id"]
    assert newest_result(line.run)["time"] == own["time"]  # type: ignore[index]
    assert [one["own"] for one in results(line.run)] == [True, False]
    assert json.loads(line("test", "--ignore", "--json").out)["time"] == ignored["time"], "it is kept"


def test_files_of_eval_are_no_source(line: Script) -> None:
    """What eval read and wrote beside the script changes nothing for eval, test, status, train and amend."""
    (line.path.parent / "there.json").write_text("[1, 2]")  # at the time of the training, too
    assert line("train", "--max-epochs", "1").rc == 0
    (line.path.parent / "sample.txt").write_text("1 2")
    for name in ("sample.txt", "sample.txt", "there.json"):
        told = line("eval", f"source/{name}", "source/result.json")
        assert told.rc == 0, told.err
    (line.path.parent / "sample.txt").write_text("2 1")
    assert line("eval", "source/sample.txt", "source/result.json").rc == 0
    (line.path.parent / "link.txt").symlink_to("sample.txt")
    assert "added: link.txt" in line("status").out
    assert line("eval", "source/link.txt", "source/result.json").rc == 0
    told = line("eval", "source/sample.txt", "source/there.json")
    assert told.rc == 2 and "is part of the source of" in told.err, "a file of the run is not replaced"
    status = line("status")
    assert "code: unchanged" in status.out and "added" not in status.out
    assert line("test").rc == 0 and newest_result(line.run) is not None
    assert line("train", "--max-epochs", "1").rc == 2 and len(line.runs) == 1
    assert "nothing to amend" in line("amend").err


def test_other_files_beside_those_of_eval_are_source(line: Script) -> None:
    """A new file that looks like source, and a changed one that the run knew and eval read, are changes."""
    (line.path.parent / "table.json").write_text("[1, 2]")
    assert line("train", "--max-epochs", "1").rc == 0
    assert line("eval", "source/table.json", "source/result.json").rc == 0
    (line.path.parent / "table.json").write_text("[2, 1]")
    assert "changed: table.json" in line("status").out
    assert "table.json" in line("eval", "source/table.json", "source/result.json").err
    (line.path.parent / "table.json").write_text("[1, 2]")
    assert line("eval", "source/table.json", "source/result.json").rc == 0
    (line.path.parent / "more.py").write_text("x = 1\n")
    assert line("eval", "source/table.json", "source/result.json").rc == 2


def test_a_result_that_a_later_run_archived_is_replaced(line: Script) -> None:
    """A changed program is trained beside the result of the one before, and its result takes the place."""
    (line.path.parent / "sample.txt").write_text("1 2")
    for momentum in ("0", "1"):
        line.more(f"momentum = {momentum}")
        assert line("train", "--max-epochs", "1").rc == 0
        for _ in range(2):
            told = line("eval", "source/sample.txt", "source/result.json")
            assert told.rc == 0, told.err
    assert "code: unchanged" in line("status").out and len(line.runs) == 2


@pytest.mark.parametrize("refused", [False, True], ids=("evaluated", "refused"))
def test_a_source_file_is_source_though_eval_wrote_or_read_its_name(line: Script, refused: bool) -> None:
    """What takes the place of a result, or of a sample, with other content is a change of source."""
    (line.path.parent / "sample.txt").write_text("1 2")
    assert line("train", "--max-epochs", "1").rc == 0
    if refused:
        (line.path.parent / "bad.txt").write_text("no numbers")
    words = ("source/bad.txt" if refused else "source/sample.txt", "source/table.json")
    assert (line("eval", *words).rc == 0) is not refused
    (line.path.parent / "bad.txt").unlink(missing_ok=True)
    (line.path.parent / "table.json").write_text('{"scale": 50}')
    assert "added: table.json" in line("status").out and line("test").rc == 2
    assert line("train", "--max-epochs", "1").rc == 0
    (line.path.parent / "table.json").write_text('{"scale": 60}')
    (line.path.parent / "sample.txt").write_text("3 4")
    assert "changed: sample.txt\nchanged: table.json" in line("status").out


@pytest.mark.parametrize("name", ["\ud800", "loop", "../x\n", "a" * 5000, 7])
def test_what_somebody_writes_among_the_notes_ends_no_verb(line: Script, name: Any) -> None:
    """Names that no file can have, and a circle of links, are passed over."""
    assert line("train", "--max-epochs", "1").rc == 0
    (line.path.parent / "loop").symlink_to("loop")
    (line.run / "results").mkdir(exist_ok=True)
    note = {"name": name if name != "loop" else "../../../source/loop", "sha256": "0" * 64, "written": True}
    (line.run / "results/evaluated.jsonl").write_text(f"[1]\n{json.dumps(note)}\n")
    (line.path.parent / "more.json").write_text("1")
    assert line("status").rc == 0 and "added: more.json" in line("status").out


def test_files_of_eval_by_archived_code_are_no_source(line: Script) -> None:
    """The same of `eval --run ID`, in a directory of results."""
    assert line("train", "--max-epochs", "1").rc == 0
    samples = line.path.parent / "samples"
    samples.mkdir()
    for name in "ab":
        (samples / f"{name}.txt").write_text("1 2")
    told = line("eval", "--run", line.run.name, "source/samples", "source/out")
    assert told.rc == 0, told.err
    assert "code: unchanged" in line("status").out


@pytest.mark.parametrize(
    ("text", "tells"),
    [
        ("def make_model(self):\n        return torch.nn.Linear(2, 1, bias=False)", "model"),
        ("def make_optimizer(self):\n        return torch.optim.Rprop(self.model.parameters())", "optimizer"),
        ("def make_model(self):\n        raise ZeroDivisionError('oh')", "ZeroDivisionError: oh"),
    ],
)
def test_amend_refuses_code_that_does_not_take_the_epoch(line: Script, text: str, tells: str) -> None:
    """`amend` loads the newest epoch into what the code makes; where that fails it records nothing."""
    assert line("train", "--max-epochs", "1").rc == 0
    before = read_note(line.run)
    line.more(text)
    told = line("amend")
    assert told.rc == 2 and "cannot load its epoch 1" in told.err and tells in told.err
    assert "Traceback" not in told.err and read_note(line.run) == before


def test_amend_records_code_that_takes_the_epoch(line: Script) -> None:
    """A new method changes nothing that is saved: the run has the new code, and goes on with it."""
    assert line("train", "--max-epochs", "1").rc == 0
    line.more("def plot(self):\n        return None")
    assert line("amend").rc == 0
    assert line("train", "--max-epochs", "2").rc == 0 and len(line.runs) == 1


def test_a_changed_source_is_not_retrained(line: Script) -> None:
    """`--retrain` is of the very code that the run has: another one is refused, and nothing is set aside."""
    assert line("train", "--max-epochs", "1").rc == 0
    line.more("tail = 1")
    told = line("train", "--retrain")
    assert told.rc == 2 and "there is none: train without it to create a new run" in told.err
    assert line.run.is_dir() and not (line.run.parent / ".retrained").exists()


def test_help_tells_the_verbs_and_trains_nothing(line: Script) -> None:
    """`script.py --help` names every verb, `train --help` the options of one."""
    told = line("--help")
    assert told.rc == 0
    verbs = ("train", "test", "eval", "server", "status", "amend", "package")
    assert all(f" {verb}" in told.out for verb in verbs)
    told = line("train", "--help")
    assert told.rc == 0 and all(one in told.out for one in ("--force", "--retrain", "--message", "--run"))
    assert line.runs == []


def test_archived_code_does_not_replace_source_either(line: Script) -> None:
    """`eval --run ID` refuses a result in place of a file that the run knows, as `eval` does."""
    table = line.path.parent / "table.json"
    table.write_text("[1, 2]")
    (line.directory / "sample.txt").write_text("1 2")
    assert line("train", "--max-epochs", "1").rc == 0
    for words in ([], ["--run", line.run.name]):
        told = line("eval", *words, "sample.txt", "source/table.json")
        assert told.rc == 2 and table.read_text() == "[1, 2]"


def test_a_result_is_replaced_behind_a_training_from_the_beginning(line: Script) -> None:
    """--retrain archives an earlier result and knows whose it is; a run of the very code comes first."""
    (line.path.parent / "sample.txt").write_text("1 2")
    assert line("train", "--max-epochs", "1").rc == 0
    for _ in range(2):
        assert line("eval", "source/sample.txt", "source/result.json").rc == 0
        assert line("train", "--max-epochs", "1", "--retrain").rc == 0
    assert line("eval", "source/sample.txt", "source/result.json").rc == 0
    (line.path.parent / "result.json").unlink()
    assert line("train", "--max-epochs", "1", "--force").rc == 0
    assert line("train", "--max-epochs", "1").rc == 2 and len(line.runs) == 2


@pytest.mark.parametrize(
    "signature", ["self", "self, where", "self, **options", "self, resume_from_epoch=None"]
)
def test_an_own_train_takes_of_the_arguments_what_it_names(line: Script, signature: str) -> None:
    """`train` of the program is called with the directory and the epoch where it has names for them."""
    line.more(f"def train({signature}):\n        print('own train')")
    told = line("train")
    assert told.rc == 0 and "own train" in told.out, told.err


def test_amend_takes_of_excluded_state_what_a_resume_takes(line: Script) -> None:
    """State that is excluded since, and that the epoch has with another shape, is refused by both."""
    line.more('def more_state(self):\n        return {"buffer": torch.zeros(3)}')
    assert line("train", "--max-epochs", "1").rc == 0
    text = line.path.read_text().replace("zeros(3)", "zeros(5)")
    line.path.write_text(text)
    line.more('def runner_options(self):\n        return {"exclude": ["buffer"]}')
    told = line("amend")
    assert told.rc == 2 and "buffer" in told.err


def test_state_that_is_kept_out_of_saves_is_kept_by_test_and_eval(line: Script) -> None:
    """`exclude` of the runner: test loads the epoch, and a line names what it does not have."""
    line.more('def runner_options(self):\n        return {"exclude": ["model.bias"]}')
    assert line("train", "--max-epochs", "1").rc == 0
    with pytest.warns(UserWarning, match=r"model\.bias stay as the program made them"):
        assert line("test").rc == 0


def test_amend_looks_at_tensors_that_are_saved_too(line: Script) -> None:
    """A tensor of `more_state` of another shape is refused, as the next training would refuse it."""
    line.more('def more_state(self):\n        return {"buffer": torch.zeros(3)}')
    assert line("train", "--max-epochs", "1").rc == 0
    line.path.write_text(line.path.read_text().replace("zeros(3)", "zeros(5)"))
    told = line("amend")
    assert told.rc == 2 and "buffer" in told.err
