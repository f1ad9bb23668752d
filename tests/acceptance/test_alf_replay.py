"""ALF-17: a run's archives are enough to get the same bits out of it, or it is said what is not."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import ending_job
import exact_job
import pytest
import torch
from lifecycle_cases import CONFIG, MODEL, run, written
from program_cases import SMALL, Script

from torchrelay import Job, JobRunner, LocalSession, load_blobs, max_epochs, save_blobs
from torchrelay.errors import UsageError
from torchrelay.tools.cli.main import main


def verified(run_dir: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    """What `verify RUN --replay --json` says."""
    capsys.readouterr()
    code = main(["verify", str(run_dir), "--replay", "--json", *words])
    printed = capsys.readouterr()
    return code, json.loads(printed.out) if printed.out else {"error": printed.err}


def configured(folder: Path, model: str = MODEL) -> Path:
    """A configured run of 2 epochs that records calls; its source is gone afterwards."""
    project = folder / "project"
    project.mkdir()
    written(project, CONFIG.replace("  epochs: 2\n", "  epochs: 2\n  replay: true\n"))
    (project / "model.py").write_text(model)
    assert run(project)["train1"] == 2
    shutil.move(project / "run", folder / "run")
    shutil.rmtree(project)
    return folder / "run"


def test_alf_17_a_configured_run_gives_the_same_bits(tmp_path: Path, capsys) -> None:
    """Rebuilt from archived configuration and source, loaded, replayed: bit-equal, 0, nothing is named."""
    kept = configured(tmp_path)
    code, told = verified(kept, capsys)
    assert (code, told.get("same")) == (0, True), told
    (call,) = told["calls"]
    assert (call["blob"], call["epoch"], call["not_reproduced"]) == ("a.model", 2, [])
    assert main(["verify", f"{kept}@1", "--replay"]) == 0
    assert capsys.readouterr().out == "epoch 1  a.model  same bits\n"
    assert len(list(kept.glob("replay/*"))) == 2


def test_alf_17_other_bits_and_lost_settings_are_told(
    tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that hangs on its surroundings gives other bits: 1, with outputs and settings by name."""
    model = MODEL.replace("self.line(batch[0])", "float(os.environ['SCALE']) * self.line(batch[0])")
    monkeypatch.setenv("SCALE", "1")
    kept = configured(tmp_path, "import os\n" + model)
    monkeypatch.setenv("SCALE", "2")
    code, told = verified(kept, capsys)
    assert (code, told["same"]) == (1, False)
    assert "output 0: 4 of 4 numbers, the greatest difference is" in told["calls"][0]["why"]
    monkeypatch.delenv("SCALE")
    code, told = verified(kept, capsys)
    assert code == 1 and told["calls"][0]["why"] == "KeyError: 'SCALE'"
    monkeypatch.setenv("SCALE", "1")
    recorded = load_blobs(kept / "replay/epoch_2.safetensors")
    settings = recorded["replay"]["calls"]["a.model"]["settings"]
    threads, settings["torch"] = torch.get_num_threads(), "1.0"
    settings["threads"] = threads + 1
    save_blobs(kept / "replay/epoch_2.safetensors", recorded, overwrite=True)
    code, told = verified(kept, capsys)
    assert code == 0 and told["calls"][0]["not_reproduced"] == [f"torch was 1.0, is {torch.__version__} here"]
    assert torch.get_num_threads() == threads


def test_alf_17_any_job_with_a_function_that_makes_its_model(
    tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`replay={"model": make_model}`: the function of the archive makes it, whatever the file says today."""
    source = tmp_path / "source"
    source.mkdir()
    text = (
        "import torch\n"
        "def make_model():\n"
        "    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout())\n"
    )
    (source / "alf_seventeen.py").write_text(text)
    monkeypatch.syspath_prepend(str(source))
    made = __import__("alf_seventeen").make_model
    torch.manual_seed(0)
    model = made()
    job = Job("plain", blobs={"model": model})
    job.epoch(lambda: model(torch.randn(5, 3)))
    job.stop_when(max_epochs(2))
    with LocalSession() as session:
        JobRunner(job, tmp_path / "run", code=[source], replay={"model": made}).train(session)
    del sys.modules["alf_seventeen"]
    (source / "alf_seventeen.py").write_text(text.replace("Linear(3, 4)", "Linear(3, 5)"))
    code, told = verified(tmp_path / "run", capsys)
    assert code == 0, told
    for wrong in (lambda: model, model, 3):
        with pytest.raises(UsageError, match="function or class in a file"):
            JobRunner(job, tmp_path / "other", replay={"model": wrong})
    with LocalSession() as session, pytest.raises(UsageError, match="not a registered module"):
        JobRunner(job, tmp_path / "other", code=False, replay={"modle": made}).train(session)


def test_alf_17_a_program_is_made_by_its_class(tmp_path: Path, capsys) -> None:
    """`replay = True` in the class of a script: the archived class makes the model, and trains nothing."""
    script = Script(tmp_path, capsys)
    script.path.write_text(SMALL.replace("# more", "replay = True"))
    assert script("train").rc == 0
    (kept,) = (tmp_path / "runs/line").iterdir()
    script.path.unlink()
    code, told = verified(kept, capsys)
    assert (code, told["calls"][0]["blob"]) == (0, "model"), told


def test_alf_17_to_record_changes_nothing(tmp_path: Path, capsys) -> None:
    """Random streams, buffers, results are as in a run that records nothing; of which verify says so."""
    found = []
    for how in ({}, {"replay": {"model": exact_job.Net}}):
        where = tmp_path / str(len(found))
        with LocalSession() as session:
            found.append(ending_job.start(session, where, epochs=2, code=False, **how))
    assert (found[0].digest, found[0].values) == (found[1].digest, found[1].values)
    assert (tmp_path / "1/replay/epoch_2.safetensors").is_file()
    code, told = verified(tmp_path / "0", capsys)
    assert code == 2 and "has no recorded call" in told["error"]
