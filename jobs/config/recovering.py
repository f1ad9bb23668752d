"""Reading on behind a line that is no YAML, so that one report has what is wrong in the rest, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torchrelay.jobs.config.problems import ConfigProblem, Origin, Source
from torchrelay.jobs.config.tree import Tree
from torchrelay.jobs.yaml_text import (
    NO_MAPPING,
    TOLD_WITH_REMEDY,
    Findings,
    Place,
    Problem,
    read_findings,
)
from torchrelay.records import dataclass

_TRIES = 4
_NEAR = 10
"""Lines above a mistake among which a quote that was not closed is looked for."""


@dataclass(frozen=True)
class Recovered:
    """`tree` is None where nothing can be told of the rest.

    `whole`: nothing was left out, so what is missing in the tree is missing in the file.
    """

    tree: Tree | None
    problems: list[ConfigProblem]
    whole: bool


def recovered(data: bytes, name: str) -> Recovered:
    """Read a file. Where the syntax breaks, its line is left out and the rest is read, if that mends it."""
    source = Source(name, tuple(data.decode("utf-8", "replace").split("\n")))
    found, left_out = _mended(data)
    problems = [*found.problems, *left_out]
    if not isinstance(found.top, dict) or found.ended is not None:
        if not problems:
            problems.append(Problem(Place(1, 1), NO_MAPPING))
        return Recovered(None, _told(problems, source), False)
    origins = {where: Origin(source, place) for where, place in found.values.items()}
    keys = {where: Origin(source, place) for where, place in found.keys.items()}
    tree = Tree(found.top, origins, keys, found.broken)
    return Recovered(tree, _told(problems, source), not left_out)


def _mended(data: bytes) -> tuple[Findings, list[Problem]]:
    """What was read once the lines that break the syntax were left out, and these; else the first attempt."""
    first = found = read_findings(data)
    left_out: list[Problem] = []
    lines = data.split(b"\n")
    for _ in range(_TRIES):
        if found.ended is None:
            return found, left_out
        at = found.ended.line - 1
        if at >= len(lines) or not lines[at].strip():
            break  # the end of the file, or a line that was left out already
        left_out += [_with_remedy(one, lines, at) for one in found.problems if one.place == found.ended]
        lines[at] = b""
        found = read_findings(b"\n".join(lines))
    return (found, left_out) if found.ended is None else (_first_with_remedy(first, data), [])


def _first_with_remedy(found: Findings, data: bytes) -> Findings:
    """What was found first, where leaving out lines did not help: its end says what to do, too."""
    lines = data.split(b"\n")
    at = found.ended.line - 1 if found.ended is not None else len(lines)
    if at >= len(lines) or not lines[at].strip():
        return found
    told = [_with_remedy(one, lines, at) if one.place == found.ended else one for one in found.problems]
    return replace(found, problems=tuple(told))


def _with_remedy(problem: Problem, lines: Sequence[bytes], at: int) -> Problem:
    remedy, line = "look at the indentation and the quotes of this line", lines[at]
    if any(text in problem.message for text in TOLD_WITH_REMEDY):
        return problem
    first = max(0, at - _NEAR)
    odd = [first + up for up, one in enumerate(lines[first : at + 1]) if one.count(b'"') % 2]
    if odd:
        remedy = f"line {odd[0] + 1} has a quote without its other one"
    elif b"{workspace}" in line:
        remedy = 'a text that begins with a brace needs quotes, such as "{workspace}/model.py"'
    elif b"\t" in line:
        remedy = "put spaces in place of the tab"
    return Problem(problem.place, f"{problem.message}: {remedy}")


def _told(problems: list[Problem], source: Source) -> list[ConfigProblem]:
    return [ConfigProblem(Origin(source, one.place), "", one.message) for one in problems]
