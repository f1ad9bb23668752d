"""The subcommands `train|test|eval|serve|status|package|amend` of programs and configurations.

Without PROGRAM they use the configuration given by `-m` alone. torch is imported only when a subcommand
runs, and not at all for the run of a program: its archived code runs in a separate process.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from torchrelay.checkpoint.storage.open import is_url
from torchrelay.errors import UsageError
from torchrelay.metadata.experiments import ProgramRun, read_note
from torchrelay.runners.monitoring.console import Argument, Output, Verb, arg, verb
from torchrelay.runners.monitoring.status import standing
from torchrelay.runners.programs.request import (
    VERBS,
    ServeOptions,
    VerbRequest,
    add_options,
)
from torchrelay.runners.remote_runs.names import is_remote
from torchrelay.runners.remote_runs.resolve import (
    Selector,
    existing_directory,
    locate,
    parse_selector,
    with_epoch,
)
from torchrelay.tools.cli.arguments import MODEL_OPTIONS
from torchrelay.tools.serving.serve import check_installed, say, serve

if TYPE_CHECKING:
    from torchrelay.tools.serving.handlers import ModelSource


def is_run(text: str) -> bool:
    """Return True if the PROGRAM argument is a run: a URL, or a directory with a run.json."""
    return is_remote(text) or (Path(text) / "run.json").is_file()


def run_status(text: str, chosen: argparse.Namespace, output: Output) -> int:
    """Print the status; with `--check`, return exit code 1 if the same command would resume the run."""
    place = locate(text)
    if place.run is None:
        raise UsageError(f"{text} holds checkpoints but no run; torchrelay ls lists its epochs")
    from torchrelay.runners.programs.command_context import run_facts, run_line

    run, stands = place.run, standing(place.run.path)
    status = run_facts(
        run.path, str(run.where), read_note(run.path), lambda: place.log().newest(boundary=True)
    )
    tested = [] if status["test"] is None else [f"tested at epoch {status['test']['epoch']}"]
    output.result(status, [run_line(status), *tested])
    return 1 if chosen.check and not stands.over else 0


_PROGRAM = re.compile(r".*\.py|[^\W\d][\w.]*:[^\W\d]\w*")


def _perform(name: str, chosen: argparse.Namespace, output: Output) -> int:
    given = chosen.program is not None
    if name == "eval" and given and chosen.config is not None and not _PROGRAM.fullmatch(chosen.program):
        chosen.program, chosen.paths = None, [chosen.program, *chosen.paths]  # `eval -m config.yaml IN OUT`
    if name == "status" and given and is_run(chosen.program):
        return run_status(chosen.program, chosen, output)
    _refuse_configuration(name, chosen.program)
    request = VerbRequest.of(chosen, name)
    if chosen.program is None and request.config is None:
        raise UsageError(f"{name} needs a PROGRAM, or a configuration given by -m")
    output.close()
    if chosen.program is None:
        from torchrelay.runners.programs.cli import perform
        from torchrelay.runners.training.exit import run_and_leave

        run_and_leave(lambda: perform(request))
    if name == "package" and (code := _package_run(chosen, request)) is not None:
        return code
    from torchrelay.runners.programs.cli import load_and_perform

    load_and_perform(chosen.program, request)
    raise UsageError(f"{chosen.program} ended without an exit code")


def _of_program(name: str, *more: Argument) -> Verb:
    text = {"package": ", or a run such as RUN@best", "status": ", or a run or its URL"}.get(
        name, " (default: the configuration of -m alone)"
    )
    nargs = None if name == "package" else "?"
    program = arg("program", f"script.py or package.module:Class{text}", "PROGRAM", nargs=nargs)
    return Verb(VERBS[name], (program, partial(add_options, verb=name), *more), partial(_perform, name))


train, test, evaluate, status, amend = map(_of_program, ("train", "test", "eval", "status", "amend"))
package = _of_program("package", *MODEL_OPTIONS)


def _refuse_configuration(verb: str, program: str | None) -> None:
    if program is not None and program.endswith((".yaml", ".yml")):
        raise UsageError(f"{program} is a configuration, not a program; use torchrelay {verb} -m {program}")


def _package_run(chosen: argparse.Namespace, request: VerbRequest) -> int | None:
    """Package the model of a run; returns None if PROGRAM is not a run or checkpoints with a `--model`.

    The run of a program is packaged by its archived script in a separate process. Any other model is built
    here, by the archived configuration or by `--model`. Raises UsageError for options that do not apply.
    """
    target, selector = chosen.program, parse_selector(chosen.program)
    path = Path(selector.path).absolute()
    given = ", ".join(f"--{name}" for name in ("model", "blob", "input") if getattr(chosen, name))
    if not path.is_dir() and not (is_url(selector.path) and chosen.model is not None):
        if given:
            raise UsageError(f"{given}: only for a run directory, which {target} is not")
        if selector.wish is not None and not is_url(selector.path):
            existing_directory(selector.path)
        return None
    if request.run_id is not None or request.ignore or (selector.wish and request.epoch is not None):
        raise UsageError(f"{target} already names the run and epoch; remove --run, --ignore and --epoch")
    epoch = request.epoch if selector.wish is None else selector.epoch
    note = read_note(path) if path.is_dir() else None
    if note is None:
        locate(selector.path)
    if note is None or not note.is_of_program or chosen.model is not None:
        return _package_here(selector, epoch or "last", request, chosen)
    if given:
        raise UsageError(f"the run's program sets {given}: add --model to replace it")
    from torchrelay.runners.programs.cli import perform_archived

    return perform_archived(ProgramRun(path, note), request, epoch)


def _package_here(selector: Selector, epoch: str, request: VerbRequest, chosen: argparse.Namespace) -> int:
    from torchrelay.models.package.api import code_id_of_run, save
    from torchrelay.runners.artifacts.rebuild import loaded_model, named, typed_inputs
    from torchrelay.runners.programs.command_context import say
    from torchrelay.runners.programs.evaluate import lacking

    if request.config is not None:
        raise UsageError("-m is only for programs; a run has its own configuration")
    model = None if chosen.model is None else named(chosen.model, "--model")
    tensors, dynamic = typed_inputs(chosen.input or ())
    inputs: Any = tensors or None
    with loaded_model(selector.path, epoch, model=model, blob=chosen.blob, inputs=inputs) as found:
        name, epoch_number = Path(selector.path).name, found.opened.epoch
        known = {"run": name, "epoch": epoch_number, "code_id": code_id_of_run(selector.path)}
        made = save(
            request.out or "", found.module, found.inputs, dynamic=dynamic or None,
            metadata={key: value for key, value in known.items() if value is not None},
            drop_unused=found.of_batches, overwrite=request.overwrite,
        )  # fmt: skip
    say(f"epoch {epoch_number} of {name}: {made.where}{lacking(made)}")
    return 0


_BLOB = "model"
_OF_MODEL = {name: f"--{name}" for name in ("model", "blob", "handler", "signature", "device")}
_OF_PROGRAM = {
    "config": "-m", "overrides": "-o", "strict_config": "--strict-config", "run_id": "--run",
    "ignore": "--ignore", "runs": "--runs",
}  # fmt: skip


@verb(
    "serve the model of a run, package, program or configuration over HTTP",
    arg(
        "program",
        "a run, checkpoint directory or URL, optionally with @7, @last or @best; a model package; or a "
        "program (its newest run is served). Default: the configuration of -m alone",
        "RUN[@EPOCH]|PACKAGE|PROGRAM",
        nargs="?",
    ),
    arg(
        "--model",
        "function that builds the module (default: the archived code of the run)",
        "MODULE:FUNCTION",
    ),
    arg("--blob", f"blob to load into the module (default: {_BLOB})", "NAME"),
    arg("--handler", "handler class around the module", "MODULE:CLASS"),
    arg("--signature", "JSON file with the inputs and outputs to enforce", "FILE"),
    arg("--device", "device to compute on (default: cpu)", "D"),
    partial(add_options, verb="server"),
)
def serve_model(chosen: argparse.Namespace, output: Output) -> int:
    """Serve until SIGTERM or SIGINT."""
    _refuse_configuration("serve", chosen.program)
    options, where = ServeOptions.of(chosen), chosen.program
    if where is None or (_PROGRAM.fullmatch(where) and not Path(where).is_dir()):
        if where is None and chosen.config is None:
            raise UsageError("serve needs a run, a package or a PROGRAM, or a configuration given by -m")
        _refuse_given(chosen, _OF_MODEL, "a program or configuration sets it itself")
        return _perform("server", chosen, output)
    _refuse_given(chosen, _OF_PROGRAM, f"only for a program or configuration, which {where} is not")
    check_installed()
    selector = parse_selector(where if chosen.epoch is None else with_epoch(where, chosen.epoch))
    package = Path(where)
    if package.is_file() and selector.wish is None:
        with package.open("rb") as file:
            if file.read(2) != b"PK":  # damage is reported when it is read
                raise UsageError(f"{package} is not a model package; torchrelay.save writes one")
        _refuse_given(
            chosen, {name: f"--{name}" for name in ("model", "blob", "signature")}, "a package has its own"
        )
        return _served(options, lambda: _package(chosen))
    if chosen.model is not None:
        from torchrelay.runners.artifacts.rebuild import named

        return _served(
            options,
            lambda: _plain(chosen, selector, named(chosen.model, "--model"), chosen.blob or _BLOB),
        )
    note = read_note(Path(selector.path)) if Path(selector.path).is_dir() else None
    if note is None or not note.is_of_program:
        _serve_configured(chosen, selector, options)
    from torchrelay.runners.programs.cli import run_process

    _refuse_given(chosen, _OF_MODEL, "set by the program unless --model is given")
    run = ProgramRun(Path(selector.path).absolute(), note)
    words = [*options.words(), *(["--epoch", selector.epoch] if selector.wish is not None else [])]
    output.close()
    return run_process(run, "server", words)


def _serve_configured(chosen: argparse.Namespace, selector: Selector, options: ServeOptions) -> NoReturn:
    """Serve the traced model that the archived configuration of a run builds, or the model by a handler."""
    path = Path(selector.path)
    if path.is_file():
        raise UsageError(f"{path} is a file and holds one epoch; remove the @ and what follows")
    if not is_url(selector.path) and not path.exists() and selector.wish is None:
        raise UsageError(f"{path} does not exist; give a run, a checkpoint directory or a model package")
    locate(selector.path)
    if is_url(selector.path) or not (path / "run.json").is_file():
        raise UsageError(
            f"{selector.path} holds checkpoints without a run, so their model is unknown; give --model "
            "module:function"
        )
    from torchrelay.runners.training.exit import run_and_leave

    def work() -> int:
        if chosen.handler is None:
            from torchrelay.tools.serving.program_server import serve_run

            _refuse_given(chosen, {"signature": "--signature"}, "the traced model of the run has its own")
            return serve_run(selector.path, selector.epoch, options, chosen.blob, chosen.device)
        from torchrelay.runners.artifacts.rebuild import rebuilt

        with rebuilt(path.resolve(), None, chosen.blob) as found:
            return serve(options, lambda: _plain(chosen, selector, lambda: found.make()[0], found.blob))

    run_and_leave(work)


def _served(options: ServeOptions, source: Any) -> NoReturn:
    """Serve, and exit with the resulting code; errors of user functions print their traceback."""
    from torchrelay.runners.training.exit import run_and_leave

    run_and_leave(lambda: serve(options, source))


def _plain(chosen: argparse.Namespace, selector: Selector, make: Callable[[], Any], blob: str) -> ModelSource:
    """Return the source of an epoch's weights in the module that `make` builds."""
    from torchrelay.tools.serving.program_server import (
        EpochModelSource,
        PlainModel,
        code_id_of_run,
        handler_of,
        name_of,
        read_signature,
    )

    where = selector.path
    model = PlainModel(
        name_of(where),
        make,
        blob,
        handler_of(chosen.handler),
        read_signature(chosen.signature),
        chosen.device,
        code_id_of_run(Path(where)),
    )
    return EpochModelSource(where, selector.epoch, model, say)


def _package(chosen: argparse.Namespace) -> ModelSource:
    from torchrelay.tools.serving.program_server import PackageSource, handler_of

    handler = None if chosen.handler is None else handler_of(chosen.handler)
    return PackageSource(chosen.program, handler, chosen.device)


def _refuse_given(chosen: argparse.Namespace, options: Mapping[str, str], why: str) -> None:
    """Raise UsageError with the reason if one of these options was given."""
    for name, option in options.items():
        if getattr(chosen, name):
            raise UsageError(f"{option}: {why}; remove it")
