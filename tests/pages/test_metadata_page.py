"""docs/metadata.md is true: its programs, commands and queries run as they stand, its tables exist."""

from __future__ import annotations

import csv
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from postgresql import needs_postgresql, postgresql
from told_jobs import contents, query
from torchrun import clean_environment
from warm import PLACE, server, warmed

from torchrelay.metadata.handlers import MetadataHandler
from torchrelay.metadata.sql.database import VERSION, metadata
from torchrelay.tools.cli.main import main

PAGE = (Path(__file__).resolve().parents[2] / "docs/metadata.md").read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
QUERIES = re.findall(r"^```sql\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
LINES = [shlex.split(line) for line in re.findall(r"^\$ (.*)$", PAGE, re.MULTILINE)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the programs of the page have run."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "csv_handler.py").write_text(PROGRAMS[0])
    (folder / "train.py").write_text(PROGRAMS[1])
    assert LINES[0] == ["python", "train.py"]
    env = clean_environment({PLACE: server()})
    subprocess.run(warmed(["train.py"]), cwd=folder, env=env, check=True, timeout=100)
    return folder


def test_the_handler_is_short_and_is_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's handler takes 30 lines, imports and empty ones included."""
    assert len(PROGRAMS) == 2 and len(PROGRAMS[0].splitlines()) <= 30
    monkeypatch.syspath_prepend(str(folder))
    from csv_handler import CsvHandler

    assert isinstance(CsvHandler("x.csv"), MetadataHandler)


def test_the_handler_heard_of_everything(folder: Path) -> None:
    """Each epoch once, then how long its save took and on which node."""
    rows = list(csv.reader((folder / "epochs.csv").read_text().splitlines()))
    assert [row[2:4] for row in rows] == [
        [str(epoch), said] for epoch in range(4) for said in ("saved", "checkpoint_save")
    ]
    assert all(row[1].endswith("runs/hello/checkpoints") for row in rows)
    assert all(row[4] == "trainer_0" and float(row[5]) >= 0 for row in rows[1::2])


def test_the_command_and_the_queries_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The database of one job gets the other's rows, too; every question has an answer."""
    monkeypatch.chdir(folder)
    before = len(contents("sqlite:///runs.db")["relay_epochs"])
    assert len(LINES) == 2 and LINES[1][0] == "torchrelay"
    assert main(LINES[1][1:]) == 0
    assert (before, len(contents("sqlite:///runs.db")["relay_epochs"])) == (4, 8)
    check_answers("sqlite:///runs.db")


def check_answers(url: str) -> None:
    nodes, epochs, runs = (query(url, text) for text in QUERIES)
    phases = query(url, "SELECT DISTINCT phase FROM relay_durations WHERE action = 'checkpoint_save'")
    assert [node for node, *_ in nodes] == ["trainer_0"]
    assert {phase for (phase,) in phases} == {"stage", "plan", "hash", "write", "fsync", "commit"}
    assert [row[:2] for row in epochs] == [(name, epoch) for name in ("again", "hello") for epoch in range(4)]
    assert all(slowest == quickest > 0 and size > 0 for _, _, slowest, quickest, size in epochs)
    assert sorted((name, epoch) for name, _, epoch, _ in runs) == [("again", 3), ("hello", 3)]


@needs_postgresql
def test_the_queries_run_on_a_server(folder: Path) -> None:
    """The same text is understood by PostgreSQL."""
    with postgresql() as server:
        assert (
            main(
                [
                    "runs",
                    "index",
                    *[str(folder / "runs" / n) for n in ("hello", "again")],
                    "--database",
                    server.url,
                ]
            )
            == 0
        )
        check_answers(server.url)


def test_the_tables_are_those_of_the_page() -> None:
    """Every table and column has its place in the page, and the page tells of no other."""
    table = PAGE.split("### Tables", 1)[1].split("###")[0]
    rows = {re.findall(r"`(\w+)`", line)[0]: line for line in table.splitlines() if line.startswith("| `")}
    assert set(rows) == {*metadata.tables, "relay_current_epochs"} and VERSION == 1
    for name, made in metadata.tables.items():
        assert set(re.findall(r"`(\w+)`", rows[name])) - {name} == set(made.c.keys())
