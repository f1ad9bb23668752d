"""A user's program and its verbs: the numbered statements of Flammable about training again, tests, files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from program_cases import Script, tree

import torchrelay
from torchrelay.checkpoint.log.lease import process_start
from torchrelay.runners.monitoring.status import standing

GIT = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]


@pytest.fixture
def script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Script:
    return Script(tmp_path, capsys)


def test_flm_1_unchanged_code_is_refused_and_every_change_is_allowed(script: Script) -> None:
    """FLM-1: trained already: code 2, naming both ways out; any changed source is another run."""
    source = script.path.parent
    subprocess.run(["git", "init", "-q"], cwd=source, check=True)
    subprocess.run(["git", "add", "line.py"], cwd=source, check=True)
    subprocess.run([*GIT, "commit", "-qm", "first"], cwd=source, check=True)
    assert script("train").rc == 0
    refused = script("train")
    assert refused.rc == 2
    assert "--force" in refused.err and "--retrain" in refused.err and "Traceback" not in refused.err

    def differs() -> bool:
        return script("status", "--check").rc == 1

    assert not differs()
    (source / "new.py").write_text("")
    assert differs(), "an untracked file"
    subprocess.run(["git", "add", "new.py"], cwd=source, check=True)
    assert differs(), "a staged file"
    subprocess.run([*GIT, "commit", "-qm", "by hand"], cwd=source, check=True)
    assert differs(), "a commit made by hand"
    assert script("train").rc == 0
    assert len(script.runs) == 2
    assert not differs()
    script.more("tail = 1")
    assert differs(), "a changed file"


def test_flm_1_the_configuration_makes_another_run_and_limits_do_not(script: Script, tmp_path: Path) -> None:
    """FLM-1: another value in the configuration is another run; a raised limit goes on with the same one."""
    (tmp_path / "c.yaml").write_text("hyper_parameters: {hidden: 3}\nrunner:\n- {name: t, epochs: 1}\n")
    strict = script("train", "-m", "c.yaml", "--strict-config")
    assert strict.rc == 2 and "hyper_parameters.hidden: was never read" in strict.err and not script.runs
    first = script("train", "-m", "c.yaml")
    assert first.rc == 0 and "c.yaml: keys never read: hyper_parameters.hidden (line 1)" in first.err
    assert script("train", "-m", "c.yaml").rc == 2
    assert script("train", "-m", "c.yaml", "-o", "hyper_parameters.hidden=4").rc == 0
    assert len(script.runs) == 2
    again = script(
        "train", "-m", "c.yaml", "-o", "runner.t.epochs=2"
    )  # of the first, though it is not the last
    assert (again.rc, len(script.runs)) == (0, 2)
    assert "continued" in again.out and "max_epochs raised" in again.out
    assert [row["epoch"] for row in torchrelay.metric_rows(script.runs[0], "train")] == [1, 2]
    assert (script.runs[0] / "config" / "source.yaml").read_text().startswith("hyper_parameters")


def test_flm_3_force_and_retrain(script: Script) -> None:
    """FLM-3: --force is a second run of the same code; --retrain the same id, begun empty, ."""
    assert script("train", "--message", "the first").rc == 0
    (first,) = script.runs
    artefact = first / "plots" / "deep" / "one.txt"
    artefact.parent.mkdir(parents=True)
    artefact.write_text("mine")
    assert script("test").rc == 0
    assert script("train", "--force", "--max-epochs", "1").rc == 0
    (second,) = [run for run in script.runs if run != first]
    codes = {json.loads((run / "program.json").read_text())["code_id"] for run in (first, second)}
    assert len(codes) == 1
    done = script("train", "--retrain", "--max-epochs", "1")
    assert done.rc == 0 and second.name in done.out
    assert len(torchrelay.metric_rows(second, "train")) == 1
    assert sorted(script.runs) == sorted([first, second])
    script("train", "--retrain", "--max-epochs", "1")
    aside = sorted(one.name for one in (first.parent / ".retrained").iterdir())
    assert aside == [f"{second.name}.1", f"{second.name}.2"]
    assert artefact.read_text() == "mine", "the other run is left alone"
    assert script("train", "--force", "--epoch", "1").rc == 2
    assert script("train", "--epoch", "one").rc == 2
    assert len(script.runs) == 2
    back = script("train", "--epoch", "0", "--max-epochs", "1")
    assert back.rc == 0 and second.name in back.out
    both = script("train", "--force", "--retrain")
    assert both.rc == 2 and "not allowed with" in both.err


def test_flm_3_what_is_set_aside_is_whole(script: Script) -> None:
    """FLM-3: artefacts of a user, in sub-directories too, go aside with everything else."""
    script("train", "--max-epochs", "1")
    run = script.run
    (run / "plots" / "deep").mkdir(parents=True)
    (run / "plots" / "deep" / "one.txt").write_text("mine")
    script("test")
    before = tree(run)
    script("train", "--retrain", "--max-epochs", "1")
    assert tree(run.parent / ".retrained" / f"{run.name}.1") == before
    assert not (run / "plots").exists() and not (run / "results").exists()


def test_flm_4_test_uses_the_last_run_and_refuses_changed_code(script: Script) -> None:
    """FLM-4: test stores and shows; changed code is refused; --ignore says so; --retest replaces."""
    script("train")
    run = script.run
    first = script("test")
    assert first.rc == 0 and f"epoch 2 of {run.name}: loss" in first.out
    (row,) = torchrelay.metric_rows(run, "test")
    assert row["epoch"] == 2 and standing(run).word == "tested"
    (stored,) = (run / "results").iterdir()
    was = json.loads(stored.read_text())["time"]
    assert "tested before" in script("test").out
    assert json.loads(stored.read_text())["time"] == was
    assert "tested before" not in script("test", "--retest").out
    assert json.loads(stored.read_text())["time"] > was
    script.more("def measure(self, output, targets): return {'mean': output.mean()}")
    refused = script("test")
    assert refused.rc == 2 and "line.py" in refused.err
    assert "--ignore" in refused.err and f"--run {run.name}" in refused.err
    ignored = script("test", "--ignore")
    assert ignored.rc == 0 and "runs the current code" in ignored.out and "mean" in ignored.out
    assert {"mean"} == set(torchrelay.metric_rows(run, "test")[1]) - set(row), "both results stay"


def test_flm_4_run_runs_the_archived_code(script: Script) -> None:
    """FLM-4: --run runs what was archived, helper modules included, not what lies there now."""
    helper = script.path.parent / "helper_of_line.py"
    helper.write_text("def measured(): return 1.0\n")
    script.more("def measure(self, o, t):\n        import helper_of_line\n"
                "        return {'by': helper_of_line.measured()}")  # fmt: skip
    script("train", "--max-epochs", "1")
    helper.write_text("def measured(): return 2.0\n")
    script.path.write_text(script.path.read_text().replace("return {'by'", "raise SystemExit(9)  #"))
    done = script("test", "--run", script.run.name[-5:], "--json")
    assert done.rc == 0, done.err
    assert torchrelay.metric_rows(script.run, "test")[0]["by"] == 1.0
    assert not list(Path(script.directory).glob("**/torchrelay-archived-*"))


def test_flm_5_eval_writes_whole_files_without_gradients(script: Script, tmp_path: Path) -> None:
    """FLM-5: eval mode and no gradients; one file, many, a directory; each result in its place when whole."""
    script.more("def forward(self, inputs):\n        import torch\n"
                "        self.seen = [self.model.training, torch.is_grad_enabled()]\n"
                "        return self.network(inputs)")  # fmt: skip
    script.more("def postprocess(self, output): return {'seen': self.seen, 'value': output[0]}")
    script("train", "--max-epochs", "1")
    inputs = tmp_path / "in"
    inputs.mkdir()
    for name in ("a.txt", "b.txt"):
        (inputs / name).write_text("1 2")
    (inputs / "c.json").write_text("[1.0, 2.0]")
    assert script("eval", "in/c.json", "one.json").rc == 0
    one = json.loads((tmp_path / "one.json").read_text())
    assert one["seen"] == [False, False]
    assert script("eval", "in", "many").rc == 0
    assert sorted(path.name for path in (tmp_path / "many").iterdir()) == [
        "a.txt.json",
        "b.txt.json",
        "c.json.json",
    ]
    assert json.loads((tmp_path / "many" / "c.json.json").read_text()) == one
    assert script("eval", "in/a.txt", "in/b.txt", "two").rc == 0
    assert len(list((tmp_path / "two").iterdir())) == 2


def test_flm_5_a_file_that_fails_is_named_and_earlier_results_are_no_source(
    script: Script, tmp_path: Path
) -> None:
    """FLM-5: of several files the one that fails is named; results written before it change no code."""
    script("train", "--max-epochs", "1")
    (tmp_path / "a.txt").write_text("1 2")
    (tmp_path / "b.txt").write_text("1 2 3")
    failed = script("eval", "a.txt", "b.txt", "source/out")
    assert failed.rc == 1 and "evaluation of b.txt failed" in failed.err
    assert (tmp_path / "source/out/a.txt.json").exists()
    assert script("eval", "a.txt", "out.json").rc == 0


def test_flm_5_bad_paths_end_it_before_the_model_is_made(script: Script, tmp_path: Path) -> None:
    """FLM-5: a missing IN, an OUT that cannot be: code 2 before the model; a failed result leaves no file."""
    script("train", "--max-epochs", "1")
    script.path.write_text(
        script.path.read_text().replace("return torch.nn.Linear(2, 1)", "raise SystemExit(9)")
    )
    (tmp_path / "in.txt").write_text("1 2")
    (tmp_path / "folder").mkdir()
    missing = script("eval", "--ignore", "no.txt", "out.json")
    assert missing.rc == 2 and "no.txt does not exist" in missing.err
    assert script("eval", "--ignore", "in.txt", "no/such/out.json").rc == 2
    assert script("eval", "--ignore", "in.txt", "in.txt/out.json").rc == 2
    assert script("eval", "in.txt").rc == 2
    assert script("eval", "--ignore", "in.txt", "out.json").rc == 9, "with good paths the model is made"
    script.path.write_text(
        script.path.read_text().replace("raise SystemExit(9)", "return torch.nn.Linear(2, 1)")
    )
    script.more(
        "def store_result(self, result, path): path.write_text('half'); raise OSError(28, 'No space')"
    )
    full = script("eval", "--ignore", "in.txt", "out.json")
    assert full.rc == 5 and "No space" in full.err
    assert sorted(one.name for one in tmp_path.iterdir()) == ["folder", "in.txt", "runs", "source"]


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
        ),
    ],
)
def test_flm_5_weights_load_onto_the_device_that_is_there(script: Script, device: str) -> None:
    """FLM-5: weights go to where the model is, whatever device they were saved from, bit for bit."""
    script("train", "--max-epochs", "1")
    stored = torchrelay.open_checkpoint(script.run).load_tensors("model.weight")["model.weight"]

    class Line(torchrelay.Program):
        def make_model(self) -> torch.nn.Module:
            return torch.nn.Linear(2, 1)

    program = Line()
    program.device = torch.device(device)
    program.load_weights(script.run)
    weight = program.model.state_dict()["weight"]
    assert weight.device.type == device
    assert torch.equal(weight.cpu(), stored)


def test_flm_7_status_writes_nothing_and_can_be_scripted(script: Script) -> None:
    """FLM-7: what changed, state, newest epoch; the code is 1 where train would train; nothing is written."""
    empty = script("status", "--json", "--check")
    assert empty.rc == 1 and json.loads(empty.out)["run"] is None
    script("train")
    (script.path.parent / "old.py").write_text("")
    script("train", "--max-epochs", "1", "--message", "with old")
    (script.path.parent / "old.py").unlink()
    (script.path.parent / "new.py").write_text("")
    script.more("tail = 1")
    before = tree(script.directory)
    told = json.loads(script("status", "--json").out)
    assert told["changed"]["files"] == {"added": ["new.py"], "changed": ["line.py"], "removed": ["old.py"]}
    assert (told["run"]["state"], told["run"]["epoch"], told["run"]["message"]) == ("finished", 1, "with old")
    shown = script("status")
    assert shown.rc == 0
    assert all(line in shown.out for line in ("changed: line.py", "added: new.py", "removed: old.py"))
    assert script("status", "--check").rc == 1
    assert tree(script.directory) == before


def test_flm_7_amend_records_changed_code_beside_the_old(script: Script, tmp_path: Path) -> None:
    """FLM-7: the changed code becomes the run's, both ids are shown, both sources can be extracted."""
    assert script("amend").rc == 2
    script("train")
    original = script.path.read_text()
    nothing = script("amend")
    assert nothing.rc == 2 and "nothing to amend" in nothing.err
    script.more("note = 'a better plot'")
    done = script("amend", "--message", "plot")
    assert done.rc == 0
    note = json.loads((script.run / "program.json").read_text())
    old, new = note["amended"][0]["code_id"], note["code_id"]
    assert old[:12] in done.out and new[:12] in done.out and old != new
    assert script("train").rc == 2, "it is that run's code now"
    assert script("test").rc == 0
    newest, first = torchrelay.load_code(script.run), torchrelay.load_code(script.run, attempt=0)
    assert (newest.id, first.id) == (new, old)
    assert first.read("line.py").decode() == original
    assert script("train", "--max-epochs", "3").rc == 0, "training goes on behind an amendment"
    assert torchrelay.load_code(script.run, attempt=0).id == old


