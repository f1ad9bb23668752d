"""`torchrelay runs diff`: how source, configuration and surroundings of two runs differ."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrelay.errors import UsageError
from torchrelay.metadata.capture import captures, code_id_of, config_texts
from torchrelay.metadata.code.archive import Archive, open_archive
from torchrelay.metadata.code.changes import Changes, FileDiff, changes, file_diffs
from torchrelay.metadata.code.manifest import SHORT
from torchrelay.metadata.code.snapshot import of_manifest
from torchrelay.runners.commands.command_line_arguments import Add
from torchrelay.runners.commands.command_line_output import Output
from torchrelay.runners.commands.command_line_place import locate_run

_COMPARED = ("argv", "python", "torch", "world", "packages", "config_id", "overrides", "platform")
_STYLES = {"+": "proved", "-": "damaged"}


def add_runs_diff(add: Add) -> None:
    """Define `runs diff`."""
    parser = add("diff", "show what differs between two runs: source, configuration, surroundings", diff)
    parser.add_argument("a", metavar="A", help="a run directory; A#2 is what its start 2 was")
    parser.add_argument("b", metavar="B", help="another one, or another start of the same")
    parser.add_argument("--stat", action="store_true", help="names and counts of lines only")


@dataclass(frozen=True)
class Start:
    """One start of a run: what was captured, its archive where there is one, its configuration's texts."""

    text: str
    captured: Mapping[str, Any]
    archive: Archive | None
    config: Mapping[str, bytes]


def diff(chosen: argparse.Namespace, output: Output) -> int:
    """Print differences, B's against A's."""
    with ExitStack() as stack:
        a, b = _start(chosen.a, stack), _start(chosen.b, stack)
        found = _code_changes(a, b)
        files = list(_code_diffs(a, b, found)) if found else []
        configs = list(_config_diffs(a, b))
    facts = dict(_facts(a.captured, b.captured))
    if output.json:
        output.value(_json(a, b, found, files, configs, facts, stat=chosen.stat))
        return 0
    _say_code(output, a, b, found)
    for one in (*files, *configs):
        _say_file(output, one, stat=chosen.stat)
    for name, (before, after) in facts.items():
        output.line(f"{name}: {before} -> {after}")
    if not (found or configs or facts):
        output.line("nothing else that was recorded differs" if found is None else "nothing recorded differs")
    return 0


def _start(text: str, stack: ExitStack) -> Start:
    path, number = _split(text)
    run = locate_run(path).path
    found = captures(run)
    if not found:
        raise UsageError(f"{path} has no record of what its starts were: it was made without one")
    chosen = [one for one in found if number is None or one["number"] == number]
    if not chosen:
        raise UsageError(f"{path} has no start {number}; there are {_numbers(found)}")
    code_id = code_id_of(chosen[-1])
    archive = None if code_id is None else stack.enter_context(open_archive(run / "code" / f"{code_id}.zip"))
    return Start(text, chosen[-1], archive, config_texts(run, chosen[-1]))


def _split(text: str) -> tuple[str, int | None]:
    path, mark, number = text.rpartition("#")
    if mark and number.isdecimal() and number.isascii() and not Path(text).exists():
        return path, int(number)
    return text, None


def _numbers(found: list[dict[str, Any]]) -> str:
    return ", ".join(str(one["number"]) for one in found)


def _code_changes(a: Start, b: Start) -> Changes | None:
    """None where one of them has no archive."""
    if a.archive is None or b.archive is None:
        return None
    return changes(of_manifest(a.archive.manifest), of_manifest(b.archive.manifest))


def _code_diffs(a: Start, b: Start, found: Changes) -> Iterator[FileDiff]:
    if a.archive is None or b.archive is None:
        return iter(())
    return file_diffs(found, _reader(a.archive), _reader(b.archive))


def _reader(archive: Archive) -> Any:
    links = archive.manifest.links
    return lambda name: f"link to {links[name]}\n".encode() if name in links else archive.read(name)


def _config_diffs(a: Start, b: Start) -> Iterator[FileDiff]:
    texts = [{f"config/{name}": data for name, data in one.config.items()} for one in (a, b)]
    found = changes(*({name: data.hex() for name, data in one.items()} for one in texts))
    return file_diffs(found, texts[0].__getitem__, texts[1].__getitem__)


def _facts(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, str]]]:
    """What was captured otherwise; of dictionaries only the entries that differ."""
    for name in _COMPARED:
        before, after = a.get(name), b.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            for key in sorted(before.keys() | after.keys()):
                if before.get(key) != after.get(key):
                    yield f"{name} {key}", (_word(before.get(key)), _word(after.get(key)))
        elif before != after:
            yield name, (_word(before), _word(after))


def _word(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    if isinstance(value, dict):
        return f"{len(value)} entries"
    return "none" if value is None else str(value)


def _say_code(output: Output, a: Start, b: Start, found: Changes | None) -> None:
    if found is None:
        for one in (a, b):
            if one.archive is None:
                code = one.captured.get("code")
                why = code.get("why") if isinstance(code, dict) else None
                output.line(f"the source of {one.text} was not archived: {why or 'not said why'}")
    elif not found:
        output.line(f"code {_short(a)}: the same")
    else:
        counts = f"{len(found.changed)} changed, {len(found.added)} added, {len(found.removed)} removed"
        output.line(f"code {_short(a)} -> {_short(b)}: {counts}")


def _short(start: Start) -> str:
    return start.archive.code_id[:SHORT] if start.archive is not None else "none"


def _say_file(output: Output, one: FileDiff, *, stat: bool) -> None:
    came, went = one.counts
    if stat or one.lines is None:
        how = "no text" if one.lines is None else f"+{came} -{went}"
        output.line(f"  {one.name}  {how}")
        return
    for line in one.lines:
        output.line(line, _STYLES.get(line[:1]), tabs=True)


def _json(
    a: Start,
    b: Start,
    found: Changes | None,
    files: list[FileDiff],
    configs: list[FileDiff],
    facts: Mapping[str, tuple[str, str]],
    *,
    stat: bool,
) -> dict[str, Any]:
    def of(one: FileDiff) -> dict[str, Any]:
        came, went = one.counts
        text = None if stat or one.lines is None else "\n".join(one.lines)
        return {"name": one.name, "added_lines": came, "removed_lines": went, "diff": text}

    return {
        "a": {"run": a.text, "attempt": a.captured["number"], "code_id": code_id_of(a.captured)},
        "b": {"run": b.text, "attempt": b.captured["number"], "code_id": code_id_of(b.captured)},
        "code": None
        if found is None
        else {"added": found.added, "changed": found.changed, "removed": found.removed},
        "files": [of(one) for one in files],
        "config": [of(one) for one in configs],
        "captured": {name: {"a": before, "b": after} for name, (before, after) in facts.items()},
    }
