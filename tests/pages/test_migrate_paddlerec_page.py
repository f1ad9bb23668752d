"""docs/guides/migrate-paddlerec.md is true: its files and commands run, in one folder."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from paged import shell_environment

import torchrelay
from torchrelay.metadata.run_directory import RunDirectory

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/guides/migrate-paddlerec.md").read_text()
FILES = dict(re.findall(r'^```\w+ title="(.*?)"\n(.*?)^```', PAGE, re.MULTILINE | re.DOTALL))
COMMANDS = re.findall(r"^\$ (.*)$", PAGE, re.MULTILINE)


def typed(folder: Path, line: str) -> subprocess.CompletedProcess[str]:
    """What becomes of a line in a shell, with the commands of this environment."""
    return subprocess.run(
        line, shell=True, cwd=folder, env=shell_environment(folder),
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def written(folder: Path) -> Path:
    for name, text in FILES.items():
        (folder / name).write_text(text)
    (folder / "test.txt").write_text(FILES["train.txt"])
    return folder


@pytest.mark.ranks
def test_the_commands_of_the_page_run_one_after_another(tmp_path: Path) -> None:
    """All end with 0; the run goes on twice, on two ranks at last, and what each line says is so."""
    assert list(FILES) == ["config.yaml", "model.py", "startup.py", "train.txt"] and len(COMMANDS) == 5
    done = {line: typed(written(tmp_path), line) for line in COMMANDS}
    assert all(one.returncode == 0 for one in done.values()), done
    first = done["torchrelay run -m config.yaml"]
    assert "epochs 3 rank 0 of 1" in first.stdout and "strategy" in first.stderr
    assert "rank 1 of 2" in done[COMMANDS[-1]].stdout
    went_on = [re.findall(r"resuming from epoch (\d)", done[line].stderr) for line in COMMANDS[2:]]
    assert went_on == [[], ["3"], ["4"]], done
    assert [torchrelay.open_checkpoint(tmp_path / "increment", n).epoch for n in range(6)] == list(range(6))
    assert RunDirectory(tmp_path / "increment").status()["state"] == "FINISHED"
    metrics = torchrelay.open_checkpoint(tmp_path / "increment").metrics
    assert {"loss", "accuracy", "val/loss", "val/accuracy"} <= metrics.keys()
    assert re.search(r"infer1 epoch \d: accuracy", first.stdout)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("epochs: 3", "epochss: 3", "did you mean"),
        ("epochs: 3", "epochs: three", "whole number"),
        ("dataset_name: clicks", "dataset_name: klicks", "unknown dataset `klicks`"),
        ("class: train\n", "class: train\n  fleet_mode: ps\n", "no parameter servers"),
    ],
)
def test_mistakes_are_told_by_line_before_anything_starts(
    tmp_path: Path, old: str, new: str, told: str
) -> None:
    """What the page says of mistakes."""
    folder = written(tmp_path)
    (folder / "config.yaml").write_text(FILES["config.yaml"].replace(old, new, 1))
    refused = typed(folder, "torchrelay config check config.yaml")
    assert refused.returncode == 2 and told in refused.stderr and "config.yaml:" in refused.stderr
    assert not (folder / "increment").exists()


def test_a_reader_without_slots_names_file_and_line(tmp_path: Path) -> None:
    """A line that is wrong is told with its number."""
    folder = written(tmp_path)
    (folder / "train.txt").write_text(FILES["train.txt"] + "click:x wide:1 wide:2\n")
    refused = typed(folder, "torchrelay run -m config.yaml")
    assert refused.returncode == 2 and "train.txt, line 5" in refused.stderr, refused
