"""The command line: looks at runs and checkpoints, copies them out and in, puts them in order.

Only `ckpt repair` and `ckpt verify --quarantine` change a run, and only where no job writes to it.

Only `export` and `import` need torch, and import it when they run.

Exit codes are those of `torchrelay.errors`; a user's mistake is one line on stderr, no traceback.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torchrelay
from torchrelay.errors import RelayError, StorageError
from torchrelay.runners.commands.command_line_chaos import add_chaos
from torchrelay.runners.commands.command_line_ckpt import add_ckpt
from torchrelay.runners.commands.command_line_interop import add_export, add_import
from torchrelay.runners.commands.command_line_ls import ls
from torchrelay.runners.commands.command_line_output import Output, printable
from torchrelay.runners.commands.command_line_show import show
from torchrelay.runners.commands.command_line_verify import add_verify

_INTERRUPTED = 130  # what a shell calls a process that Ctrl-C ended
_DESCRIPTION = "Look at the runs and checkpoints of torchrelay, copy them out and in, put them in order."
_CODES = (
    "exit codes: 0 done, 1 chaos found something, 2 usage or unknown run, 3 no epoch is left to resume from, "
    "4 in use by a job, 5 damaged or unreadable"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code; argparse itself leaves by SystemExit."""
    parser = _parser()
    chosen = parser.parse_args(argv)
    verb: Callable[[argparse.Namespace, Output], int] | None = chosen.run
    if verb is None:
        parser.print_help(sys.stderr)
        return 2
    output = Output(json=chosen.json)
    try:
        return verb(chosen, output)
    except RelayError as error:
        return _refuse(str(error), error.exit_code)
    except OSError as error:
        return _refuse(f"{error.filename or 'the storage'}: {error.strerror}", StorageError.exit_code)
    except KeyboardInterrupt:
        return _INTERRUPTED
    finally:
        output.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("torchrelay", description=_DESCRIPTION, epilog=_CODES)
    parser.add_argument("--version", action="version", version=f"torchrelay {torchrelay.__version__}")
    parser.set_defaults(run=None, json=False)
    verbs = parser.add_subparsers(title="verbs", metavar="VERB")
    _add_looking(verbs)
    add_ckpt(verbs, _add_looking, _verb)
    add_export(partial(_verb, verbs))
    add_import(partial(_verb, verbs))
    add_chaos(partial(_verb, verbs))
    return parser


def _add_looking(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    _add_ls(verbs)
    _add_show(verbs)
    add_verify(partial(_verb, verbs))


def _add_ls(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _verb(verbs, "ls", "list the committed epochs", ls)
    parser.add_argument(
        "path", metavar="RUN_OR_PREFIX", help="a run directory, or a directory of checkpoints"
    )


def _add_show(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _verb(verbs, "show", "say what a run is, how it stands, what happened last", show)
    parser.add_argument("path", metavar="RUN", help="a run directory")
    parser.add_argument("--events", type=_count, default=10, metavar="N", help="so many events (default: 10)")


def _verb(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    help_line: str,
    run: Callable[[argparse.Namespace, Output], int],
) -> argparse.ArgumentParser:
    parser = verbs.add_parser(name, help=help_line, description=f"{help_line[0].upper()}{help_line[1:]}.")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.set_defaults(run=run)
    return parser


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or len(text) > 9:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0 on")
    return int(text)


def _refuse(message: str, code: int) -> int:
    sys.stderr.write(f"torchrelay: {printable(message)}\n")
    return code
