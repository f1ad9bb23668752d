"""`torchrelay compare`: runs side by side: what they are, what they were told, how they ended."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torchrelay.checkpoint.format.log_state import Entry
from torchrelay.checkpoint.format.manifest.summary import glance
from torchrelay.checkpoint.load.open import Best
from torchrelay.errors import UsageError
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.runners.commands.command_line_arguments import Add, add_run
from torchrelay.runners.commands.run_notes import best_of, metrics_of
from torchrelay.runners.monitoring.console import Output, finite, human_number, time_text
from torchrelay.runners.remote_runs.resolve import Place, each_run, locate

_CONFIG = "config/resolved.yaml"
_IDENTITY = ("job", "uuid", "created", "world_size", "python", "command", "best")
_STATUS = ("state", "epoch", "attempt", "updated")
Facts = dict[str, Any]


def add_compare(add: Add) -> None:
    """Define `compare`."""
    parser = add("compare", "put runs side by side: identity, configuration, epochs, metrics, times", compare)
    add_run(parser, many=True)
    parser.add_argument("--only-changed", action="store_true", help="leave out what is the same in all")


def compare(chosen: argparse.Namespace, output: Output) -> int:
    """Read what the runs noted of themselves; no manifest but of the newest epoch."""
    paths = each_run(chosen.path)
    found = [_facts(locate(path)) for path in paths]
    names = list(dict.fromkeys(name for facts in found for name in facts))
    rows = {name: [facts.get(name) for facts in found] for name in names}
    if chosen.only_changed:
        rows = {name: row for name, row in rows.items() if any(value != row[0] for value in row)}
    if output.json:
        output.value({"runs": paths, "rows": rows})
    elif rows:
        output.table(("", *paths), [[name, *(_text(name, one) for one in row)] for name, row in rows.items()])
    else:
        output.line(f"nothing differs in {len(found)} run{'s' * (len(found) > 1)}")
    return 0


def _facts(place: Place) -> Facts:
    """Everything that is compared of a run, by name, in the order in which it is shown."""
    run = place.run
    if run is None:
        raise UsageError(
            f"{place.where} holds checkpoints but no run (run.json): torchrelay diff compares epochs"
        )
    identity, status = run.known_identity(), run.known_status()
    facts = {name: identity[name] for name in _IDENTITY if name in identity}
    facts |= {name: status[name] for name in _STATUS if name in status}
    facts |= _epochs(place)
    facts |= _metrics(run.metrics(), place.best)
    return {**facts, **_config(run)}


def _epochs(place: Place) -> Facts:
    line = place.log().line()
    whole = [entry.position.epoch for entry in line if entry.position.boundary]
    return {
        "epochs kept": len(whole),
        "newest epoch": whole[-1] if whole else None,
        **_durations(place, line),
    }


def _durations(place: Place, line: Sequence[Entry]) -> Facts:
    """Seconds that were trained, over all attempts, as the newest readable manifest says."""
    for entry in reversed(line):
        try:
            facts = glance(place.storage, entry).facts
        except OSError:
            continue
        return {"trained secs": facts.elapsed_secs, "steps": facts.total_steps, "seed": facts.seed}
    return {}


def _metrics(lines: Sequence[Mapping[str, Any]], best: Best | None) -> Facts:
    final = metrics_of(lines[-1]) if lines else {}
    found: Facts = {f"final {name}": finite(value) for name, value in sorted(final.items())}
    if best is not None and (winner := best_of(lines, best)) is not None:
        found[f"best {best[0]}"], found["best epoch"] = winner
    return found


def _config(run: RunDirectory) -> Facts:
    path = run.path / _CONFIG
    if not path.exists():
        return {}
    from torchrelay.jobs.config.yaml_reader import read_yaml_file  # imports yaml, which few runs need

    return dict(_flat("config", read_yaml_file(path).value))


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(f"{prefix}.{key}", inner)
    else:
        yield prefix, value


def _text(name: str, value: Any) -> str:
    if name in ("created", "updated") and isinstance(value, (int, float)):
        return time_text(value)
    if isinstance(value, float):
        return human_number(value)
    if isinstance(value, list):
        return " ".join(map(str, value)) or "-"
    return "-" if value is None else str(value)
