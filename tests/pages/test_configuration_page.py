"""docs/configuration.md is true: its file is right, its commands and its program run as they stand."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

from config_cases import read

from torchrelay.jobs.config.schema import TOP, json_schema, sections
from torchrelay.runners.config_runs.selection import recorded

PAGE = (Path(__file__).resolve().parents[2] / "docs/configuration.md").read_text()


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_what_runs_keep_of_a_variable(tmp_path: Path) -> None:
    """Its value stands in the resolved form alone; the file and the overrides keep the name."""
    text = 'hyper_parameters: {a: "${env:WHO}", b: 1}\n'
    config = read(tmp_path, text, ["hyper_parameters.b=${env:WHO}x"], {"WHO": "told"})
    files = recorded(config).config
    assert {name: data.count(b"told") for name, data in files.items()} == {
        "source.yaml": 0, "resolved.yaml": 2, "overrides.yaml": 0,
    }  # fmt: skip
    assert b"${env:WHO}" in files["source.yaml"] and b"${env:WHO}x" in files["overrides.yaml"]
    again = read(tmp_path / "again", files["resolved.yaml"].decode())
    assert (again.id, again.resolved_text()) == (config.id, config.resolved_text())


def test_the_page_runs(tmp_path: Path) -> None:
    """The configuration is right, each command ends with 0, the program prints what the page says."""
    (tmp_path / "config.yaml").write_text(blocks("yaml")[0])
    (tmp_path / "model.py").touch()
    lines = [line for block in blocks("console") for line in block.splitlines()]
    assert len(lines) == 5
    said = [run(tmp_path, "-m", *shlex.split(line.removeprefix("$ "))) for line in lines]
    assert said[0].startswith("ok, id ") and "epochs: 3  # command line:1:22" in said[1]
    (tmp_path / "program.py").write_text(blocks("python")[0])
    printed = run(tmp_path, "program.py").splitlines()
    assert printed[:2] == ["3 20", "64 64"] and printed[2].endswith("dataset.digits.tags: was never read")
    assert printed[3] == said[0].split()[-1] and len(printed) == 4  # a limit is no part of the id


def test_every_key_has_form_default_and_meaning() -> None:
    """Each field of each section is a key with a meaning; each default is what its own form reads."""
    for section, _ in sections(TOP):
        fields = {one.name for one in dataclasses.fields(section.of)}
        assert fields == {one.attribute for one in section.keys.values()} | ({section.free} - {None})
        for one in section.keys.values():
            assert one.doc and one.form.word, one.name
            assert not (one.required and one.default is not None), one.name


def test_the_command_prints_schema_and_table() -> None:
    """`config schema` prints both without importing torch."""
    code = (
        "import sys; from torchrelay.__main__ import main\n"
        "main(['config', 'schema']); print('torch' in sys.modules or 'pydantic' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True
    )
    *lines, torch_there = done.stdout.splitlines()
    assert torch_there == "False" and json.loads("\n".join(lines)) == json_schema()
