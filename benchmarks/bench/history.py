"""What becomes of a kept run: a line of history for each figure, read from what the run left."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

COLUMNS = (
    *("date", "run", "workload", "measured", "engine", "median", "unit", "low", "high", "n", "ratio"),
    *("limit", "least", "scale", "hardware", "note"),
)
Row = dict[str, str]
UNITS = {"secs": "s", "bytes": "bytes", "mb": "MB"}
"""By the end of a key of `benchmarks/growth`; anything else is a number of things."""
NO_FIGURES = ("ranks", "blobs", "processes", "cores", "flat", "round")
FROZEN = re.compile(
    r" +(?P<way>reuse \w+) +(?P<middle>[\d.]+) s +\((?P<low>[\d.]+) to (?P<high>[\d.]+)\) +(?P<mib>[\d.]+) "
)


def number(value: float | None) -> str:
    """Six digits; empty for what there is not."""
    return "" if value is None else f"{value:.6g}"


def machine(hardware: str) -> str:
    """Processors and memory, without the kernel and the file system."""
    return ", ".join(one for one in hardware.split(", ")[:2] if "files on" not in one)


def row(told: Mapping[str, str], **figures: str) -> Row:
    """One line, all columns in it."""
    known = {**told, **figures}
    return {column: known.get(column, "") for column in COLUMNS}


def rows_of_results(told: Mapping[str, Any], run: str) -> list[Row]:
    """All figures of a `results.json`, those of W8 and W9 included."""
    head = told["head"]
    about = {"date": head["date"], "run": run, "hardware": machine(head["hardware"])}
    about["scale"] = number(head["way"]["scale"])
    found = [row(about, **_of_figure(one)) for one in told["figures"]]
    for name, text in told["others"].items():
        lines = text.splitlines()
        if name == "W8":
            found += _rows_of_frozen(lines, {**about, "workload": name})
        else:
            known = [json.loads(line) for line in lines if line.startswith("{")]
            found += rows_of_growth(known, {**about, "workload": name})
    return found


def _of_figure(one: Mapping[str, Any]) -> dict[str, str]:
    secs = one["secs"]
    found = {name: number(one.get(name)) for name in ("median", "ratio", "limit", "least")}
    if secs:
        found |= {"low": number(min(secs)), "high": number(max(secs))}
    return {
        "workload": one["workload"],
        "measured": one["action"],
        "engine": one["engine"],
        "unit": "s",
        **found,
        "n": str(len(secs)),
        "note": " ".join((one.get("failed") or "").split())[:100],
    }


def _rows_of_frozen(lines: Sequence[str], about: Mapping[str, str]) -> list[Row]:
    found, what = [], ""
    for line in lines:
        if told := FROZEN.match(line):
            name = f"{what}, {told['way']}"
            figures = {"median": told["middle"], "low": told["low"], "high": told["high"]}
            found.append(row(about, measured=name, engine="torchrelay", unit="s", **figures))
            found.append(row(about, measured=name, engine="torchrelay", unit="MiB", median=told["mib"]))
        else:
            what = line.partition(":")[0]
    return found


def rows_of_growth(lines: Iterable[Mapping[str, Any]], about: Mapping[str, str]) -> list[Row]:
    """All figures of the lines that `benchmarks/growth` prints."""
    found = []
    for line in lines:
        of = [str(line["kind"])] if "kind" in line else []
        of += [f"{line[name]:,} {name}" for name in ("ranks", "blobs") if name in line]
        for key, value in {**line, **line.get("exponents", {})}.items():
            if key in NO_FIGURES or isinstance(value, bool) or not isinstance(value, int | float):
                continue
            unit = "exponent" if "exponents" in line else UNITS.get(key.rpartition("_")[2], "count")
            figures = {"median": number(value), "unit": unit, "n": str(line.get("processes", 1))}
            named = ", ".join([*of, key])
            found.append(row(about, measured=named, engine=line.get("code", "torchrelay"), **figures))
    return found


FIGURE = r"[+-]?\d[\d,]*(?:\.\d+)?"
SHAPES = (
    re.compile(rf"(?P<middle>{FIGURE})%?"),
    re.compile(rf"(?P<middle>{FIGURE}) \((?P<low>{FIGURE}) to (?P<high>{FIGURE})\)"),
    re.compile(rf"(?P<low>{FIGURE}) to (?P<high>{FIGURE})"),
    re.compile(rf"(?P<all>{FIGURE}(?: {FIGURE})+)"),
)
"""Cells that are figures: a median, one with its range, a range alone, all rounds."""
UNIT = re.compile(r", (s|ms|GB/s|MiB|MB|kB)\b")
NOTHING = ("-", "")
TIMES = ("rounds", "n", "processes", "pairs", "pairs of processes")
BESIDE = ("ratio", "more", "quotient")
"""Columns that belong to the one before them."""


def rows_of_page(text: str, about: Mapping[str, str]) -> list[Row]:
    """The figures of all tables of a page in Markdown: rows and columns are what was measured."""
    found: list[Row] = []
    heading, intro, table = "", "", []
    whole = _default_unit(text.partition("\n|")[0])
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            table.append([cell.strip().replace("**", "") for cell in line.strip("| ").split(" | ")])
            continue
        if len(table) > 2:
            found += _rows_of_table(table, heading, _default_unit(intro) or whole, about)
        table = []
        if line.startswith("#"):
            heading, intro = line.lstrip("# "), ""
            heading = heading if line.startswith("##") else ""
        intro += line + "\n"
    return found


def _default_unit(text: str) -> str:
    """What a page says of all its figures."""
    if re.search(r"[Mm]illiseconds", text):
        return "ms"
    return "s" if re.search(r"\bSeconds\b|in seconds", text) else ""


def _rows_of_table(
    table: Sequence[Sequence[str]], heading: str, unit: str, about: Mapping[str, str]
) -> list[Row]:
    heads = _columns(table[0])
    lines = [[*line, *["-"] * (len(heads) - len(line))] for line in table[2:]]
    words = [at for at in range(len(heads)) if at == 0 or not any(_is_figure(line[at]) for line in lines)]
    found = []
    for line in lines:
        of = [heading] * bool(heading) + [line[at] for at in words]
        times = next((line[at] for at, head in enumerate(heads) if at and head in TIMES), "")
        told = [at for at in range(1, len(heads)) if at not in words and heads[at] not in TIMES]
        for at in told:
            known = figures(line[at])
            named = ", ".join([*of, UNIT.sub("", heads[at])] if len(told) > 1 else of)
            known = known or {"note": line[at][:100]}
            known["unit"] = _unit(heads[at], line[0], unit) if "note" not in known else ""
            if line[at] not in NOTHING:
                found.append(row(about, measured=named, n=times, **known))
        if not told:
            found.append(
                row(about, measured=", ".join(of[: 1 + bool(heading)]), note="; ".join(line[1:])[:100])
            )
    return found


def _is_figure(cell: str) -> bool:
    return cell in NOTHING or bool(figures(cell))


def _columns(heads: Sequence[str]) -> list[str]:
    """Names of columns, each its own."""
    found: list[str] = []
    before = ""
    for head in heads:
        found.append(f"{before}, {head}" if head in BESIDE and before else head)
        before = before if head in BESIDE else head
    return found


def _unit(head: str, label: str, otherwise: str) -> str:
    if re.search(r"ratio|quotient", head):
        return "ratio"
    if head.removesuffix(", more") in ("seconds", "wall", "processor"):
        return "s"
    told = UNIT.search(head) or UNIT.search(label)
    return told[1] if told else otherwise


def figures(cell: str) -> dict[str, str]:
    """Median and range of a cell; empty if it is something else."""
    for shape in SHAPES:
        told = shape.fullmatch(cell)
        if told is None:
            continue
        found = {name: text.replace(",", "").lstrip("+") for name, text in told.groupdict().items()}
        if "all" not in found:
            return {"median" if name == "middle" else name: text for name, text in found.items()}
        every = [float(one) for one in found["all"].split()]
        return {"median": number(median(every)), "low": number(min(every)), "high": number(max(every))}
    return {}


def read(path: Path) -> list[Row]:
    """The history as it is."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def add(path: Path, new: Sequence[Row]) -> None:
    """Append lines; those of the same run and workload, kept before, make way."""
    again = {(one["date"], one["run"], one["workload"]) for one in new}
    kept = [one for one in read(path) if (one["date"], one["run"], one["workload"]) not in again]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows([*kept, *new])