def test_flm_7_a_running_run_is_not_amended_nor_trained_again(script: Script) -> None:
    """FLM-7: in the state running nothing is amended, and --retrain moves nothing away: code 4."""
    script("train")
    status = json.loads((script.run / "status.json").read_text())
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        noted = {"state": "RUNNING", "updated": 9e9, "pid": other.pid, "pid_start": process_start(other.pid)}
        text = json.dumps(status | noted)
        (script.run / "status.json").write_text(text)
        assert standing(script.run).word == "running"
        assert script("train", "--retrain").rc == 4
        script.more("tail = 1")
        assert script("amend").rc == 4
        assert len(json.loads((script.run / "program.json").read_text())["amended"]) == 0
    finally:
        other.communicate(b"\n", timeout=60)
    assert standing(script.run).word == "interrupted"
    assert script("amend").rc == 0


def test_flm_11_importing_neither_trains_nor_parses(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """FLM-11: a script is imported like any module; a class of another module is asked for `__name__`."""
    monkeypatch.setattr(sys, "argv", ["x", "train", "--nonsense"])
    monkeypatch.setattr(sys, "stdin", None)
    monkeypatch.syspath_prepend(str(script.path.parent))
    before = tree(script.directory)
    import line  # type: ignore[import-not-found]

    assert line.Line().batch_size == 8
    assert tree(script.directory) == before
    with pytest.raises(torchrelay.RelayError, match=r"torchrelay.main\(Line, __name__\)"):
        torchrelay.main(line.Line)
    torchrelay.main(line.Line, "somewhere")
    script.path.with_name("other.py").write_text(
        "import line, torchrelay\ntorchrelay.main(line.Line, __name__)\n"
    )
    import other  # type: ignore[import-not-found]  # noqa: F401

    assert not (script.directory / "runs").exists()


def test_flm_12_direct_use_keeps_everything_in_memory(
    script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """FLM-12: train, test, eval and rows of an object, without main; not a file is written."""
    monkeypatch.syspath_prepend(str(script.path.parent))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "line", raising=False)
    import line

    before = tree(script.directory)
    program = line.Line()
    result = program.train()
    assert (int(result), result.run_dir) == (2, None)
    assert [row["epoch"] for row in program.rows("train")] == [1, 2]
    assert set(program.test()) == {"loss"}
    assert program.eval(torch.ones(2)).shape == (1,)
    assert tree(script.directory) == before
    program.train(tmp_path / "kept")
    assert program.rows("val") == torchrelay.metric_rows(tmp_path / "kept", "val")
    restored = line.Line.restored(tmp_path / "kept")
    assert torch.equal(restored.eval(torch.ones(2)), program.eval(torch.ones(2)))


def test_flm_18_the_same_name_in_two_places_is_an_error(
    script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """FLM-18: runs lie beside their script; in one library two scripts of one name are refused, not mixed."""
    env = {"TORCHRELAY_RUNS": str(tmp_path / "library")}
    assert script("train", "--max-epochs", "1", env=env).rc == 0
    (tmp_path / "elsewhere").mkdir()
    other = Script(tmp_path / "elsewhere", capsys, script.path.read_text())
    refused = other("train", env=env)
    assert refused.rc == 2 and str(script.path) in refused.err and "name" in refused.err
    assert other("train", "--max-epochs", "1").rc == 0
    assert len(other.runs) == 1
    moved = script.path.rename(script.path.with_name("gone.py"))
    assert other("status", env=env).rc == 0, f"{moved}: a program that was moved finds its runs"


def test_modules_are_programs_too(
    script: Script, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`torchrelay train module:Class` and `torchrelay train script.py` do what the script does."""
    from torchrelay.tools.cli.main import main

    monkeypatch.chdir(script.path.parent)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.delitem(sys.modules, "line", raising=False)
    for code in (0, 2):
        with pytest.raises(SystemExit) as end:
            main(["train", "line:Line", "--max-epochs", "1"])
        assert end.value.code == code
    (captured,) = (script.directory / "runs" / "Line").glob("*/captured.0.json")
    assert json.loads(captured.read_text())["code"]["id"]
    with pytest.raises(SystemExit) as end:
        main(["train", "line.py", "--max-epochs", "1"])
    assert end.value.code == 0 and script.run.is_dir()
    run = next((script.directory / "runs" / "Line").iterdir()).name
    with pytest.raises(SystemExit) as end:
        main(["test", "line:Line", "--run", run])
    assert end.value.code == 0
    assert main(["train", "line:Nothing"]) == 2 and main(["train", "nowhere:Line"]) == 2
    capsys.readouterr()
    assert main(["train", "no.py"]) == 2
    assert "no.py" in capsys.readouterr().err
    empty = script.path.with_name("empty.py")
    empty.write_text("")
    assert main(["status", str(empty)]) == 2
    assert "does not end with torchrelay.main" in capsys.readouterr().err


@pytest.mark.parametrize("ending", ["train()", "main()"])
def test_a_verb_runs_no_job_of_a_plain_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ending: str
) -> None:
    """`torchrelay status plain.py` of a script with a JobRunner says how to start it, and trains nothing."""
    from torchrelay.tools.cli.main import main

    monkeypatch.setattr(sys, "argv", ["torchrelay"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    script = tmp_path / "plain.py"
    script.write_text(
        "from torchrelay import Job, JobRunner, max_epochs\n"
        "job = Job('plain', blobs={'n': 1})\njob.epoch(print)\njob.stop_when(max_epochs(1))\n"
        f"JobRunner(job, {str(tmp_path / 'run')!r}).{ending}\n"
    )
    for verb in ("status", "train", "test"):
        code: object = None
        try:
            code = main([verb, str(script)])
        except SystemExit as end:  # main() of JobRunner ends the process
            code = end.code
        said = capsys.readouterr().err
        assert code == 2 and f"{script} trains a job itself (JobRunner): start it with python" in said
        assert "Traceback" not in said and not (tmp_path / "run").exists()
