"""Run a subcommand: in this process, or for `--run ID` with archived code.

The archived code runs in a process of its own on the unpacked archive; this process only waits and does not
import torch. Classes come from the archive; data and results keep their paths.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torchrelay.errors import UsageError
from torchrelay.metadata.code.archive import open_archive, unpack_source
from torchrelay.metadata.experiments import ProgramRun
from torchrelay.runners.config_runs.processes import signals_to
from torchrelay.runners.programs.command_context import BaseCommand, ConfigCommand, status
from torchrelay.runners.programs.request import VerbRequest
from torchrelay.runners.programs.run_selection import captured_code

MARK = "TORCHRELAY_ARCHIVED"
"""The run that a process on archived code works for; removed from its environment at once."""
SOURCE = "TORCHRELAY_ARCHIVED_SOURCE"
"""The directory of its unpacked archive; removed from its environment, too."""
RESOLVED = "resolved.yaml"
_ON_ONE_RANK = ("status", "amend", "package")


def run_process(run: ProgramRun, verb: str, words: Sequence[str], target: str | None = None) -> int:
    """Run a subcommand with the archived code of a run; returns its exit code.

    `target` is `module:Class`, needed if the program was not a script; empty for a configuration only. Raises
    UsageError for a run whose source was not archived.
    """
    captured = captured_code(run)
    folder = captured.get("config")
    with tempfile.TemporaryDirectory(prefix="torchrelay-archived-") as scratch:
        source = Path(scratch) / "source"
        with open_archive(run.path / "code" / f"{run.note.code_id}.zip") as archive:
            unpack_source(archive, source)
        argv = [sys.executable, *_program(run, captured, verb, source, target), *words]
        if isinstance(folder, str) and run.note.config_id is not None:
            argv += ["-m", str(run.path / folder / RESOLVED)]
        environment = _environment(run, captured["code"], source)
        process = subprocess.Popen(argv, env=environment)  # noqa: S603 - the user's own program, as it was
        with signals_to(process, (signal.SIGTERM,)):
            try:
                return process.wait()
            except KeyboardInterrupt:  # Ctrl-C reaches both: give it time to exit
                return process.wait()
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()


def _program(
    run: ProgramRun, captured: Mapping[str, Any], verb: str, source: Path, target: str | None
) -> list[str]:
    """Return the command of the archived script, or of the module by the command line."""
    typed, script = "serve" if verb == "server" else verb, captured["code"].get("script")
    if target == "":
        return ["-m", "torchrelay", typed]
    if isinstance(script, str):
        return [str(source / script), verb]
    if target is None:
        raise UsageError(
            f"the program of {run.id} was not a script: run torchrelay {typed} module:Class --run {run.id}"
        )
    return ["-m", "torchrelay", typed, target]


def _environment(run: ProgramRun, code: Mapping[str, Any], source: Path) -> dict[str, str]:
    """Return the environment in which the archive's folders come first on Python's path."""
    folders = code.get("import_path")
    first = [str(source / one) for one in (folders if isinstance(folders, list) else [""])]
    before = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
    return {
        **os.environ,
        MARK: str(run.path),
        SOURCE: str(source),
        "PYTHONPATH": os.pathsep.join([*first, *before]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


S = TypeVar("S", bound=BaseCommand)


def perform_command(
    request: VerbRequest,
    command_of: Callable[[str | None, Path | None], S],
    verb: Callable[[], Callable[[S], int]],
) -> int:
    """Run a subcommand in this process, or in one on archived code; returns the exit code.

    `command_of` gets the run whose archived code this process runs, and its unpacked source. `verb` imports
    the function when called.
    """
    archived, source = os.environ.pop(MARK, None), os.environ.pop(SOURCE, None)
    if request.verb in _ON_ONE_RANK and os.environ.get("RANK", "0") != "0":
        return 0
    command = command_of(archived, None if source is None else Path(source))
    if request.run_id is not None and archived is None and request.verb in command.with_archived_code:
        code = _run_archived(command)
        if code is not None:
            return code
    return verb()(command)


def _run_archived(command: BaseCommand) -> int | None:
    """Run the subcommand with archived code and return its exit code; None if nothing has changed.

    Raises UsageError for a run whose source or configuration was not archived.
    """
    request, program = command.request, command.program
    run = command.store.find(request.run_id or "")
    option, given = ("-o", request.overrides) if program is None else ("-m", request.config)
    if given:
        raise UsageError(f"--run uses the configuration of the run: remove {option}")
    captured = captured_code(run)
    workspace = (captured["code"].get("roots") or {}).get("")
    if program is None and not (isinstance(captured.get("config"), str) and isinstance(workspace, str)):
        raise UsageError(f"the configuration of {run.id} was not recorded, so it cannot be run")
    if command.identity_of(run).same(command.identity):
        return None
    if program is not None:
        return perform_archived(run, request, request.epoch, f"{program.__module__}:{program.__qualname__}")
    words = [*_options(run.path.parent, request, request.epoch), "-o", f"workspace={workspace!r}"]
    return run_process(run, request.verb, words, "")


def perform_archived(
    run: ProgramRun, request: VerbRequest, epoch: str | None, target: str | None = None
) -> int:
    """Run a subcommand with a run's archived program; UsageError if that needs a `target`."""
    return run_process(run, request.verb, _options(run.path.parent.parent, request, epoch), target)


def _options(runs: Path, request: VerbRequest, epoch: str | None) -> list[str]:
    """Return the command-line options of a request."""
    words = [*request.paths, "--runs", str(runs)]
    words += ["--epoch", epoch] if epoch is not None else []
    words += ["--out", request.out] if request.out is not None else []
    words += request.serve.words() if request.serve is not None else []
    flags = (("--overwrite", request.overwrite), ("--retest", request.retest), ("--json", request.json))
    return words + [option for option, on in flags if on]


def perform_configuration(request: VerbRequest) -> int:
    """Run a subcommand of a configuration; returns the exit code."""
    return perform_command(
        request,
        lambda archived, source: ConfigCommand(request, archived, source),
        lambda: _verb(request.verb),
    )


def _verb(name: str) -> Callable[[ConfigCommand], int]:
    """Return the function of a subcommand, importing torch only if needed."""
    if name == "train":
        from torchrelay.runners.programs.train import train_configuration

        return train_configuration
    if name == "test":
        from torchrelay.runners.programs.test import test_configuration

        return test_configuration
    if name == "eval":
        from torchrelay.runners.programs.eval import evaluate_configuration

        return evaluate_configuration
    if name == "server":
        from torchrelay.tools.serving.program_server import serve_config  # the only call of a higher package

        return serve_config
    if name == "amend":
        from torchrelay.runners.programs.eval import fit_configuration
        from torchrelay.runners.programs.train import amend

        return lambda command: amend(command, partial(fit_configuration, command))
    return status
