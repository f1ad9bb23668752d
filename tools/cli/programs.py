"""The verbs of programs and configurations, `train|test|eval|serve|status|package|amend`.

Without a program they are those of a configuration alone.

torch is imported when it runs; for the run of a program not even then, because its archived code runs in a
process of its own.
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
from torchrelay.records import dataclass
from torchrelay.runners.monitoring.console import Output
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
from torchrelay.tools.cli.arguments import Add, add_model_options
from torchrelay.tools.serving.serve import check_installed, say, serve

if TYPE_CHECKING:
    from torchrelay.runners.artifacts.loaded_model import LoadedModel
    from torchrelay.tools.serving.handlers import ModelSource


def is_run(text: str) -> bool:
    """Whether what stands for the program is a run: a URL, or a directory with the notes of one."""
    return is_remote(text) or (Path(text) / "run.json").is_file()


def run_status(text: str, chosen: argparse.Namespace, output: Output) -> int:
    """Print it; with `--check` the exit code is 1 where the same command would go on with it, else 0."""
    place = locate(text)
    if place.run is None:
        raise UsageError(f"{text} holds checkpoints but no run: torchrelay ls lists its epochs")
    from torchrelay.runners.programs.command_context import run_facts, run_line

    run, stands = place.run, standing(place.run.path)
    told = run_facts(run.path, str(run.where), read_note(run.path), lambda: place.log().newest(boundary=True))
    if output.json:
        output.value(told)
    else:
        output.line(run_line(told))
        if told["test"] is not None:
            output.line(f"tested at epoch {told['test']['epoch']}")
    return 1 if chosen.check and not stands.over else 0


_PROGRAM = re.compile(r".*\.py|[^\W\d][\w.]*:[^\W\d]\w*")


def _add(verb: str, add: Add) -> argparse.ArgumentParser:
    parser = add(VERBS[verb], partial(_perform, verb))
    text = "script.py, or package.module:Class"
    text += {"package": ", or a run, RUN@best", "status": ", or a run or its URL"}.get(
        verb, "; without one -m says all"
    )
    alone = verb != "package"  # what a configuration alone can do
    nargs = "?" if alone else None
    parser.add_argument("program", metavar="PROGRAM", nargs=nargs, help=text)
    add_options(parser, verb)
    return parser


add_train, add_test, add_eval, add_status, add_amend = (
    partial(_add, verb) for verb in ("train", "test", "eval", "status", "amend")
)


def add_package(add: Add) -> None:
    """Define `package`."""
    add_model_options(_add("package", add))


def _perform(verb: str, chosen: argparse.Namespace, output: Output) -> int:
    """Hand over to the program, or to the steps of the configuration, which end the process."""
    if verb == "eval" and chosen.program is not None and chosen.config is not None:
        _without_program(chosen)
    if verb == "status" and chosen.program is not None and is_run(chosen.program):
        return run_status(chosen.program, chosen, output)
    _refuse_configuration(verb, chosen.program)
    request = VerbRequest.of(chosen, verb)
    if chosen.program is None and request.config is None:
        raise UsageError(f"{verb} what? Give a PROGRAM, or a configuration with -m")
    output.close()
    if chosen.program is None:
        from torchrelay.runners.programs.perform import perform_configuration
        from torchrelay.runners.training.exit import run_and_leave

        run_and_leave(lambda: perform_configuration(request))
    if verb == "package":
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


@dataclass(frozen=True)
class Typed:
    """What was typed of the model: `--model module:function`, `--blob`, `--input` as often as wanted."""

    model: str | None = None
    blob: str | None = None
    inputs: tuple[str, ...] = ()

    @property
    def given(self) -> list[str]:
        """The options that were."""
        known = {"--model": self.model, "--blob": self.blob, "--input": self.inputs}
        return [name for name, value in known.items() if value]


def package_run(target: str, request: VerbRequest, typed: Typed) -> int | None:
    """Package the run that a text means; None where it means no run, and no checkpoints of a `--model`.

    The program of a run does it by its archived script, in a process of its own. Any other model is made
    here, by the archived configuration or by `--model`. Raises UsageError for options that are for others.
    """
    selector = parse_selector(target)
    path = Path(selector.path).absolute()
    if not path.is_dir() and not (is_url(selector.path) and typed.model is not None):
        if typed.given:
            raise UsageError(f"{', '.join(typed.given)}: for a run by its directory, which {target} is not")
        if selector.wish is not None and not is_url(selector.path):
            existing_directory(selector.path)
        return None
    if request.run_id is not None or request.ignore or (selector.wish and request.epoch is not None):
        raise UsageError(f"{target} says which run and epoch: leave --run, --ignore and --epoch out")
    epoch = request.epoch if selector.wish is None else selector.epoch
    note = read_note(path) if path.is_dir() else None
    if note is None:
        locate(selector.path)
    if note is None or not note.is_of_program or typed.model is not None:
        return _package_here(selector, epoch or "last", request, typed)
    if typed.given:
        raise UsageError(f"{', '.join(typed.given)}: the program of the run says it; or give --model, too")
    from torchrelay.runners.programs.perform import perform_archived

    return perform_archived(ProgramRun(path, note), request, epoch)


def _package_here(selector: Selector, epoch: str, request: VerbRequest, typed: Typed) -> int:
    from torchrelay.models.package.api import save
    from torchrelay.runners.artifacts.loaded_model import loaded_model, named, typed_inputs
    from torchrelay.runners.programs.command_context import say
    from torchrelay.runners.programs.eval import lacking

    if request.config is not None:
        raise UsageError("-m is for programs: a run has its configuration")
    model = None if typed.model is None else named(typed.model, "--model")
    given = typed_inputs(typed.inputs)
    inputs: Any = given.tensors or None
    with loaded_model(selector.path, epoch, model=model, blob=typed.blob, inputs=inputs) as found:
        made = save(
            request.out or "", found.module, found.inputs, dynamic=given.dynamic or None,
            metadata=_metadata(selector.path, found), drop_unused=found.of_batches,
            overwrite=request.overwrite,
        )  # fmt: skip
    say(f"epoch {found.opened.epoch} of {Path(selector.path).name}: {made.where}{lacking(made)}")
    return 0


def _metadata(where: str, found: LoadedModel) -> dict[str, Any]:
    from torchrelay.models.package.api import code_id_of_run

    known = {"run": Path(where).name, "epoch": found.opened.epoch, "code_id": code_id_of_run(where)}
    return {key: value for key, value in known.items() if value is not None}


_BLOB = "model"
_OF_MODEL = {name: f"--{name}" for name in ("model", "blob", "handler", "signature", "device")}
_OF_PROGRAM = {
    "config": "-m", "overrides": "-o", "strict_config": "--strict-config", "run_id": "--run",
    "ignore": "--ignore", "runs": "--runs",
}  # fmt: skip


def add_serve(add: Add) -> None:
    """Define `serve`."""
    parser = add("answer over HTTP with the model of a run, package, program or configuration", serve_model)
    where = (
        "a run, a directory of checkpoints or its URL, with @7, @last, @best as ever; a package; a program "
        "(script.py, package.module:Class), which serves its newest run; without one -m says all"
    )
    parser.add_argument("program", metavar="RUN[@EPOCH]|PACKAGE|PROGRAM", nargs="?", help=where)
    parser.add_argument(
        "--model",
        metavar="MODULE:FUNCTION",
        help="makes the module; of the run of a program or configuration its archived code does",
    )
    parser.add_argument("--blob", metavar="NAME", help=f"what of the epoch goes into it (default: {_BLOB})")
    parser.add_argument("--handler", metavar="MODULE:CLASS", help="what stands around the module")
    parser.add_argument("--signature", metavar="FILE", help="JSON: what it takes and gives, to be held to")
    parser.add_argument("--device", metavar="D", help="where to compute (default: cpu)")
    add_options(parser, "server")


def serve_model(chosen: argparse.Namespace, output: Output) -> int:
    """Serve until SIGTERM or SIGINT."""
    _refuse_configuration("serve", chosen.program)
    options, where = ServeOptions.of(chosen), chosen.program
    if where is None or (_PROGRAM.fullmatch(where) and not Path(where).is_dir()):
        if where is None and chosen.config is None:
            raise UsageError("serve what? Give a run, a package or a PROGRAM, or a configuration with -m")
        _refuse_given(chosen, _OF_MODEL, "a program or configuration says it itself")
        return _perform("server", chosen, output)
    _refuse_given(chosen, _OF_PROGRAM, f"for a program or configuration, which {where} is not")
    check_installed()
    selector = parse_selector(where if chosen.epoch is None else with_epoch(where, chosen.epoch))
    package = Path(where)
    if package.is_file() and selector.wish is None:
        with package.open("rb") as file:
            if file.read(2) != b"PK":  # a damaged one is told when it is read
                raise UsageError(f"{package} is no model package; torchrelay.save makes one, or give a run")
        _refuse_given(
            chosen, {name: f"--{name}" for name in ("model", "blob", "signature")}, "a package has its own"
        )
        return _served(options, lambda: _package(chosen))
    if chosen.model is not None:
        return _served(options, lambda: _named_model(chosen, selector))
    note = read_note(Path(selector.path)) if Path(selector.path).is_dir() else None
    if note is None or not note.is_of_program:
        _serve_configured(chosen, selector, options)
    from torchrelay.runners.programs.perform import run_process

    _refuse_given(chosen, _OF_MODEL, "the program says it; or give --model")
    run = ProgramRun(Path(selector.path).absolute(), note)
    words = [*options.words(), *(["--epoch", selector.epoch] if selector.wish is not None else [])]
    output.close()
    return run_process(run, "server", words)


def _serve_configured(chosen: argparse.Namespace, selector: Selector, options: ServeOptions) -> NoReturn:
    from torchrelay.runners.remote_runs.resolve import locate

    _check_there(selector)
    locate(selector.path)
    if is_url(selector.path) or not (Path(selector.path) / "run.json").is_file():
        raise UsageError(
            f"{selector.path} has checkpoints alone, so nothing tells their model: give --model "
            "module:function"
        )
    from torchrelay.runners.training.exit import run_and_leave

    work = _by_program if chosen.handler is None else _by_handler
    run_and_leave(lambda: work(chosen, selector, options))


def _by_program(chosen: argparse.Namespace, selector: Selector, options: ServeOptions) -> int:
    """Serve a program of the model that the run's archived source and configuration make."""
    from torchrelay.tools.serving.program_server import serve_run

    _refuse_given(chosen, {"signature": "--signature"}, "the program of the run's model has its own")
    return serve_run(selector.path, selector.epoch, options, chosen.blob, chosen.device)


