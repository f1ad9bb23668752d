"""How two starts of runs differ: source, configuration, what was captured besides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torchrelay.errors import UsageError
from torchrelay.metadata.code.archive import Archive, Changes, FileDiff, changes, file_diffs, open_archive
from torchrelay.metadata.code.capture import captures, code_id_of, config_texts
from torchrelay.metadata.code.snapshot import of_manifest
from torchrelay.records import dataclass
from torchrelay.runners.commands.run_library import find_run

_COMPARED = ("argv", "python", "torch", "world", "packages", "config_id", "overrides", "platform")
_SHOWN = 3


@dataclass(frozen=True)
class Start:
    """One start of a run: what was captured, its archive where there is one, its configuration's texts."""

    text: str
    captured: Mapping[str, Any]
    archive: Archive | None
    config: Mapping[str, bytes]


@dataclass(frozen=True)
class Difference:
    """What differs of B against A. `code` is None where one of them has no archive."""

    a: Start
    b: Start
    code: Changes | None
    files: tuple[FileDiff, ...]
    configs: tuple[FileDiff, ...]
    captured: Mapping[str, tuple[str, str]]


def difference(a: str, b: str, stack: ExitStack, runs: str | None = None) -> Difference:
    """Compare two starts; raises what `start_of` does."""
    one, other = start_of(a, stack, runs), start_of(b, stack, runs)
    found = code_changes(one, other)
    files = tuple(code_diffs(one, other, found)) if found else ()
    captured = dict(captured_otherwise(one.captured, other.captured))
    return Difference(one, other, found, files, tuple(config_diffs(one, other)), captured)


def start_of(text: str, stack: ExitStack, runs: str | None = None) -> Start:
    """What a start of a run was, `RUN` or `RUN#2`; the archive stays open with the stack.

    Raises UsageError for what is no run, or has no such record.
    """
    path, number = _split(text)
    run = find_run(path, runs).path
    found = captures(run)
    if not found:
        raise UsageError(f"{path} has no record of what its starts were: it was made without one")
    chosen = [one for one in found if number is None or one["number"] == number]
    if not chosen:
        raise UsageError(f"{path} has no start {number}; it has {_numbers(found)}")
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


def code_changes(a: Start, b: Start) -> Changes | None:
    """None where one of them has no archive."""
    if a.archive is None or b.archive is None:
        return None
    return changes(of_manifest(a.archive.manifest), of_manifest(b.archive.manifest))


def code_diffs(a: Start, b: Start, found: Changes) -> Iterator[FileDiff]:
    """The files that differ, line by line."""
    if a.archive is None or b.archive is None:
        return iter(())
    return file_diffs(found, _reader(a.archive), _reader(b.archive))


def _reader(archive: Archive) -> Any:
    links = archive.manifest.links
    return lambda name: f"link to {links[name]}\n".encode() if name in links else archive.read(name)


def config_diffs(a: Start, b: Start) -> Iterator[FileDiff]:
    """The texts of the two configurations, where they differ."""
    texts = [{f"config/{name}": data for name, data in one.config.items()} for one in (a, b)]
    found = changes(*({name: data.hex() for name, data in one.items()} for one in texts))
    return file_diffs(found, texts[0].__getitem__, texts[1].__getitem__)


def captured_otherwise(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, str]]]:
    """What was captured otherwise; of dictionaries only the entries that differ."""
    for name in _COMPARED:
        before, after = a.get(name), b.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            for key in sorted(before.keys() | after.keys()):
                if before.get(key) != after.get(key):
                    yield f"{name} {key}", _words(before.get(key), after.get(key))
        elif before != after:
            yield name, (_word(before), _word(after))


def _words(before: Any, after: Any) -> tuple[str, str]:
    """Both in short; of two dictionaries, such as ranks by host, what differs."""
    if not (isinstance(before, dict) and isinstance(after, dict)):
        return _word(before), _word(after)
    keys = [key for key in dict.fromkeys([*before, *after]) if before.get(key) != after.get(key)]
    return _entries(before, keys), _entries(after, keys)


def _entries(value: Mapping[str, Any], keys: Sequence[str]) -> str:
    told = [f"{key}={_word(value[key])}" for key in keys if key in value]
    more = [f"{len(told) - _SHOWN} more"] if told[_SHOWN:] else []
    return ", ".join([*told[:_SHOWN], *more]) or "none"


def _word(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    if isinstance(value, dict):
        return f"{len(value)} entries"
    return "none" if value is None else str(value)
