"""The verbs of a program: `torchrelay train|test|eval|server|status|package|amend PROGRAM`, or `-m FILE`.

Without a program they are those of a configuration alone.
"""

from __future__ import annotations

import argparse
import re
from functools import partial

from torchrelay.errors import UsageError
from torchrelay.runners.commands.command_line_arguments import Add, add_model_options
from torchrelay.runners.commands.command_line_run_status import is_run, run_status
from torchrelay.runners.monitoring.console import Output
from torchrelay.runners.programs.request import VERBS, Request, add_options

_PROGRAM = re.compile(r".*\.py|[^\W\d][\w.]*:[^\W\d]\w*")


def add_train(add: Add) -> None:
    """Define `train`."""
    _add(add, "train")


def add_test(add: Add) -> None:
    """Define `test`."""
    _add(add, "test")


def add_eval(add: Add) -> None:
    """Define `eval`."""
    _add(add, "eval")


def add_server(add: Add) -> None:
    """Define `server`."""
    _add(add, "server")


def add_status(add: Add) -> None:
    """Define `status`."""
    _add(add, "status")


def add_amend(add: Add) -> None:
    """Define `amend`."""
    _add(add, "amend")


def add_package(add: Add) -> None:
    """Define `package`."""
    add_model_options(_add(add, "package"))


def _add(add: Add, verb: str) -> argparse.ArgumentParser:
    parser = add(verb, VERBS[verb], partial(_perform, verb))
    text = "script.py, or package.module:Class"
    text += {"package": ", or a run, RUN@best", "status": ", or a run or its URL"}.get(
        verb, "; without one -m says all"
    )
    alone = verb != "package"  # what a configuration alone can do
    nargs = "?" if alone else None
    parser.add_argument("program", metavar="PROGRAM", nargs=nargs, help=text)
    add_options(parser, verb)
    return parser


def _perform(verb: str, chosen: argparse.Namespace, output: Output) -> int:
    """Hand over to the program, or to the steps of the configuration, which end the process."""
    if verb == "eval" and chosen.program is not None and chosen.config is not None:
        _without_program(chosen)
    if verb == "status" and chosen.program is not None and is_run(chosen.program):
        return run_status(chosen.program, chosen, output)
    _refuse_configuration(verb, chosen.program)
    request = Request.of(chosen, verb)
    if chosen.program is None and request.config is None:
        raise UsageError(f"{verb} what? Give a PROGRAM, or a configuration with -m")
    output.close()
    if chosen.program is None:
        from torchrelay.runners.programs.config_cli import perform_configuration
        from torchrelay.runners.training.exit import run_and_leave

        run_and_leave(lambda: perform_configuration(request))
    if verb == "package":
        from torchrelay.runners.artifacts.package_run import Typed, package_run

        typed = Typed(chosen.model, chosen.blob, tuple(chosen.input or ()))
        if (code := package_run(chosen.program, request, typed)) is not None:
            return code
    from torchrelay.runners.programs.cli import load_and_perform

    load_and_perform(chosen.program, request)
    raise UsageError(f"{chosen.program} left without an exit code")


def _refuse_configuration(verb: str, program: str | None) -> None:
    """A configuration where the program is to stand; raises UsageError with how it is given."""
    if program is not None and program.endswith((".yaml", ".yml")):
        raise UsageError(f"{program} is a configuration and no program: torchrelay {verb} -m {program}")


def _without_program(chosen: argparse.Namespace) -> None:
    """`eval -m config.yaml IN OUT`: what is not written like a program is the first file."""
    if not _PROGRAM.fullmatch(chosen.program):
        chosen.paths = [chosen.program, *chosen.paths]
        chosen.program = None
