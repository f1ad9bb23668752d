"""docs/launch-kubernetes.md is true: its commands print what it shows, its options are those there are."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from torchrelay.tools.cli.main import main
from torchrelay.tools.launch import kubernetes

PAGE = (Path(__file__).resolve().parents[2] / "docs/launch-kubernetes.md").read_text()
SHOWN = re.findall(r"^```\n\$ torchrelay (.*)\n((?:.*\n)*?)```", PAGE, re.MULTILINE)


def test_the_commands_print_what_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first dry run, in a working directory that the page calls /src, prints the text below it."""
    monkeypatch.chdir(tmp_path)
    ((line, shown),) = SHOWN
    assert main(shlex.split(line)) == 0
    assert capsys.readouterr().out.replace(str(tmp_path), "/src") == shown
    (line,) = re.findall(r"^```console\n\$ torchrelay (.*)\n```", PAGE, re.MULTILINE)
    assert main(shlex.split(line)) == 0 and "\nkind: TrainJob\n" in capsys.readouterr().out


def test_the_options_and_codes_are_those_of_the_page() -> None:
    """Every key of --set is told, none is made up; so are the codes that end a Job at once."""
    table = PAGE.split("| key | meaning |")[1].split("\n\n")[0]
    told = {
        key
        for row in re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE)
        for key in re.findall(r"`(\w+)`", row)
    }
    assert told == set(kubernetes._READ)
    assert f"| {', '.join(map(str, kubernetes.HOPELESS))}: " in PAGE
