"""Turns a finished run into the current pages of what it measured, and adds its figures to the history."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.history import Row, add, machine, rows_of_growth, rows_of_page, rows_of_results
from bench.main import RESULTS

PAGES = {
    "W1": "one-process",
    "W2": "small-tensors",
    "W3": "replicated",
    "W4": "sharded",
    "W5": "few-of-many",
    "W6": "reshards",
    "W7": "behind-training",
    "W8": "frozen",
}
"""The page of each workload of `benchmarks/run`; that of W9 is `growth-ranks`."""


class NotKeptError(Exception):
    """The given path is not a finished run, and why."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Keep each folder or page that is named; 2 where one is none."""
    parser = argparse.ArgumentParser(prog="benchmarks/keep", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs, or pages that programs printed")
    parser.add_argument("--results", type=Path, default=RESULTS, help="pages and history; benchmarks/results")
    given = parser.parse_args(arguments)
    for run in given.runs:
        try:
            pages, rows = kept_page(run) if run.suffix == ".md" else kept_folder(run)
        except (NotKeptError, OSError, ValueError) as error:
            print(f"benchmarks/keep: error: {run}: {error}", file=sys.stderr)
            return 2
        for name, text in pages.items():
            (given.results / f"{name}.md").write_text(text)
        add(given.results / "history.csv", rows)
        print(f"{run}: {len(rows)} lines of history; pages: {', '.join(pages) or 'none'}")
    return 0


def kept_folder(folder: Path) -> tuple[dict[str, str], list[Row]]:
    """Pages and lines of a folder of `benchmarks/run` or `benchmarks/growth`."""
    pages: dict[str, str] = {}
    rows: list[Row] = []
    run = folder.resolve().name
    if (folder / "results.json").exists():
        told = json.loads((folder / "results.json").read_text())
        if told["head"]["way"]["small"]:
            raise NotKeptError("was measured with --small")
        pages |= pages_of((folder / "table.md").read_text())
        rows += rows_of_results(told, run)
    for lines in sorted(folder.glob("growth-*.jsonl")):
        text = lines.with_suffix(".md").read_text()
        about = {**about_page(text), "run": run, "workload": workload_of(lines.stem)}
        rows += rows_of_growth(map(json.loads, lines.read_text().splitlines()), about)
        pages[lines.stem] = without_pictures(text)
    if not rows:
        raise NotKeptError("has neither results.json nor growth-*.jsonl")
    return pages, rows


def kept_page(path: Path) -> tuple[dict[str, str], list[Row]]:
    """A page as a program printed it, with the day on it."""
    text = path.read_text()
    rows = rows_of_page(text, {**about_page(text), "run": path.stem, "workload": path.stem})
    if not rows:
        raise NotKeptError("has no table")
    return {path.stem: text}, rows


def workload_of(stem: str) -> str:
    """What history calls a kind of growth."""
    return "W9" if stem == "growth-ranks" else stem


def about_page(text: str) -> Row:
    """Date and machine of a page."""
    day = re.search(r"\d{4}-\d\d-\d\d", text)
    if day is None:
        raise NotKeptError("names no day (YYYY-MM-DD)")
    told = re.search(r"\d+ x [A-Z][^;.]*", text)
    return {"date": day[0], "hardware": machine(told[0]) if told else ""}


def pages_of(table: str) -> dict[str, str]:
    """The page of each workload in a `table.md`: what stands at its head, and its own section."""
    head, *sections = re.split(r"^## ", without_pictures(table), flags=re.MULTILINE)
    measured = head.lstrip("# ")
    found = {}
    for section in sections:
        title, _, tables = section.partition("\n")
        if (workload := title.partition(":")[0]) in PAGES:
            tables = tables.replace("\n### ", "\n## ").strip()
            found[PAGES[workload]] = f"# {title}\n\n{measured.strip()}\n\n{tables}\n"
    return found


def without_pictures(text: str) -> str:
    """A page whose plots stay behind."""
    return re.sub(r"^!\[.*\)\n", "", text, flags=re.MULTILINE).rstrip() + "\n"
