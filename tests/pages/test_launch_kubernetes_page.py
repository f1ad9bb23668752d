"""docs/launch-kubernetes.md is true: its commands print what it shows, its options are those there are."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from torchrelay.tools.cli.main import main
from torchrelay.tools.launch import kubernetes

PAGE = (Path(__file__).resolve().parents[2] / "docs/launch-kubernetes.md").read_text()


def test_the_commands_print_what_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The dry runs print a Service and a Job with the fields that the page names, and a TrainJob."""
    monkeypatch.chdir(tmp_path)
    printed = []
    for line in re.findall(r"^```console\n\$ torchrelay (.*)\n```", PAGE, re.MULTILINE):
        assert main(shlex.split(line)) == 0
        printed.append(capsys.readouterr().out)
    job, trainjob = printed
    fields = re.findall(r"`(\w+: \d+)`", PAGE)
    assert len(fields) == 2 and all(f"\n  {one}\n" in job for one in fields)
    assert "\nkind: Service\n" in job and "\nkind: Job\n" in job and "\nkind: TrainJob\n" in trainjob


def test_the_options_and_codes_are_those_of_the_page() -> None:
    """Every key of --set is told, none is made up; so are the codes that end a Job at once."""
    rows = re.findall(r"^- (`.*?`): ", PAGE.split("## Options\n")[1], re.MULTILINE)
    assert {key for row in rows for key in re.findall(r"`(\w+)`", row)} == set(kubernetes._READ)
    assert f"- {', '.join(map(str, kubernetes.HOPELESS))}: " in PAGE
