"""The `torchrelay` command: dispatch to the subcommands.

- Only `ckpt prune`, `ckpt repair` and `ckpt verify --quarantine` change epochs, and only while no job writes
  to them. `ckpt tag` and `ckpt pin` only add marks and are allowed at any time.
- torch is imported only by subcommands that train or load a model, when they run.
- Exit codes are those of `torchrelay.errors`. A usage error is one line on stderr, without a traceback.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

import torchrelay
from torchrelay.errors import RelayError, StorageError, UsageError, exit_code_of
from torchrelay.jobs.runtime import IMPOSSIBLE, undisturbed
from torchrelay.runners.monitoring.console import Output, Parser, Run, Verb, by_url, printable

if TYPE_CHECKING:
    Verbs = argparse._SubParsersAction[Parser]

_DESCRIPTION = "Run PyTorch jobs; inspect, verify, convert and clean up their checkpoints."
_CODES = (
    "exit codes: 0 success, 1 failed or found something, 2 usage error or unknown run, 3 no epoch to resume "
    "from, 4 in use, 5 damaged or unreadable, 6 a rank was lost, 75 preempted (run it again)"
)
_VERBS = {
    "train": ".programs:train",
    "test": ".programs:test",
    "eval": ".programs:evaluate",
    "serve": ".programs:serve_model",
    "status": ".programs:status",
    "package": ".programs:package",
    "amend": ".programs:amend",
    "run": ".config:run",
    "launch": ".launch:launch",
    "ls": ".runs.ls:ls",
    "show": ".runs.show:show",
    "verify": ".checkpoints.verify:verify",
    "ckpt ls": ".runs.ls:ls",
    "ckpt show": ".checkpoints.directory:show",
    "ckpt verify": ".checkpoints.verify:verify",
    "ckpt diff": ".checkpoints.diff:diff",
    "ckpt find-bad": ".checkpoints.find_bad:find_bad",
    "ckpt du": ".checkpoints.directory:du",
    "ckpt why": ".checkpoints.verify:why",
    "ckpt stats": ".runs.show:stats",
    "ckpt repair": ".checkpoints.directory:repair",
    "ckpt prune": ".checkpoints.retention:run_prune",
    "ckpt tag": ".checkpoints.retention:tag",
    "ckpt pin": ".checkpoints.retention:pin",
    "ckpt export": ".checkpoints.convert:export",
    "ckpt import": ".checkpoints.convert:import_",
    "runs ls": ".runs.library:ls",
    "runs show": ".runs.library:show",
    "runs status": ".programs:status",
    "runs diff": ".runs.compare:diff",
    "runs compare": ".runs.compare:compare",
    "runs code": ".runs.library:code",
    "runs lineage": ".runs.show:lineage",
    "runs index": ".runs.library:index",
    "config check": ".config:check",
    "config print": ".config:print_",
    "config schema": ".config:schema",
    "top": ".runs.watch:top",
    "report": ".runs.watch:report",
    "dashboard": ".runs.watch:dashboard",
    "chaos": "torchrelay.chaos.cli:chaos",
    "completion": ".completion:completion",
}
"""Subcommand -> `module:function` that declares it, relative to this package.
Only the module of the typed subcommand is imported, which keeps start-up short.
`ls`, `verify` and `status` are aliases of `ckpt ls`, `ckpt verify` and `runs status`."""
_FORMER = {
    "server": "serve",
    "unpin": "ckpt pin --delete",
    **{
        verb: f"ckpt {verb}"
        for verb in ("diff", "find-bad", "stats", "prune", "tag", "pin", "export", "import")
    },
    **{verb: f"runs {verb}" for verb in ("compare", "lineage", "index")},
}
"""Spellings of 0.1, accepted with a deprecation line on stderr until the next version."""
_GROUPS = {
    "ckpt": "inspect, verify, compare, convert and clean up checkpoints",
    "runs": "list and compare runs, their source code and their lineage",
    "config": "check and print configuration files",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit code; `--help` and `--version` raise SystemExit."""
    output = Output()
    try:
        typed = sys.argv[1:] if argv is None else argv
        if typed and (now := _FORMER.get(typed[0])) is not None:
            sys.stderr.write(
                f"torchrelay: `{typed[0]}` is now `{now}`; the old spelling will be removed in the next "
                "version\n"
            )
            typed = [*now.split(), *typed[1:]]
        with undisturbed():  # garbage collection would only scan what stays imported
            parser = _parser(typed)
        chosen = _chosen(parser, typed)
        if chosen.run is None:
            parser.print_help(sys.stderr)
            return 2
        output = Output(json=chosen.json)
        verb: Run = chosen.run
        return verb(chosen, output)
    except RelayError as error:
        return _refuse(error)
    except OSError as error:
        text = f"{error.filename or 'the storage'}: {error.strerror}"
        impossible = error.errno in IMPOSSIBLE  # on that path
        return _refuse(UsageError(f"{text}; give another path") if impossible else StorageError(text))
    except KeyboardInterrupt as error:
        return exit_code_of(error)
    finally:
        output.close()


def whole_parser() -> Parser:
    """Build the parser of all subcommands, which imports all their modules."""
    return _parser(())


def _chosen(parser: Parser, typed: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments; raises UsageError for arguments that the subcommand does not take."""
    chosen, left = parser.parse_known_args(typed)
    if left:
        verb: Parser = chosen.parser
        verb.refuse(left)
    if getattr(chosen, "at_epoch", None) is not None:
        from torchrelay.runners.remote_runs.resolve import with_epoch

        chosen.path = with_epoch(chosen.path, chosen.at_epoch)
    return chosen  # type: ignore[no-any-return]


def _parser(typed: Sequence[str]) -> Parser:
    """Build the parser of the typed subcommand, or of all subcommands if none was typed."""
    parser = Parser("torchrelay", description=_DESCRIPTION, epilog=_CODES)
    parser.add_argument("--version", action="version", version=f"torchrelay {torchrelay.__version__}")
    parser.set_defaults(run=None, json=False, parser=parser)
    groups = {"": parser.add_subparsers(title="subcommands", metavar="COMMAND")}
    for verb in _selected(typed):
        group, _, name = verb.rpartition(" ")
        if group not in groups:
            text = _GROUPS[group]
            one = groups[""].add_parser(group, help=text, description=f"{text[0].upper()}{text[1:]}.")
            groups[group] = one.add_subparsers(title="subcommands", metavar="COMMAND", required=True)
        module, _, function = _VERBS[verb].partition(":")
        _add(groups[group], name, getattr(import_module(module, __package__), function))
    return parser


def _selected(typed: Sequence[str]) -> Iterable[str]:
    """Return the typed subcommand, `ckpt ls` before `ckpt`; all subcommands if there is none."""
    for count in (2, 1):
        if (verb := " ".join(typed[:count])) in _VERBS:
            return [verb]
    return _VERBS


def _add(verbs: Verbs, name: str, verb: Verb) -> None:
    """Add a subcommand with `--json`, its arguments and the function that runs it."""
    parser = verbs.add_parser(name, help=verb.help, description=f"{verb.help[0].upper()}{verb.help[1:]}.")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    for one in verb.arguments:
        one(parser)
    parser.set_defaults(run=verb.run, parser=parser)


def _refuse(error: RelayError) -> int:
    """Print the error (one line, or all lines of its report) on stderr and return its exit code."""
    report = getattr(error, "report", None)
    lines = report() if report else [f"torchrelay: {error}"]
    sys.stderr.write("".join(f"{printable(by_url(line))}\n" for line in lines))
    return error.exit_code
