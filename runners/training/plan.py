"""What a train call is given and gives back: where it starts, options, models made anew, the result.

Where it starts:

    user's handler  >  user's epoch  >  newest provable position of the current branch

An explicit epoch rewinds, unless the current branch was begun by the same request in an earlier
process and its epochs are not over: then the same command continues that branch, so that an
epoch written into a script survives crashes and restarts.

Options come from the command line and from TORCHRELAY_ARGS. What a parser of the program has read is the
program's alone: of these options the command line gives none to us, and TORCHRELAY_ARGS does.
"""

from __future__ import annotations

import argparse
import gc
import operator
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path, PurePosixPath
from signal import Signals
from typing import Any, Literal

from torchrelay.checkpoint.format.position import MAX_EPOCH
from torchrelay.errors import NoProvableEpochError, UsageError
from torchrelay.records import dataclass
from torchrelay.runners.monitoring.text import EVERY_SECS
from torchrelay.runners.session.stop_requests import seconds_typed

Resume = Literal["auto", "must", "never"]


@dataclass(frozen=True)
class ResumeRequest:
    """What was asked for.

    `epoch` is the user's or the handler's; `decided` says that somebody decided, so that an epoch
    of None means "from scratch" and not "look yourself". `automatic` is true for run directories.
    """

    epoch: int | None = None
    decided: bool = False
    resume: Resume = "auto"
    automatic: bool = True
    again: bool = False
    process: str = ""


@dataclass(frozen=True)
class Past:
    """What the log says: whether anything was committed, how the current branch began, whether it is over.

    `told_of` is the newest epoch that the run directory tells of as saved; None where it tells of none.
    """

    commits: bool = False
    told_of: int | None = None
    branch_request: Mapping[str, Any] | None = None
    epochs_over: bool = False


@dataclass(frozen=True)
class Choice:
    """How to start: `fresh`, `explicit` at `epoch`, or `newest`; `rewind` begins a new branch first."""

    start: Literal["fresh", "explicit", "newest"]
    epoch: int | None = None
    rewind: bool = False
    reason: str = ""


def choose(wish: ResumeRequest, past: Past) -> Choice:
    """Decide; raises UsageError for an impossible wish.

    NoProvableEpochError for `must` without commits, and for a start that would begin anew although an epoch
    was saved: a file system may not be mounted.
    """
    if wish.epoch is not None and wish.resume != "never":
        begun = past.branch_request
        same = begun is not None and begun.get("epoch") == wish.epoch and begun.get("process") != wish.process
        if same and not wish.again and not past.epochs_over:
            return Choice(
                "newest",
                reason=f"the current branch was begun by the same request for epoch {wish.epoch}; "
                "--again rewinds once more",
            )
        return Choice("explicit", epoch=wish.epoch, rewind=True, reason=f"epoch {wish.epoch} was asked for")
    if wish.epoch is not None:
        raise UsageError(f"resume='never' contradicts the request for epoch {wish.epoch}: give one of them")
    if wish.resume == "must" and not past.commits:
        raise NoProvableEpochError(
            "resume='must' and nothing was ever committed here: check the directory, or use resume='auto'"
        )
    if wish.automatic and wish.resume == "auto" and past.told_of is not None and not past.commits:
        raise NoProvableEpochError(
            f"the run tells of epoch {past.told_of} as saved, and its checkpoints hold no epoch: if they "
            "were moved or are not mounted, bring them back; to begin anew give resume='never' "
            "(--resume never)"
        )
    from_scratch = wish.decided or wish.resume == "never" or not (wish.automatic or wish.resume == "must")
    if from_scratch or not past.commits:
        why = "a fresh start in a used directory" if past.commits else "nothing was committed yet"
        return Choice("fresh", rewind=past.commits, reason=why)
    return Choice("newest", reason="the newest one")


def check_epoch(value: object, name: str = "resume_from_epoch") -> int | None:
    """Accept None or a whole number from 0; numpy's integers too. Raises UsageError otherwise."""
    if value is None:
        return None
    try:
        epoch = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(f"{name} must be a whole number or None, not {value!r:.80}") from None
    if isinstance(value, bool):
        raise UsageError(f"{name} must be a whole number or None, not {value}")
    if abs(epoch) > MAX_EPOCH:  # not shown: Python refuses to write out very long numbers
        raise UsageError(f"{name} is beyond any epoch: they are numbered from 0 to {MAX_EPOCH}")
    if epoch < 0:
        raise UsageError(f"{name} is {epoch}; epochs start at 0, the state after init")
    return epoch


