"""ONNX files of runs: while they train, never at the training's cost; and of any epoch afterwards."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import lifecycle_cases
import pytest
import torch
from program_cases import Script

import torchrelay
from torchrelay import Job, JobRunner, OnnxExport, max_epochs, open_checkpoint, run_to_onnx
from torchrelay.errors import UsageError
from torchrelay.jobs.config.config import load_config
from torchrelay.jobs.config.tree import ConfigError
from torchrelay.runners.training.journal import SaveWarning
from torchrelay.tools.cli.main import main

onnx = pytest.importorskip("onnx", reason="needs onnx: pip install -e '.[onnx]'")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs onnxruntime: pip install -e '.[onnx]'")

SCORES = {1: 0.5, 2: 0.9, 3: 0.7, 4: 0.2}
X = torch.ones(3, 2)


def said(path):
    return {one.key: one.value for one in onnx.load(path).metadata_props}


def answer(path, x=X):
    session = onnxruntime.InferenceSession(str(path))
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])


def train(where, epochs, *exports, scores=SCORES, **options):
    """A small run whose weights depend on the random stream; returns the model."""
    torchrelay.seed(5)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = Job("small", blobs=dict(model=model, optimizer=optimizer))

    @job.epoch
    def step(ctx):
        optimizer.zero_grad()
        (model(X) * torch.rand(1)).sum().backward()
        optimizer.step()
        ctx.log("score", scores[ctx.epoch])

    job.stop_when(max_epochs(epochs))
    found = [one(model) for one in exports]
    runner = JobRunner(job, where, best=("score", "max"), code=False, exports=found, **options)
    runner.train(torchrelay.LocalSession())
    return model


def of_epoch(run, epoch):
    model = torch.nn.Linear(2, 1)
    open_checkpoint(run, epoch).load({"model": model})
    return model(X).detach()


def test_sng_14_every_second_and_the_best_epoch_go_out_while_it_trains(tmp_path):
    """The files are those epochs; weights are those of a run without exports; a resume mends the best."""
    both = lambda model: OnnxExport(model, X, every=2, best=True)  # noqa: E731
    run = tmp_path / "run"
    train(run, 2, both)
    exports = run / "exports"
    assert {one.name for one in exports.iterdir()} == {"model-best.onnx", "model-epoch-2.onnx", "model.json"}
    assert (said(exports / "model-best.onnx")["torchrelay.epoch"], said(exports / "model-best.onnx")) == (
        "2",
        said(exports / "model-best.onnx") | {"torchrelay.run": "run"},
    )
    torch.testing.assert_close(answer(exports / "model-best.onnx"), of_epoch(run, 2))
    (exports / "model-best.onnx").unlink()  # as a crash before it, or an export that was added later
    ended = train(run, 4, lambda model: OnnxExport(model, X, best=True))
    assert said(exports / "model-best.onnx")["torchrelay.epoch"] == "2"
    torch.testing.assert_close(answer(exports / "model-best.onnx"), of_epoch(run, 2))
    plain = train(tmp_path / "plain", 4)
    assert torch.equal(ended.weight, plain.weight) and torch.equal(ended.bias, plain.bias)


def test_sng_14_an_export_that_fails_only_warns(tmp_path):
    """The run ends as ever; a warning names the epoch and what is wrong."""
    wrong = lambda model: OnnxExport(model, torch.ones(3, 7), every=2)  # noqa: E731
    with pytest.warns(SaveWarning, match="epoch 2 was not exported.*the model itself fails"):
        train(tmp_path / "run", 3, wrong)
    assert open_checkpoint(tmp_path / "run").epoch == 3
    assert not list((tmp_path / "run/exports").iterdir())


def test_sng_14_exports_of_epochs_that_are_gone_do_not_stay_the_best(tmp_path, monkeypatch):
    """After a rewind before the best epoch its file is replaced by that of the best that is left."""
    best = lambda model: OnnxExport("model", lambda: X, best=True)  # noqa: E731
    run = tmp_path / "run"
    train(run, 3, best)
    assert said(run / "exports/model-best.onnx")["torchrelay.epoch"] == "2"
    train(run, 2, best, scores=dict.fromkeys(SCORES, 0.1), resume_from_epoch=1)
    assert said(run / "exports/model-best.onnx")["torchrelay.epoch"] == "1"
    assert json.loads((run / "exports/model.json").read_text())["files"]["model-best.onnx"]["epoch"] == 1


def test_exports_that_cannot_be_are_refused_at_once(tmp_path):
    """Before anything is trained, by name."""
    model, job = torch.nn.Linear(2, 1), Job("x")
    for arguments, text in (
        ({}, "set every=k"),
        ({"every": 0}, "a whole number from 1"),
        ({"every": 1, "name": "../x"}, "expected letters, digits"),
        ({"every": 1, "options": {"overwrite": True}}, "options overwrite"),
    ):
        with pytest.raises(UsageError, match=text):
            OnnxExport(model, X, **arguments)
    with pytest.raises(UsageError, match="expected a module"):
        OnnxExport(3, X, every=1)
    one = OnnxExport(model, X, best=True)
    for options, text in (
        ({"exports": [one], "where": None}, "need a run directory"),
        ({"exports": [one], "best": None}, "needs JobRunner"),
        ({"exports": [one, one]}, "set name= for each"),
        ({"exports": [model]}, "expected torchrelay.OnnxExport"),
    ):
        with pytest.raises(UsageError, match=text):
            JobRunner(job, **({"where": tmp_path / "run"} | options))


def test_sng_9_an_epoch_of_a_program_goes_out(tmp_path, capsys):
    """The archived source makes the model and its example inputs, whatever the script is by now."""
    script = Script(tmp_path, capsys)
    assert script("train").rc == 0
    script.path.write_text("raise SystemExit('another script')")
    (run,) = script.runs
    assert main(["ckpt", "export", f"{run}@1", "--to", "onnx", "-o", str(tmp_path / "m.onnx"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["compared"] == [{"batch": 8}, {"batch": 7}] and told["difference"] < 1e-4
    facts = said(tmp_path / "m.onnx")
    assert (facts["torchrelay.epoch"], facts["torchrelay.run"]) == ("1", run.name)
    assert (run / f"code/{facts['torchrelay.code_id']}.zip").exists()
    torch.testing.assert_close(answer(tmp_path / "m.onnx"), of_epoch(run, 1))


def test_sng_9_an_epoch_of_a_configured_run_goes_out(tmp_path, capsys):
    """Labels of its batches are no inputs; the modules of the model are gone afterwards."""
    lifecycle_cases.run(tmp_path)
    before = set(sys.modules)
    (tmp_path / "model.py").unlink()
    done = run_to_onnx(tmp_path / "run", tmp_path / "m.onnx", 2)
    assert [one.name for one in done.signature.inputs] == ["batch_0"]
    assert not [name for name in set(sys.modules) - before if name.startswith("_torchrelay_")]
    ckpt = open_checkpoint(tmp_path / "run", 2)
    line = torch.nn.Linear(2, 1)
    ckpt.load({"a.model": line}, rename={"a.model.line": "a.model"})
    torch.testing.assert_close(answer(tmp_path / "m.onnx"), line(X).squeeze(1).detach())


def test_sng_9_an_epoch_of_a_plain_job_needs_its_model(tmp_path, capsys, monkeypatch):
    """A function makes it; without one, with another, or without inputs one line says what to give."""
    train(tmp_path / "run", 1)
    (tmp_path / "made_here.py").write_text(
        "import torch\ndef model(): return torch.nn.Linear(2, 1)\ndef text(): return 'x'\n"
    )
    monkeypatch.chdir(tmp_path)
    typed = ["ckpt", "export", "run@1", "--to", "onnx", "-o", "m.onnx"]
    for more, text in (
        ([], "was not archived: code=False: pass --model"),
        (["--model", "made_here:nothing"], "has no callable nothing"),
        (["--model", "elsewhere:model"], "module elsewhere not found"),
        (["--model", "made_here"], "expected module:name"),
        (["--model", "made_here:text"], "returned 'x'"),
        (["--model", "made_here:model"], "pass inputs="),
        (["--model", "made_here:model", "--blob", "net"], "has no blob 'net', it has model, optimizer"),
        (["--model", "made_here:model", "--prefix", "x."], "--prefix is not supported with --to onnx"),
    ):
        assert main([*typed, *more]) == 2
        assert text in capsys.readouterr().err
    assert main([*typed[:2], "--to", "hf", "-o", "hf", "--model", "made_here:model"]) == 2
    assert not Path("m.onnx").exists()
    assert main([*typed, "--model", "made_here:model", "--input", "input=float32[batch,2]"]) == 0
    assert "input float32[batch, 2] -> output float32[batch, 1]" in capsys.readouterr().out
    torch.testing.assert_close(answer("m.onnx"), of_epoch("run", 1))


def test_sng_14_a_configuration_makes_onnx_files_while_it_trains(tmp_path: Path) -> None:
    """SNG-14: `onnx: {every: 2, best: true}` of a profile; labels are no input, answers are the epoch's."""
    words = ["runner.train1.onnx={every: 2, best: true}", "runner.train1.keep_best={metric: loss, mode: max}"]
    lifecycle_cases.run(tmp_path, *words, "runner.train1.epochs=3")
    folder = tmp_path / "run/exports"
    made = ["model-best.onnx", "model-epoch-2.onnx", "model.json"]
    assert sorted(one.name for one in folder.iterdir()) == made
    assert json.loads((folder / "model.json").read_text())["files"]["model-best.onnx"]["epoch"] == 1
    stored = torchrelay.open_checkpoint(tmp_path / "run", 2).load_tensors("a.model")
    x = torch.rand(5, 2)
    line = torch.nn.functional.linear(x, stored["a.model.line.weight"], stored["a.model.line.bias"])
    assert torch.allclose(answer(folder / "model-epoch-2.onnx", x), line.squeeze(1), atol=1e-6)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ("{best: true}", "`keep_best` is missing"),
        ("{best: false}", "`every` or `best: true` is missing"),
        ("{every: 0}", "a whole number from 1"),
    ],
)
def test_a_key_for_onnx_files_that_means_nothing_is_refused(tmp_path: Path, keys: str, says: str) -> None:
    """At the check of the configuration, in one line, without torch."""
    path = lifecycle_cases.written(tmp_path)
    with pytest.raises(ConfigError) as error:
        load_config(path, [f"runner.train1.onnx={keys}"])
    assert says in "\n".join(error.value.report())
