"""Kept runs of benchmarks: `benchmarks/keep` on small folders, and pages and history as they lie there."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launching import REPOSITORY, clean_environment

RESULTS = REPOSITORY / "benchmarks/results"
TABLE = """# Measured 2026-01-02

`benchmarks/run --only W1,W5`

2 x Some Processor, 24 GiB, Linux, files on ext4; torch 2.

## W1: one process, 200 tensors

### W1 save

| engine | median s |
|---|---|
| **torchrelay file** | 0.500 |

## W5: 5 of 500 blobs

![W1.svg](W1.svg)
"""
FIGURE = {"workload": "W1", "action": "save", "engine": "torchrelay file", "secs": [0.4, 0.6], "median": 0.5}
HEAD = {"date": "2026-01-02", "hardware": "2 x Some Processor, 24 GiB, Linux, files on ext4"}
GROWTH = {"what": "coordinator", "kind": "ddp", "ranks": 8, "blobs": 1000, "flat": False, "plan_secs": 0.0018}
LOADS = """# Loads

2026-01-03, `benchmarks/loads.py`. 2 x Some Processor, 24 GiB.

| load | cold, s | ratio | memory beyond, MiB |
|---|---|---|---|
| `load_into` | 1.681 | 0.97 (0.90 to 1.28) | - |
"""


def keep(results: Path, *runs: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, REPOSITORY / "benchmarks/keep", "--results", results, *runs],
        env=clean_environment(), capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


def history(results: Path) -> list[dict[str, str]]:
    with (results / "history.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def a_run(folder: Path, *, small: bool = False) -> Path:
    folder.mkdir()
    frozen = "10 % changes: 64 MiB in 200 tensors\n  reuse on    0.254 s  (0.249 to 0.267)     6.4 MiB\n"
    told = {
        "head": {**HEAD, "way": {"scale": 0.5, "small": small}},
        "figures": [FIGURE],
        "others": {"W8": frozen},
    }
    (folder / "results.json").write_text(json.dumps(told))
    (folder / "table.md").write_text(TABLE)
    return folder


def test_a_run_becomes_pages_and_lines_of_history(tmp_path: Path) -> None:
    """Each workload has its page without plots, each figure a line; a second time changes nothing."""
    run = a_run(tmp_path / "run")
    for _ in range(2):
        done = keep(tmp_path, run)
        assert done.returncode == 0, done.stderr
    page = (tmp_path / "one-process.md").read_text()
    assert page.startswith("# W1: one process, 200 tensors\n\nMeasured 2026-01-02\n\n`benchmarks/run")
    assert "| **torchrelay file** | 0.500 |" in page and ".svg" not in page and "W5:" not in page
    assert (tmp_path / "few-of-many.md").read_text().startswith("# W5: 5 of 500 blobs\n")
    lines = history(tmp_path)
    assert [line["measured"] for line in lines] == ["save", *["10 % changes, reuse on"] * 2]
    first = {name: value for name, value in lines[0].items() if value}
    about = {"date": "2026-01-02", "run": "run", "workload": "W1", "hardware": "2 x Some Processor, 24 GiB"}
    figures = {"median": "0.5", "unit": "s", "low": "0.4", "high": "0.6", "n": "2", "scale": "0.5"}
    assert first == {**about, **figures, "measured": "save", "engine": "torchrelay file"}
    assert (lines[1]["median"], lines[2]["median"], lines[2]["unit"]) == ("0.254", "6.4", "MiB")


def test_growth_and_printed_pages_are_kept_too(tmp_path: Path) -> None:
    """Lines of growth, and cells of a page that a program printed, are figures with their units."""
    growth = tmp_path / "growth"
    growth.mkdir()
    (growth / "growth-ranks.jsonl").write_text(json.dumps(GROWTH) + "\n")
    (growth / "growth-ranks.md").write_text("# Growth (ranks), measured 2026-01-02\n\n![ranks](x.png)\n")
    printed = tmp_path / "printed/loads.md"
    printed.parent.mkdir()
    printed.write_text(LOADS)
    done = keep(tmp_path, growth, printed)
    assert done.returncode == 0, done.stderr
    assert "png" not in (tmp_path / "growth-ranks.md").read_text()
    assert (tmp_path / "loads.md").read_text() == LOADS
    told = {line["measured"]: (line["workload"], line["median"], line["unit"]) for line in history(tmp_path)}
    assert told == {
        "ddp, 8 ranks, 1,000 blobs, plan_secs": ("W9", "0.0018", "s"),
        "`load_into`, cold": ("loads", "1.681", "s"),
        "`load_into`, cold, ratio": ("loads", "0.97", "ratio"),
    }


def test_what_is_no_finished_run_is_refused(tmp_path: Path) -> None:
    """An empty folder, a small run, a page without a day: one line, exit code 2, nothing written."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "page.md").write_text("| a | b |\n")
    for run in (tmp_path / "empty", a_run(tmp_path / "small", small=True), tmp_path / "page.md"):
        done = keep(tmp_path, run)
        assert done.returncode == 2 and "benchmarks/keep: error: " in done.stderr, done.stderr
        assert "Traceback" not in done.stderr
    assert not (tmp_path / "history.csv").exists()


def test_the_folder_names_all_its_pages() -> None:
    """README of the results links each page, with the day that the page tells."""
    text = (RESULTS / "README.md").read_text()
    told = dict(re.findall(r"^\| \[[\w-]+\]\(([\w-]+\.md)\) \|.*\| (\d{4}-\d\d-\d\d) \|", text, re.MULTILINE))
    assert sorted(told) == sorted(path.name for path in RESULTS.glob("*.md") if path.name != "README.md")
    for name, day in told.items():
        page = (RESULTS / name).read_text()
        assert day in page or f"the {int(day[-2:])}th" in page, name


@pytest.mark.parametrize("page", ["one-process", "small-tensors", "replicated", "sharded", "few-of-many",
                                  "reshards", "behind-training"])  # fmt: skip
def test_medians_of_the_pages_are_in_the_history(page: str) -> None:
    """What a page of today shows of an engine is a line of that day."""
    text = (RESULTS / f"{page}.md").read_text()
    workload, day = re.search(r"^# (W\d)", text)[1], re.search(r"\d{4}-\d\d-\d\d", text)[0]  # type: ignore[index]
    known = {
        (
            line["measured"],
            line["engine"],
            round(float(line["median"]), 3 if float(line["median"]) >= 0.1 else 4),
        )
        for line in history(RESULTS)
        if (line["workload"], line["date"]) == (workload, day) and line["median"]
    }
    sections = re.split(rf"^## {workload} ", text, flags=re.MULTILINE)[1:]
    for section in sections:
        for engine, median in re.findall(r"^\| ([^|]+) \| (-?[\d.]+) \|", section, re.MULTILINE):
            assert (section.partition("\n")[0], engine.strip("*"), float(median)) in known
    assert len(sections) >= 4