_EPOCH = "--resume-from-epoch"
_VARIABLE = "TORCHRELAY_ARGS"
_MISTYPED = 0.88
"""How alike an unknown option must be to one of ours to be taken for it."""


@dataclass(frozen=True)
class RunnerOptions:
    """What the command line of `JobRunner.main` asked for."""

    epoch: int | None = None
    again: bool = False
    resume: Resume | None = None
    time_limit_secs: float | None = None
    max_attempts: int | None = None
    """0: no limit; None: as the program says."""


class _ParsedOptions(argparse.Namespace):
    """What is ours."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise UsageError(message)


def parse_options(argv: list[str] | None, rewinds: bool = False) -> RunnerOptions:
    """Read the known options; others belong to the program, but a rewind mistyped is refused.

    `--help` comes here only where the program does not answer it; it prints the options and ends. `argv` is
    the command line without the program's name; None: that of this process. `rewinds`: the program itself
    has given an epoch to go back to.
    """
    # a parser of the program keeps what it has read in a Namespace
    kept = [one for one in gc.get_objects() if type(one) is argparse.Namespace]
    read = frozenset(name for one in kept for name in vars(one))
    found = _ParsedOptions()
    for words, theirs in ((shlex.split(os.environ.get(_VARIABLE, "")), frozenset[str]()), (argv, read)):
        parser = _Parser(add_help=False, allow_abbrev=False, epilog=f"They may stand in {_VARIABLE}, too.")
        ours = {option: how for option, how in _OPTIONS.items() if _name(option) not in theirs}
        for option, how in ours.items():
            parser.add_argument(option, **how)
        found, others = parser.parse_known_args(words, found)
        _check_others([word for word in others if _name(word.partition("=")[0]) not in theirs], list(ours))
        taken = any(word.partition("=")[0] == _EPOCH for word in others)
        if taken and not rewinds and getattr(found, "epoch", None) is None:  # nothing was made of it
            print(
                f"torchrelay: {_EPOCH} belongs to the parser of this program, so nothing is rewound: take "
                "the option out of the parser and call parse_known_args(), or give "
                "JobRunner(..., resume_from_epoch=...)",
                file=sys.stderr,
            )
    return RunnerOptions(**vars(found))


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


def _whole_number(what: str, digits: int, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= digits):
        raise argparse.ArgumentTypeError(f"{text!r:.40} is not {what}: write a whole number from 0")
    return int(text)


_OPTIONS: dict[str, dict[str, Any]] = {
    "--help": {"action": "help", "help": "show this and train nothing"},
    _EPOCH: {
        "dest": "epoch",
        "metavar": "N",
        "type": partial(_whole_number, "an epoch", 8),
        "help": "rewind: continue from epoch N on a new branch",
    },
    "--again": {"action": "store_true", "help": "rewind anew where the same request did already"},
    "--resume": {
        "choices": ("auto", "must", "never"),
        "help": "continue if there is something (auto), only then (must), or begin anew (never)",
    },
    "--time-limit": {
        "dest": "time_limit_secs",
        "metavar": "T",
        "type": seconds_typed,
        "help": "leave in time before T (seconds, or 1h30m) to be continued by the same command",
    },
    "--max-attempts": {
        "metavar": "N",
        "type": partial(_whole_number, "a number of starts", 6),
        "help": "give up after N starts that got no further; 0 for no limit",
    },
}


OnCrash = Literal["save", "none"]


@dataclass(frozen=True)
class Plan:
    """What the user fixed about the run as a whole."""

    resume: Resume = "auto"
    best: tuple[str, str] | None = None
    save_initial: bool = True
    max_failed_saves: int | None = None
    agree_every: int = 1
    time_limit_secs: float | None = None
    max_attempts: int | None = None
    log_every_n_secs: float = EVERY_SECS
    save_signal: Signals | None = None
    on_crash: OnCrash = "none"
    from_program: tuple[str, ...] = ()

    def with_options(self, options: RunnerOptions) -> Plan:
        """The same with what the command line overrides."""
        attempts = self.max_attempts if options.max_attempts is None else options.max_attempts or None
        limit = options.time_limit_secs or self.time_limit_secs  # none is 0
        resume = options.resume or self.resume
        return replace(self, resume=resume, time_limit_secs=limit, max_attempts=attempts)


Kind = Literal["function", "program", "phase"]
_MAIN = "__main__"


@dataclass(frozen=True)
class Recipe:
    """By whom a model is made.

    `function`: `name` in `module`, which takes nothing; `program`: a class there; `phase`: the phase `name`
    of the configuration, in the runner that `module` names.
    """

    kind: Kind
    module: str
    name: str

    def to_json(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: Any) -> Recipe:
        """Back; UsageError for anything else."""
        match found:
            case {"kind": ("function" | "program" | "phase") as kind, "module": str(one), "name": str(name)}:
                return cls(kind, one, name)
        raise UsageError(f"nothing says how a model is made: {str(found)[:100]}")

    def in_archive(self, script: str | None) -> str:
        """The name of the module in the archive, whose script is `script`; UsageError where it has none."""
        if self.module != _MAIN:
            return self.module
        if script is None:
            raise UsageError("the script that made the model is not in the archive of the source")
        return PurePosixPath(script).stem


def recipes_of(given: Any) -> dict[str, Recipe]:
    """What JobRunner is told as `replay`; raises UsageError for what cannot be made anew elsewhere."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise UsageError(f'replay is {given!r:.80}; name blobs and what makes them, {{"model": make_model}}')
    return {str(blob): _recipe(blob, make) for blob, make in given.items()}


