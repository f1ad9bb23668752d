"""`torchrelay train|test|eval|server|status|package|amend PROGRAM`: the verbs of a user's program.

Without a program `train` and `test` run the profiles of a configuration that train, or that infer.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial

from torchrelay.errors import UsageError
from torchrelay.runners.commands.command_line_arguments import Add
from torchrelay.runners.commands.command_line_output import Output
from torchrelay.runners.commands.command_line_run import run_profiles
from torchrelay.runners.experiment.request import VERBS, Request, add_options

_BY_PROFILES = ("train", "test")


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
    _add(add, "package")


def _add(add: Add, verb: str) -> None:
    parser = add(verb, VERBS[verb], partial(_perform, verb))
    alone = verb in _BY_PROFILES
    runs = ", or a run of a script, RUN@best" if verb == "package" else ""
    text = f"script.py, or package.module:Class{runs}" + ("; without one -m says all" if alone else "")
    parser.add_argument("program", metavar="PROGRAM", nargs="?" if alone else None, help=text)
    add_options(parser, verb)


def _perform(verb: str, chosen: argparse.Namespace, output: Output) -> int:
    """Hand over to the program, or to the steps of the configuration, which end the process."""
    request = Request.of(chosen, verb)
    output.close()
    if chosen.program is None:
        run_profiles(*_of_configuration(request), infer=verb == "test")
    if verb == "package":
        from torchrelay.runners.experiment.packaging_runs import package_run

        if (code := package_run(chosen.program, request)) is not None:
            return code
    from torchrelay.runners.experiment.loading_programs import load_and_perform

    load_and_perform(chosen.program, request)
    raise UsageError(f"{chosen.program} left without an exit code")


def _of_configuration(request: Request) -> tuple[str, tuple[str, ...]]:
    """File and overrides; raises UsageError without one, or for what only programs take."""
    if request.config is None:
        raise UsageError(f"{request.verb} what? Give a PROGRAM, or a configuration with -m")
    plain = Request(request.verb, config=request.config, overrides=request.overrides)
    if replace(request, json=False) != plain:
        raise UsageError(
            "the steps of a configuration take no options but -o, as in -o runner.NAME.epochs=3; "
            "others are for programs"
        )
    return request.config, request.overrides