def _by_handler(chosen: argparse.Namespace, selector: Selector, options: ServeOptions) -> int:
    """Serve that model itself, its code and all, by a handler of the user's."""
    from torchrelay.runners.artifacts.rebuild import rebuilt

    with rebuilt(Path(selector.path).resolve(), None, chosen.blob) as found:
        return serve(options, lambda: _plain(chosen, selector, lambda: found.make().module, found.blob))


def _check_there(selector: Selector) -> None:
    path = Path(selector.path)
    if path.is_file():
        raise UsageError(f"{path} is a file, which has one epoch at most: leave what is behind @ out")
    if not is_url(selector.path) and not path.exists() and selector.wish is None:
        raise UsageError(f"there is no {path}: give a run, a directory of checkpoints, or a model package")


def _served(options: ServeOptions, source: Any) -> NoReturn:
    """Leave with its code, and with the traceback of what a function of the user raised."""
    from torchrelay.runners.training.exit import run_and_leave

    run_and_leave(lambda: serve(options, source))


def _named_model(chosen: argparse.Namespace, selector: Selector) -> ModelSource:
    from torchrelay.runners.artifacts.loaded_model import named

    return _plain(chosen, selector, named(chosen.model, "--model"), chosen.blob or _BLOB)


def _plain(chosen: argparse.Namespace, selector: Selector, make: Callable[[], Any], blob: str) -> ModelSource:
    from torchrelay.tools.serving.model_sources import (
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
    from torchrelay.tools.serving.model_sources import PackageSource, handler_of

    handler = None if chosen.handler is None else handler_of(chosen.handler)
    return PackageSource(chosen.program, handler, chosen.device)


def _refuse_given(chosen: argparse.Namespace, options: Mapping[str, str], why: str) -> None:
    for name, option in options.items():
        if getattr(chosen, name):
            raise UsageError(f"{option}: {why}; leave it out")