def _recipe(blob: Any, make: Recipe | Callable[[], Any]) -> Recipe:
    if isinstance(make, Recipe):
        return make
    module, name = getattr(make, "__module__", None), getattr(make, "__qualname__", None)
    if not callable(make) or not isinstance(module, str) or not isinstance(name, str) or "<" in name:
        raise UsageError(
            f"replay[{blob!r}] is {make!r:.80}; give a function or class of a file, which is called with "
            "nothing and makes the module: it is found again by its name"
        )
    return Recipe("function", module, name)


@dataclass(frozen=True)
class WarmStart:
    """What one `init_from` did; leaves have the names that the job calls them by."""

    upstream: str
    loaded: tuple[str, ...]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    misshapen: tuple[str, ...] = ()

    def __str__(self) -> str:
        skipped = {"missing": self.missing, "unexpected": self.unexpected, "of another form": self.misshapen}
        told = [f"; {what}: {', '.join(names)}" for what, names in skipped.items() if names]
        return f"{len(self.loaded)} leaves of {self.upstream}{''.join(told)}"


Status = Literal["FINISHED", "STOPPED", "PREEMPTED"]


class RunResult(int):
    """The last epoch, as Caffe2's runner returned it, with the rest as attributes.

    `metrics` has the last value of each metric, of whatever epoch. `run_dir` is the run's directory, or its
    URL; `warm_starts` tells what each `init_from` took and skipped, where this call began the run.
    `resumed_from` is the epoch that this call went on from; None where it began the run.
    `elsewhere`: other hosts alone were told to leave, so that this one may go on.
    Always true, epoch 0 included: a train call that returns has done what it was asked.
    """

    status: Status
    stop: tuple[str, ...]
    metrics: Mapping[str, float]
    run_dir: Path | str | None
    committed: int | None
    warm_starts: tuple[WarmStart, ...]
    elsewhere: bool
    resumed_from: int | None

    def __new__(
        cls,
        epoch: int,
        *,
        status: Status = "FINISHED",
        stop: tuple[str, ...] = (),
        metrics: Mapping[str, float] | None = None,
        run_dir: Path | str | None = None,
        committed: int | None = None,
        warm_starts: tuple[WarmStart, ...] = (),
        elsewhere: bool = False,
        resumed_from: int | None = None,
    ) -> RunResult:
        """Make the result of a run whose last epoch is `epoch`; `committed` is the newest saved one."""
        self = super().__new__(cls, epoch)
        self.status = status
        self.stop = stop
        self.metrics = dict(metrics or {})
        self.run_dir = run_dir
        self.committed = committed
        self.warm_starts = warm_starts
        self.elsewhere = elsewhere
        self.resumed_from = resumed_from
        return self

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return (
            f"RunResult({int(self)}, status={self.status!r}, stop={self.stop!r}, "
            f"committed={self.committed!r}, run_dir={str(self.run_dir) if self.run_dir else None!r})"
        )
