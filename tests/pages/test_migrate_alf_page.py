"""docs/guides/migrate-alf.md is true: its stages run as it says, each alone, and print what it shows."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torchrun import clean_environment
from warm import PLACE, server, warmed

from torchrelay import open_checkpoint
from torchrelay.jobs.config.config import load_config
from torchrelay.tools.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/guides/migrate-alf.md").read_text()
FILES = {
    name: text
    for text, name in re.findall(
        r"(?<!-->\n)^```\w+\n(# (\S+\.(?:py|yaml))\n.*?)^```", PAGE, re.MULTILINE | re.DOTALL
    )
}
COMMANDS = re.findall(r"^\$ ((?:python [a-z]|rm|torchrelay) ?.*)$", PAGE, re.MULTILINE)
STAGES = ("low", "expert", "agent", "deployment")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The files of the page."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def said(folder: Path, *words: str) -> str:
    """What a program prints."""
    done = subprocess.run(
        warmed(words), cwd=folder, env=clean_environment({PLACE: server()}),
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def shown(at: int) -> str:
    """What a block of the page says was printed."""
    found: list[str] = re.findall(r"^```text\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return found[at]


def test_the_page_has_its_files() -> None:
    """Every block of python and YAML but the words of ALF is a file; none is forgotten."""
    assert list(FILES) == ["train.py", *(f"{one}/conf.py" for one in STAGES), "use.py", "expert.yaml"]
    assert PAGE.count("```python") + PAGE.count("```yaml") == len(FILES) + 1


def test_the_commands_print_what_the_page_shows(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In their order, with what they delete; then the last run alone, elsewhere, gives the model."""
    monkeypatch.chdir(place)
    printed = ""
    for command in COMMANDS:
        verb, *words = shlex.split(command)
        if verb == "python":
            printed += said(place, *words)
        elif verb == "rm":
            for one in words[1:]:
                shutil.rmtree(place / one)
        else:
            assert main(words) == 0
            told = capsys.readouterr().out
            assert [told.index(f"job {one}") for one in ("agent", "expert", "low")] and "epoch 2" in told
    assert printed == shown(0) and len(COMMANDS) == 10
    alone = place / "elsewhere"
    (alone / "runs").mkdir(parents=True)
    (place / "runs/deployment").rename(alone / "runs/deployment")
    (place / "use.py").rename(alone / "use.py")
    shutil.rmtree(place / "deployment")
    assert said(alone, "use.py") == shown(1)


def test_each_stage_goes_on_with_all_before_it_deleted(place: Path) -> None:
    """Each resumes without its upstream's run and source; frozen weights stay the upstream's to the end."""
    for before, stage in zip((None, *STAGES), STAGES, strict=False):
        assert said(place, "train.py", stage, "2") == f"{stage} has 2 epochs\n"
        if before is not None:
            shutil.rmtree(place / "runs" / before)
            shutil.rmtree(place / before)
            assert said(place, "train.py", stage, "3") == f"{stage} has 3 epochs\n"
    assert said(place, "use.py") == shown(1)
    assert [one.name for one in (place / "runs").iterdir()] == ["deployment"]
    begun, newest = (
        open_checkpoint(place / "runs/deployment", epoch=one).load_tensors("model.agent") for one in (0, 3)
    )
    assert begun and all(torch.equal(one, newest[name]) for name, one in begun.items())


def test_another_run_of_the_same_name_is_not_taken_for_the_upstream_of_an_upstream(place: Path) -> None:
    """Where the last run is used, an unlike `runs/low` beside it is no part of it."""
    for stage in STAGES:
        said(place, "train.py", stage, "2" if stage != "deployment" else "3")
    alone = place / "elsewhere"
    (alone / "runs").mkdir(parents=True)
    (place / "runs/deployment").rename(alone / "runs/deployment")
    shutil.copy(place / "use.py", alone)
    shutil.copytree(place / "low", alone / "low")
    shutil.copy(place / "train.py", alone)
    (alone / "low/conf.py").write_text(FILES["low/conf.py"].replace("WIDTH = 8", "WIDTH = 5"))
    said(alone, "train.py", "low", "1")
    assert said(alone, "use.py") == shown(1)


def test_the_configuration_takes_values_of_its_upstream(place: Path) -> None:
    """The YAML of the page is right once the first stage has run, and has its numbers."""
    for name in ("expert.py", "digits.py", "low.py"):
        (place / name).write_text("class Model: pass\nclass Reader: pass\n")
    low = (
        FILES["expert.yaml"]
        .replace("expert", "low")
        .replace("upstream:\n", "")
        .replace("width: $", "width: 6 #")
    )
    low = re.sub(r"^  low: .*\n", "", low, flags=re.MULTILINE).replace(
        '"${upstream.low.dataset.digits.batch_size}"', "4"
    )
    (place / "low.yaml").write_text(low)
    run = place / "runs/low"
    (run / "config").mkdir(parents=True)
    (run / "config/resolved.yaml").write_text(load_config(place / "low.yaml").resolved_text())
    (run / "captured.0.json").write_text('{"config": "config"}')
    found = load_config(place / "expert.yaml")
    assert found.section("hyper_parameters")["width"] == 6 and found.settings.dataset[0].batch_size == 4
