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
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

import torchrelay
from torchrelay.errors import RelayError, StorageError, UsageError, exit_code_of
from torchrelay.jobs.runtime import IMPOSSIBLE, undisturbed
from torchrelay.runners.monitoring.console import Output, Parser, by_url, printable
from torchrelay.tools.cli.arguments import Run

if TYPE_CHECKING:
    Verbs = argparse._SubParsersAction[Parser]

_DESCRIPTION = "Run PyTorch jobs; inspect, verify, convert and clean up their checkpoints."
_CODES = (
    "exit codes: 0 success, 1 failed or found something, 2 usage error or unknown run, 3 no epoch to resume "
    "from, 4 in use, 5 damaged or unreadable, 6 a rank was lost, 75 preempted (run it again)"
)
_VERBS = {
    "train": ".programs:add_train",
    "test": ".programs:add_test",
    "eval": ".programs:add_eval",
    "serve": ".programs:add_serve",
    "status": ".programs:add_status",
    "package": ".programs:add_package",
    "amend": ".programs:add_amend",
    "run": ".config:add_run_config",
    "launch": ".launch:add_launch",
    "ls": ".runs.ls:add_ls",
    "show": ".runs.show:add_show",
    "verify": ".checkpoints.verify:add_verify",
    "ckpt ls": ".runs.ls:add_ls",
    "ckpt show": ".checkpoints.directory:add_epoch_show",
    "ckpt verify": ".checkpoints.verify:add_verify",
    "ckpt diff": ".checkpoints.diff:add_diff",
    "ckpt find-bad": ".checkpoints.find_bad:add_find_bad",
    "ckpt du": ".checkpoints.directory:add_du",
    "ckpt why": ".checkpoints.verify:add_why",
    "ckpt stats": ".runs.show:add_stats",
    "ckpt repair": ".checkpoints.directory:add_repair",
    "ckpt prune": ".checkpoints.retention:add_prune",
    "ckpt tag": ".checkpoints.retention:add_tag",
    "ckpt pin": ".checkpoints.retention:add_pin",
    "ckpt export": ".checkpoints.convert:add_export",
    "ckpt import": ".checkpoints.convert:add_import",
    "runs ls": ".runs.library:add_runs_ls",
    "runs show": ".runs.library:add_runs_show",
    "runs status": ".programs:add_status",
    "runs diff": ".runs.compare:add_runs_diff",
    "runs compare": ".runs.compare:add_compare",
    "runs code": ".runs.library:add_runs_code",
    "runs lineage": ".runs.show:add_lineage",
    "runs index": ".runs.library:add_index",
    "config check": ".config:add_check",
    "config print": ".config:add_print",
    "config schema": ".config:add_schema",
    "top": ".runs.watch:add_top",
    "report": ".runs.watch:add_report",
    "dashboard": ".runs.watch:add_dashboard",
    "chaos": "torchrelay.chaos.cli:add_chaos",
    "completion": ".completion:add_completion",
}
"""Subcommand -> `module:function` that defines it, relative to this package.
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
        typed = _spelled(sys.argv[1:] if argv is None else argv)
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
        return _refuse(_of_system(error))
    except KeyboardInterrupt as error:
        return exit_code_of(error)
    finally:
        output.close()


def _spelled(typed: Sequence[str]) -> Sequence[str]:
    """Return the arguments with a former spelling of the subcommand replaced."""
    now = _FORMER.get(typed[0]) if typed else None
    if now is None:
        return typed
    sys.stderr.write(
        f"torchrelay: `{typed[0]}` is now `{now}`; the old spelling will be removed in the next version\n"
    )
    return [*now.split(), *typed[1:]]


def _of_system(error: OSError) -> RelayError:
    """Convert an OSError: UsageError if the path can never work, else StorageError."""
    text = f"{error.filename or 'the storage'}: {error.strerror}"
    return UsageError(f"{text}; give another path") if error.errno in IMPOSSIBLE else StorageError(text)


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
            groups[group] = _group(groups[""], group)
        module, _, function = _VERBS[verb].partition(":")
        getattr(import_module(module, __package__), function)(partial(_verb, groups[group], name))
    return parser


def _selected(typed: Sequence[str]) -> Iterable[str]:
    """Return the typed subcommand, `ckpt ls` before `ckpt`; all subcommands if there is none."""
    for count in (2, 1):
        if (verb := " ".join(typed[:count])) in _VERBS:
            return [verb]
    return _VERBS


def _group(verbs: Verbs, name: str) -> Verbs:
    """Add a group such as `ckpt` and return its subparsers."""
    text = _GROUPS[name]
    parser = verbs.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    return parser.add_subparsers(title="subcommands", metavar="COMMAND", required=True)


def _verb(verbs: Verbs, name: str, help_line: str, run: Run) -> Parser:
    """Add a subcommand with `--json` and the function that runs it."""
    parser = verbs.add_parser(name, help=help_line, description=f"{help_line[0].upper()}{help_line[1:]}.")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.set_defaults(run=run, parser=parser)
    return parser


def _refuse(error: RelayError) -> int:
    """Print the error (one line, or all lines of its report) on stderr and return its exit code."""
    report = getattr(error, "report", None)
    lines = report() if report else [f"torchrelay: {error}"]
    sys.stderr.write("".join(f"{printable(by_url(line))}\n" for line in lines))
    return error.exit_code
