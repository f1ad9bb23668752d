"""argparse, as this command line wants it: a mistake is one line with what was probably meant.

Names after options are taken, too: `tag RUN --delete NAME` means what `tag --delete RUN NAME` does.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from torchrelay.errors import UsageError


class Parser(argparse.ArgumentParser):
    """Raises UsageError instead of printing how a verb is used and leaving."""

    _taking = False

    def error(self, message: str) -> NoReturn:
        """One line; what the verb takes is a question of its own."""
        raise UsageError(f"{message} ({self.prog} --help)")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does, but a name that may be missing is also found behind an option."""
        if self._taking or all(action.nargs != "?" for action in self._get_positional_actions()):
            return super().parse_known_args(args, namespace)
        self._taking = True  # what follows comes back here
        try:
            return super().parse_known_intermixed_args(args, namespace)
        finally:
            self._taking = False

    def refuse(self, left: Sequence[str]) -> NoReturn:
        """Words that mean nothing to this verb: raises UsageError with what there is instead."""
        word = left[0].partition("=")[0]
        if word.startswith("-"):
            options = [name for action in self._actions for name in action.option_strings]
            self.error(f"{self._verb} has no option {word}{_meant(word, options)}")
        takes = " ".join(str(action.metavar or action.dest) for action in self._get_positional_actions())
        self.error(f"{self._verb} takes {takes or 'options alone'}: what is {left[0]!r} for?")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """The verb, or a word out of some: what is none of these is told with the nearest."""
        if not isinstance(action, argparse._SubParsersAction):
            super()._check_value(action, value)
        elif value not in action.choices:
            typed = " ".join([*self.prog.split()[1:], str(value)])
            self.error(f"there is no verb {typed!r}{_meant(str(value), list(_verbs(self)))}")

    @property
    def _verb(self) -> str:
        return " ".join(self.prog.split()[1:]) or self.prog


def _verbs(parser: argparse.ArgumentParser, before: str = "") -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, one in action.choices.items():
                yield f"{before}{name}"
                yield from _verbs(one, f"{before}{name} ")


def _meant(word: str, known: Sequence[str]) -> str:
    """What has this word as its last one, or is written like it."""
    from difflib import get_close_matches

    found = [one for one in known if one.split()[-1] == word] or get_close_matches(
        word, known, n=2, cutoff=0.7
    )
    return f"; did you mean {' or '.join(found)}?" if found else ""
