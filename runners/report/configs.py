"""The section of configurations: who each run is, how it was started, and what differs between runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from torchrelay.errors import RelayError
from torchrelay.jobs.config.yaml_reader import read_yaml
from torchrelay.runners.report.facts import RunFacts
from torchrelay.runners.report.markup import Child, Markup, el
from torchrelay.runners.report.parts import of_run, scrolling, section, table
from torchrelay.runners.report.wording import count

_LEFT_OUT = frozenset({"format", "uuid", "created"})
_MOST_FIELDS = 400


def configs(runs: Sequence[RunFacts]) -> Markup:
    """What each run was, and differences first where there are several."""
    fields = [flat(run) for run in runs]
    if len(runs) == 1:
        run = runs[0]
        return section("config", _one(run), el("div", _table(runs, fields), class_="card"), _source(run))
    names = _names(fields)
    differ = [name for name in names if len({one.get(name) for one in fields}) > 1]
    title = (
        f"{count(len(differ), 'setting')} differ between the runs" if differ else "The runs were set up alike"
    )
    return section(
        "config",
        title,
        el("div", _table(runs, fields), class_="card"),
        [of_run(run.name, True, _source(run)) for run in runs if run.config],
    )


def flat(run: RunFacts) -> dict[str, str]:
    """`run.json` and the configuration as one level of names; what says who a run is, is left out."""
    found: dict[str, str] = {}
    said = {name: value for name, value in run.identity.items() if name not in _LEFT_OUT}
    command = said.pop("command", None)
    if isinstance(command, list):
        found["command"] = " ".join(map(str, command))
    _flatten("", said, found)
    _flatten("config", _parsed(run.config), found)
    return found


def _parsed(text: str | None) -> Any:
    if text is None:
        return {}
    try:
        return read_yaml(text.encode(), "config/resolved.yaml").value
    except RelayError:
        return {}  # the text itself is shown below


def _flatten(prefix: str, value: Any, into: dict[str, str]) -> None:
    if isinstance(value, Mapping) and len(into) < _MOST_FIELDS:
        for name, inner in value.items():
            _flatten(f"{prefix}.{name}" if prefix else str(name), inner, into)
    elif prefix and prefix != "config":
        into[prefix] = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def _names(fields: Sequence[Mapping[str, str]]) -> list[str]:
    """All names, those that differ first."""
    every = list(dict.fromkeys(name for one in fields for name in one))
    return sorted(every, key=lambda name: len({one.get(name) for one in fields}) < 2)


def _table(runs: Sequence[RunFacts], fields: Sequence[Mapping[str, str]]) -> Markup:
    rows: list[list[Child]] = []
    classes: list[str] = []
    for name in _names(fields):
        values = [one.get(name) for one in fields]
        differs = len(set(values)) > 1
        rows.append([name, *(el("code", "\N{EN DASH}" if one is None else one) for one in values)])
        classes.append("differs" if differs else "")
    columns = ["setting", *(run.name for run in runs)]
    return scrolling("settings", table(columns, rows, row_classes=classes))


def _source(run: RunFacts) -> Markup | None:
    if run.config is None:
        return None
    return el(
        "details", el("summary", f"config/resolved.yaml of {run.name}"), el("pre", run.config), class_="card"
    )


def _one(run: RunFacts) -> str:
    world = run.identity.get("world_size")
    ranks = f" on {count(world, 'rank')}" if type(world) is int else ""
    return (
        f"Started{ranks} by this command"
        if run.identity.get("command")
        else "How it was started is not known"
    )
