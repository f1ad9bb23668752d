"""`torchrelay runs compare|diff`: compare runs, their source code and their environments."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from torchrelay.checkpoint.load.info import glance
from torchrelay.checkpoint.load.open import Best
from torchrelay.errors import UsageError
from torchrelay.metadata.code.archive import (
    SHORT,
    Archive,
    FileDiff,
    SourceChanges,
    changes,
    file_diffs,
    open_archive,
)
from torchrelay.metadata.code.capture import captures, code_id_of, config_texts
from torchrelay.metadata.code.snapshot import of_manifest
from torchrelay.metadata.fs import finite
from torchrelay.records import dataclass
from torchrelay.runners.monitoring.console import Output, arg, flag, human_number, time_text, verb
from torchrelay.runners.remote_runs.resolve import RunLocation, each_run, locate
from torchrelay.tools.cli.arguments import RUNS
from torchrelay.tools.cli.runs.ls import LIBRARY, best_of, find_run, metrics_of

_COMPARED = ("argv", "python", "torch", "world", "packages", "config_id", "overrides", "platform")
_SHOWN = 3


@dataclass(frozen=True)
class CapturedStart:
    """One launch of a run: captured environment, source archive if any, and configuration files."""

    text: str
    captured: Mapping[str, Any]
    archive: Archive | None
    config: Mapping[str, bytes]


@dataclass(frozen=True)
class Difference:
    """Differences of B relative to A; `code` is None if one of them has no source archive."""

    a: CapturedStart
    b: CapturedStart
    code: SourceChanges | None
    files: tuple[FileDiff, ...]
    configs: tuple[FileDiff, ...]
    captured: Mapping[str, tuple[str, str]]


def difference(a: str, b: str, stack: ExitStack, runs: str | None = None) -> Difference:
    """Compare two launches; raises the errors of `start_of`."""
    one, other = start_of(a, stack, runs), start_of(b, stack, runs)
    captured = dict(captured_otherwise(one.captured, other.captured))
    code: SourceChanges | None = None
    files: tuple[FileDiff, ...] = ()
    if one.archive is not None and other.archive is not None:
        code = changes(of_manifest(one.archive.manifest), of_manifest(other.archive.manifest))
        files = tuple(file_diffs(code, _reader(one.archive), _reader(other.archive)))
    before, after = ({f"config/{name}": data for name, data in it.config.items()} for it in (one, other))
    found = changes(*({name: data.hex() for name, data in texts.items()} for texts in (before, after)))
    configs = tuple(file_diffs(found, before.__getitem__, after.__getitem__))
    return Difference(one, other, code, files, configs, captured)


def start_of(text: str, stack: ExitStack, runs: str | None = None) -> CapturedStart:
    """Read the record of a launch, `RUN` (the newest) or `RUN#2`; the stack closes its archive."""
    path, number = _split(text)
    run = find_run(path, runs).path
    found = captures(run)
    if not found:
        raise UsageError(f"{path} has no records of its launches; it was created without them")
    chosen = [one for one in found if number is None or one["number"] == number]
    if not chosen:
        there = ", ".join(str(one["number"]) for one in found)
        raise UsageError(f"{path} has no launch {number}; known are {there}")
    code_id = code_id_of(chosen[-1])
    archive = None if code_id is None else stack.enter_context(open_archive(run / "code" / f"{code_id}.zip"))
    return CapturedStart(text, chosen[-1], archive, config_texts(run, chosen[-1]))


def _split(text: str) -> tuple[str, int | None]:
    path, mark, number = text.rpartition("#")
    if mark and number.isdecimal() and number.isascii() and not Path(text).exists():
        return path, int(number)
    return text, None


def _reader(archive: Archive) -> Any:
    links = archive.manifest.links
    return lambda name: f"link to {links[name]}\n".encode() if name in links else archive.read(name)


def captured_otherwise(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield captured values that differ; of dictionaries only the differing entries."""
    for name in _COMPARED:
        before, after = a.get(name), b.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            for key in sorted(before.keys() | after.keys()):
                if before.get(key) != after.get(key):
                    yield f"{name} {key}", _words(before.get(key), after.get(key))
        elif before != after:
            yield name, (_word(before), _word(after))


def _words(before: Any, after: Any) -> tuple[str, str]:
    """Shorten both values; of two dictionaries, such as ranks by host, keep what differs."""
    if not (isinstance(before, dict) and isinstance(after, dict)):
        return _word(before), _word(after)
    keys = [key for key in dict.fromkeys([*before, *after]) if before.get(key) != after.get(key)]
    return _entries(before, keys), _entries(after, keys)


def _entries(value: Mapping[str, Any], keys: Sequence[str]) -> str:
    found = [f"{key}={_word(value[key])}" for key in keys if key in value]
    more = [f"{len(found) - _SHOWN} more"] if found[_SHOWN:] else []
    return ", ".join([*found[:_SHOWN], *more]) or "none"


