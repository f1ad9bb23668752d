"""docs/guides/migrate-flammable.md is true: its program, its commands and its past run, in one folder."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from paged import shell_environment

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/guides/migrate-flammable.md").read_text()
FILES = dict(re.findall(r'^```python title="(.*?)"\n(.*?)^```', PAGE, re.MULTILINE | re.DOTALL))
COMMANDS = re.findall(r"^\$ (.*)$", PAGE, re.MULTILINE)
(SHOWN,) = re.findall(r"^```text\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)

Done = tuple[Path, dict[str, subprocess.CompletedProcess[str]]]
"""The folder of the page, and what each command said."""


def typed(folder: Path, line: str) -> subprocess.CompletedProcess[str]:
    """What becomes of a line in a shell, with the commands of this environment."""
    return subprocess.run(
        line, shell=True, cwd=folder, env=shell_environment(folder),
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def done(
    tmp_path_factory: pytest.TempPathFactory,
) -> Done:
    """The folder behind all commands of the page, in their order, and what each said."""
    folder = tmp_path_factory.mktemp("page")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder, {line: typed(folder, line) for line in COMMANDS}


def test_the_page_has_its_program_and_commands() -> None:
    """All python but Flammable's own is a file of the page, and the verbs are typed."""
    assert list(FILES) == ["classify.py", "past.py"] and PAGE.count("```python") == 3
    assert [line.split()[2] for line in COMMANDS if line.startswith("python")] == [
        "train", "test", "eval", "train", "status",
    ]  # fmt: skip


def test_each_command_does_what_the_page_says(
    done: Done,
) -> None:
    """Every command ends with 0; there are two runs, a comment, a result, and the code is unchanged."""
    folder, said = done
    assert all(one.returncode == 0 for one in said.values()), said
    assert len(list((folder / "runs/classify").glob("2*"))) == 2
    assert "first try" in said["torchrelay runs ls runs/classify"].stdout
    assert "accuracy" in said["python classify.py test"].stdout
    assert len(json.loads((folder / "result.json").read_text())) == 2
    assert "code: unchanged" in said["python classify.py status"].stdout


def test_a_past_run_is_used_in_python(done: Done) -> None:
    """The code and the weights of the first run, by the page's program, behind a change of the script."""
    folder, _ = done
    (folder / "classify.py").write_text("raise SystemExit('the code of today')\n")
    past = typed(folder, "python past.py")
    assert (past.returncode, past.stdout) == (0, SHOWN), past.stderr


def test_what_retrain_and_ignore_do(done: Done) -> None:
    """The rows of --retrain and --ignore: what was lies aside, the comment stays, measurements are apart."""
    folder, _ = done
    (folder / "classify.py").write_text(FILES["classify.py"])
    first = sorted((folder / "runs/classify").glob("2*"))[0]
    again = typed(folder, f"python classify.py train --retrain --run {first.name}")
    assert again.returncode == 0, again.stderr
    assert (folder / "runs/classify/.retrained" / f"{first.name}.1" / "weights.txt").exists()
    assert "first try" in typed(folder, "torchrelay runs ls runs/classify").stdout
    (folder / "classify.py").write_text(FILES["classify.py"] + "# changed\n")
    assert typed(folder, "python classify.py test").returncode == 2
    ignoring = typed(folder, "python classify.py test --ignore")
    assert ignoring.returncode == 0 and "--ignore: runs the current code" in ignoring.stdout
    told = json.loads(typed(folder, "python classify.py status --json").stdout)
    assert told["changed"]["files"]["changed"] == ["classify.py"] and told["run"]["test"] is None
