"""The few options that a training program understands by itself."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from difflib import get_close_matches

from torchrelay.errors import UsageError
from torchrelay.runners.choosing import Resume
from torchrelay.runners.ending.time_limits import seconds_of

_EPOCH = "--resume-from-epoch"
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


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise UsageError(message)


def parse_options(argv: list[str] | None) -> Options:
    """Read the known options; others belong to the program, but a rewind mistyped is refused.

    `--help` comes here only where the program does not answer it; it prints the options and ends.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--help", action="help", help="show this and train nothing")
    parser.add_argument(
        _EPOCH, dest="epoch", metavar="N", type=_epoch, help="rewind: continue from epoch N on a new branch"
    )
    parser.add_argument("--again", action="store_true", help="rewind anew where the same request did already")
    parser.add_argument(
        "--resume",
        choices=("auto", "must", "never"),
        help="continue if there is something (auto), only then (must), or begin anew (never)",
    )
    parser.add_argument(
        "--time-limit",
        dest="limit",
        metavar="T",
        type=_limit,
        help="leave in time before T (seconds, or 1h30m) to be continued by the same command",
    )
    parser.add_argument(
        "--max-attempts",
        dest="attempts",
        metavar="N",
        type=_count,
        help="give up after N starts that got no further; 0 for no limit",
    )
    known, others = parser.parse_known_args(argv)
    _check_others(others, [option for action in parser._actions for option in action.option_strings])
    return Options(known.epoch, known.again, known.resume, known.limit, known.attempts)


def _check_others(others: list[str], ours: list[str]) -> None:
    """What looks like a rewind is refused; of others a line asks, for they may be the program's own."""
    for word in others:
        option = word.partition("=")[0]
        for meant in get_close_matches(option, ours, n=1, cutoff=_MISTYPED):
            question = f"there is no option {option:.80}; did you mean {meant}?"
            if meant == _EPOCH:
                raise UsageError(question)
            print(f"torchrelay: {question}", file=sys.stderr)


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
