"""`torchrelay serve` before it listens: what is refused, in one line and with 2."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import fsspec
import pytest
import torch
from served import Held, train

from torchrelay.errors import UsageError
from torchrelay.runners.artifacts.rebuild import named
from torchrelay.runners.programs.request import ServeOptions
from torchrelay.tools.cli.main import main
from torchrelay.tools.serving.handlers import TensorHandler
from torchrelay.tools.serving.program_server import handler_of, read_signature

MODEL = ("--model", "served:linear")


def code(*words: str) -> int:
    """What `serve` ends with; it never comes to listening here."""
    try:
        return main(["serve", *words, "--port", "0"])
    except SystemExit as end:
        return int(end.code or 0)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("serve") / "run"
    train(where, 1)
    return where


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((), "pass --model module:function"),
        (("--model", "served"), "expected module:name"),
        (("--model", "served:nothing"), "has no callable nothing"),
        (("--model", "nowhere:make"), "module nowhere not found"),
        (("--model", "json:dumps"), "TypeError"),
        ((*MODEL, "--blob", "other"), "give --blob"),
        ((*MODEL, "--epoch", "7"), "no epoch 7"),
        ((*MODEL, "--epoch", "0", "--watch"), "--watch follows last or best"),
        ((*MODEL, "--host", "0.0.0.0"), "--token-file"),
        ((*MODEL, "--handler", "served:linear"), "has no decode"),
        ((*MODEL, "--signature", "nothing.json"), "--signature nothing.json"),
        ((*MODEL, "--max-delay-ms", "60000"), "expected less than the timeout"),
        ((*MODEL, "--device", "nonsense"), "nonsense"),
    ],
)
def test_what_cannot_be_served_is_refused(
    run: Path, words: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
):
    """Each mistake names the option or the thing; only a function that fails shows its traceback, with 1."""
    assert code(str(run), *words) == (1 if text == "TypeError" else 2)
    told = capsys.readouterr().err
    assert text in told
    assert text == "TypeError" or "Traceback" not in told


def test_what_may_be_a_password_in_a_url_is_not_told(run: Path, capsys: pytest.CaptureFixture[str]):
    """An epoch that is not there is told with the place, without what stands before the `@` of its host."""
    place = "bob:hunter2@store/run"
    fsspec.filesystem("memory").put(str(run), f"/{place}", recursive=True)
    assert code(f"memory://{place}", *MODEL, "--epoch", "7") == 2
    told = capsys.readouterr().err
    assert "no epoch 7 in memory://bob:***@store/run" in told and "hunter2" not in told


def test_places_that_are_none_and_options_for_others(run: Path, capsys: pytest.CaptureFixture[str]):
    """Neither a directory of something else nor a file that is no package; a package takes no --model."""
    (run.parent / "file").write_text("PK, and no zip archive")
    (run.parent / "empty").mkdir()
    assert code(str(run.parent / "nowhere")) == 2 and code(str(run.parent / "empty")) == 2
    assert code(str(run.parent / "file")) == 5, "a format that this version does not read"
    assert code(str(run.parent / "file"), *MODEL) == 2
    assert "a package has its own" in capsys.readouterr().err
    assert code(f"{run.parent / 'file'}@best") == 2
    assert "remove the @ and what follows" in capsys.readouterr().err


def test_the_run_of_a_job_needs_its_model(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Where nothing is archived that makes it, and where there are checkpoints alone, `--model` is named."""
    shutil.copytree(run / "checkpoints", tmp_path / "checkpoints")
    assert code(f"{tmp_path}/checkpoints@best") == 2
    assert "give --model module:function" in capsys.readouterr().err
    assert code(f"{run}@last", "--signature", "x.json") == 2
    assert "--signature: the traced model of the run" in capsys.readouterr().err


def test_options_are_typed_again_for_the_archived_code():
    """What differs from the defaults, in words that mean the same."""
    options = ServeOptions(port=9, watch=True, max_delay_ms=0.5, token_file="t")
    assert options.words() == ["--port", "9", "--token-file", "t", "--watch", "--max-delay-ms", "0.5"]
    assert ServeOptions().words() == []


def test_handlers_and_signatures_are_found_by_name(tmp_path: Path):
    """A class of the user's, the plain one without, and a signature as JSON, of types that torch has."""
    assert handler_of(None) is TensorHandler and handler_of("served:Held") is Held
    assert isinstance(named("served:linear", "--model")(), torch.nn.Module)
    file, spec = tmp_path / "signature.json", {"name": "x", "shape": ["batch", 4], "dtype": "float32"}
    file.write_text(json.dumps({"inputs": [spec], "outputs": [spec]}))
    found = read_signature(str(file))
    assert found is not None and found.inputs[0].shape == ("batch", 4)
    for wrong in ({**spec, "dtype": "float99"}, {**spec, "shape": []}, {}):
        file.write_text(json.dumps({"inputs": [wrong], "outputs": []}))
        with pytest.raises(UsageError, match="--signature"):
            read_signature(str(file))
