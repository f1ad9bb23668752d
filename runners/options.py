"""The few options that a training program understands by itself, beside its own.

They come from the command line and from TORCHRELAY_ARGS. What a parser of the program has read is the
program's alone: of these options the command line gives none to us, and TORCHRELAY_ARGS does.
"""

from __future__ import annotations

import argparse
import gc
import os
import shlex
import sys
from difflib import get_close_matches
from typing import Any

from torchrelay.errors import UsageError
from torchrelay.records import dataclass
from torchrelay.runners.choosing import Resume
from torchrelay.runners.session.stop_requests import seconds_of

_EPOCH = "--resume-from-epoch"
_VARIABLE = "TORCHRELAY_ARGS"
_MISTYPED = 0.88
"""How alike an unknown option must be to one of ours to be taken for it."""


@dataclass(frozen=True)
class Options:
    """What the command line of `JobRunner.main` asked for."""

    epoch: int | None = None
    again: bool = False
    resume: Resume | None = None
    time_limit_secs: float | None = None
    max_attempts: int | None = None
    """0: no limit; None: as the program says."""


class _Found(argparse.Namespace):
    """What is ours."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise UsageError(message)


def parse_options(argv: list[str] | None, rewinds: bool = False) -> Options:
    """Read the known options; others belong to the program, but a rewind mistyped is refused.

    `--help` comes here only where the program does not answer it; it prints the options and ends. `argv` is
    the command line without the program's name; None: that of this process. `rewinds`: the program itself
    has given an epoch to go back to.
    """
    read = _read_by_the_program()
    found = _Found()
    for words, theirs in ((shlex.split(os.environ.get(_VARIABLE, "")), frozenset[str]()), (argv, read)):
        parser = _Parser(add_help=False, allow_abbrev=False, epilog=f"They may stand in {_VARIABLE}, too.")
        ours = {option: how for option, how in _OPTIONS.items() if _name(option) not in theirs}
        for option, how in ours.items():
            parser.add_argument(option, **how)
        found, others = parser.parse_known_args(words, found)
        _check_others([word for word in others if _name(word.partition("=")[0]) not in theirs], list(ours))
        if not rewinds and getattr(found, _name(_EPOCH), None) is None:
            _check_taken(others)
    known = {_name(option): getattr(found, _name(option), None) for option in _OPTIONS}
    return Options(
        known["resume_from_epoch"],
        bool(known["again"]),
        known["resume"],
        known["time_limit"],
        known["max_attempts"],
    )


def _read_by_the_program() -> frozenset[str]:
    """The names of all options that the program has read by argparse: it keeps them in a Namespace."""
    kept = [one for one in gc.get_objects() if type(one) is argparse.Namespace]
    return frozenset(name for one in kept for name in vars(one))


def _name(option: str) -> str:
    return option.lstrip("-").replace("-", "_")


def _check_others(others: list[str], ours: list[str]) -> None:
    """What looks like a rewind is refused; of others a line asks, for they may be the program's own."""
    for word in others:
        option = word.partition("=")[0]
        for meant in get_close_matches(option, ours, n=1, cutoff=_MISTYPED):
            question = f"there is no option {option:.80}; did you mean {meant}?"
            if meant == _EPOCH:
                raise UsageError(question)
            print(f"torchrelay: {question}", file=sys.stderr)


def _check_taken(others: list[str]) -> None:
    """A rewind that the program's own parser has taken, and that nothing was made of, is told."""
    if any(word.partition("=")[0] == _EPOCH for word in others):
        print(
            f"torchrelay: {_EPOCH} belongs to the parser of this program, so nothing is rewound: take "
            "the option out of the parser and call parse_known_args(), or give "
            "JobRunner(..., resume_from_epoch=...)",
            file=sys.stderr,
        )


def _limit(text: str) -> float:
    try:
        return seconds_of(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 6):
        raise argparse.ArgumentTypeError(
            f"{text!r:.40} is not a number of starts: write a whole number from 0"
        )
    return int(text)


def _epoch(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 8):
        raise argparse.ArgumentTypeError(f"{text!r:.40} is not an epoch: write a whole number from 0")
    return int(text)


_OPTIONS: dict[str, dict[str, Any]] = {
    "--help": {"action": "help", "help": "show this and train nothing"},
    _EPOCH: {"metavar": "N", "type": _epoch, "help": "rewind: continue from epoch N on a new branch"},
    "--again": {"action": "store_true", "help": "rewind anew where the same request did already"},
    "--resume": {
        "choices": ("auto", "must", "never"),
        "help": "continue if there is something (auto), only then (must), or begin anew (never)",
    },
    "--time-limit": {
        "metavar": "T",
        "type": _limit,
        "help": "leave in time before T (seconds, or 1h30m) to be continued by the same command",
    },
    "--max-attempts": {
        "metavar": "N",
        "type": _count,
        "help": "give up after N starts that got no further; 0 for no limit",
    },
}
