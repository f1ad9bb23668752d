"""docs/inspection.md is true: its commands run, and each key of JSON that it names is there, and no other."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch

from torchrelay import Job, JobRunner, LocalSession, max_epochs
from torchrelay.tools.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/inspection.md").read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs that the page speaks of; `two` was resumed and has a tag."""
    folder = tmp_path_factory.mktemp("page")
    for name, epochs in (("one", 3), ("two", 2), ("two", 4)):
        job = Job("told", blobs={"model": lambda ctx: torch.nn.Linear(2, 2)})
        job.epoch(lambda ctx: (ctx["model"].bias.data.add_(1.0), ctx.log("val/acc", 0.5)))
        job.stop_when(max_epochs(epochs))
        with LocalSession(["trainer_0", "trainer_1"]) as session:
            JobRunner(job, folder / "runs" / name).train(session)
    assert main(["ckpt", "tag", str(folder / "runs/two"), "named"]) == 0
    return folder


def test_the_commands_run(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command of the page ends with 0 and says something."""
    monkeypatch.chdir(folder)
    lines = re.findall(r"^\$ torchrelay (.*?)(?: +#.*)?$", PAGE, re.MULTILINE)
    assert len(lines) > 8
    for line in lines:
        assert main(shlex.split(line)) == 0, line
        assert capsys.readouterr().out, line


def test_the_keys_of_json_are_those_of_the_page(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every key on top, and in the lists whose keys stand there, is told; none is made up."""
    pytest.importorskip("sqlalchemy")
    monkeypatch.chdir(folder)
    rows = dict(re.findall(r"^- `(.*?)`: (`.*)$", PAGE.split("## JSON\n")[1].split("\n## ")[0], re.MULTILINE))
    assert len(rows) >= 20
    for verb, text in rows.items():
        words = verb.split("`")[0].replace("RUNS", "runs").replace("RUN", "runs/two").split()
        words = [{"URL": "sqlite:///runs.db", "OTHER": "runs/one"}.get(word, word) for word in words]
        words += [] if "runs" in verb or "RUN" in verb else ["runs/two"]
        assert main([*words, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        told = set(re.findall(r"`(\w+)`", text))
        assert set(found) <= told, verb
        inner = [one for value in found.values() for one in _objects(value)]
        here = {key for one in inner for key in one} if re.search(r"`\w+`: ", text) else set()
        free = {"run", "status", "events", "metrics", "rows", "groups", "largest_blobs", "shares"}
        assert told <= set(found) | here | free | {"live", "retired", "orphan"} | _deep(found), (verb, told)


def _objects(value: object) -> list[dict[str, object]]:
    if isinstance(value, dict):
        return [value]
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _deep(value: object) -> set[str]:
    """All keys at any depth."""
    if isinstance(value, list):
        return {key for one in value for key in _deep(one)}
    if isinstance(value, dict):
        return set(value) | {key for one in value.values() for key in _deep(one)}
    return set()