def _word(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    if isinstance(value, dict):
        return f"{len(value)} entries"
    return "none" if value is None else str(value)


_CONFIG = "config/resolved.yaml"
_IDENTITY = ("job", "uuid", "created", "world_size", "python", "command", "best")
_STATUS = ("state", "epoch", "attempt", "updated")
Facts = dict[str, Any]


@verb(
    "compare runs side by side: identity, configuration, epochs, metrics, times",
    RUNS,
    flag("--only-changed", "hide rows that are equal in all runs"),
)
def compare(chosen: argparse.Namespace, output: Output) -> int:
    """Compare the metadata of runs; reads only the manifest of the newest epoch of each."""
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


def _facts(place: RunLocation) -> Facts:
    run = place.run
    if run is None:
        raise UsageError(f"{place.where} holds checkpoints but no run (run.json); use torchrelay ckpt diff")
    identity, status = run.known_identity(), run.known_status()
    facts = {name: identity[name] for name in _IDENTITY if name in identity}
    facts |= {name: status[name] for name in _STATUS if name in status}
    line = place.log().line()
    whole = [entry.position.epoch for entry in line if entry.position.boundary]
    facts |= {"epochs kept": len(whole), "newest epoch": whole[-1] if whole else None}
    for entry in reversed(line):  # the newest readable manifest
        with suppress(OSError):
            known = glance(place.storage, entry).facts
            facts |= {"trained secs": known.elapsed_secs, "steps": known.total_steps, "seed": known.seed}
            break
    facts |= _metrics(run.metrics(), place.best)
    path = run.path / _CONFIG
    if not path.exists():
        return facts
    from torchrelay.jobs.config.yaml_reader import read_yaml_file  # imports yaml, which few runs need

    return {**facts, **dict(_flat("config", read_yaml_file(path).value))}


def _metrics(lines: Sequence[Mapping[str, Any]], best: Best | None) -> Facts:
    final = metrics_of(lines[-1]) if lines else {}
    found: Facts = {f"final {name}": finite(value) for name, value in sorted(final.items())}
    if best is not None and (winner := best_of(lines, best)) is not None:
        found[f"best {best[0]}"], found["best epoch"] = winner
    return found


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


_STYLES = {"+": "proved", "-": "damaged"}


@verb(
    "show how source, configuration and environment differ between two runs",
    arg("a", "run directory or run id; A#2 is its second launch", "A"),
    arg("b", "another run, or another launch of the same run", "B"),
    LIBRARY,
    flag("--stat", "print only file names and line counts"),
)
def diff(chosen: argparse.Namespace, output: Output) -> int:
    """Print the differences of B relative to A."""
    with ExitStack() as stack:
        found = difference(chosen.a, chosen.b, stack, chosen.runs)
    if output.json:
        output.value(difference_json(found, stat=chosen.stat))
    else:
        say_difference(output, found, stat=chosen.stat)
    return 0


def say_difference(output: Output, found: Difference, *, stat: bool) -> None:
    """Print source, configuration and environment, in this order; `stat` omits the lines of files."""
    a, b = (
        start.archive.code_id[:SHORT] if start.archive is not None else "none" for start in (found.a, found.b)
    )
    if found.code is None:
        for start in (found.a, found.b):
            if start.archive is None:
                code = start.captured.get("code")
                why = code.get("why") if isinstance(code, dict) else None
                output.line(f"the source of {start.text} was not archived: {why or 'unknown reason'}")
    elif not found.code:
        output.line(f"code {a}: the same")
    else:
        changed, added, removed = map(len, (found.code.changed, found.code.added, found.code.removed))
        output.line(f"code {a} -> {b}: {changed} changed, {added} added, {removed} removed")
    for one in (*found.files, *found.configs):
        came, went = one.counts
        if stat or one.lines is None:
            how = "binary" if one.lines is None else f"+{came} -{went}"
            output.line(f"  {one.name}  {how}")
            continue
        for line in one.lines:
            output.line(line, _STYLES.get(line[:1]), tabs=True)
    for name, (before, after) in found.captured.items():
        output.line(f"{name}: {before} -> {after}")
    if not (found.code or found.configs or found.captured):
        what = "no other recorded differences" if found.code is None else "no recorded differences"
        output.line(what)


def difference_json(found: Difference, *, stat: bool) -> dict[str, Any]:
    """Return the object of `runs diff --json`."""

    def of(one: FileDiff) -> dict[str, Any]:
        came, went = one.counts
        text = None if stat or one.lines is None else "\n".join(one.lines)
        return {"name": one.name, "added_lines": came, "removed_lines": went, "diff": text}

    a, b, code = found.a, found.b, found.code
    source = None if code is None else {"added": code.added, "changed": code.changed, "removed": code.removed}
    return {
        "a": {"run": a.text, "attempt": a.captured["number"], "code_id": code_id_of(a.captured)},
        "b": {"run": b.text, "attempt": b.captured["number"], "code_id": code_id_of(b.captured)},
        "code": source,
        "files": [of(one) for one in found.files],
        "config": [of(one) for one in found.configs],
        "captured": {name: {"a": before, "b": after} for name, (before, after) in found.captured.items()},
    }
