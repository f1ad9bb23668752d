"""The verbs of a program or a configuration: `torchrelay train|test|eval|server|status|package|amend`.

Without a program they are those of a configuration alone.
"""

from __future__ import annotations

import argparse
import re
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from torchrelay.errors import RelayError, UsageError
from torchrelay.metadata.experiments import newest_result, read_note
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.runners.monitoring.console import Output
from torchrelay.runners.monitoring.status import standing
from torchrelay.runners.programs.request import VERBS, Request, add_options
from torchrelay.runners.remote_runs.names import is_remote
from torchrelay.runners.remote_runs.resolve import Place, locate
from torchrelay.tools.cli.arguments import Add, add_model_options


def is_run(text: str) -> bool:
    """Whether what stands for the program is a run: a URL, or a directory with the notes of one."""
    return is_remote(text) or (Path(text) / "run.json").is_file()


def run_status(text: str, chosen: argparse.Namespace, output: Output) -> int:
    """Print it; with `--check` the exit code is 1 where the same command would go on with it, else 0."""
    place = locate(text)
    if place.run is None:
        raise UsageError(f"{text} holds checkpoints but no run: torchrelay ls lists its epochs")
    stands, told = standing(place.run.path), _told(place, place.run)
    if output.json:
        output.value(told)
    else:
        why = f" ({told['why']})" if told["why"] else ""
        epoch = "no epoch saved" if told["epoch"] is None else f"newest epoch {told['epoch']}"
        message = f", {told['message']!r}" if told["message"] else ""
        output.line(f"run {told['id']}: {told['state']}{why}, {epoch}{message}")
        if told["test"] is not None:
            output.line(f"tested at epoch {told['test']['epoch']}")
    return 1 if chosen.check and not stands.over else 0


def _told(place: Place, run: RunDirectory) -> dict[str, Any]:
    stands, result, note = standing(run.path), newest_result(run.path), read_note(run.path)
    epoch = None
    with suppress(RelayError):
        newest = place.log().newest(boundary=True)
        epoch = None if newest is None else newest.position.epoch
    return {
        "id": run.name,
        "path": str(run.where),
        "state": stands.word,
        "why": stands.why,
        "epoch": epoch,
        "message": "" if note is None else note.message,
        "test": None if result is None else {"epoch": result.get("epoch"), **(result.get("metrics") or {})},
    }


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
