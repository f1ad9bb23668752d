"""`torchrelay serve`: a trained model, over HTTP, until it is told to leave.

torch is imported when it runs; for the run of a program not even then, because its archived code runs in a
process of its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from torchrelay.checkpoint.storage.urls import is_url
from torchrelay.errors import UsageError
from torchrelay.metadata.experiments import ProgramRun, read_note
from torchrelay.runners.monitoring.console import Output
from torchrelay.runners.programs.request import ServeOptions, add_serve_options
from torchrelay.runners.remote_runs.resolve import Selector, parse_selector
from torchrelay.tools.cli.arguments import Add
from torchrelay.tools.serving.serve import check_installed, say, serve

if TYPE_CHECKING:
    from torchrelay.tools.serving.handlers import Source

_BLOB = "model"


def add_serve(add: Add) -> None:
    """Define `serve`."""
    parser = add("serve", "answer over HTTP with the model of an epoch, or of a package", serve_model)
    where = "a run, a directory of checkpoints or its URL, with @7, @last, @best as ever; or a package"
    parser.add_argument("path", metavar="RUN[@EPOCH]|PACKAGE", help=where)
    parser.add_argument(
        "--epoch", dest="at_epoch", metavar="N", help="the same as behind @: 7, last, best, or 7,branch=0"
    )
    parser.add_argument(
        "--model",
        metavar="MODULE:FUNCTION",
        help="makes the module; of the run of a program or configuration its archived code does",
    )
    parser.add_argument("--blob", metavar="NAME", help=f"what of the epoch goes into it (default: {_BLOB})")
    parser.add_argument("--handler", metavar="MODULE:CLASS", help="what stands around the module")
    parser.add_argument("--signature", metavar="FILE", help="JSON: what it takes and gives, to be held to")
    parser.add_argument("--device", metavar="D", help="where to compute (default: cpu)")
    add_serve_options(parser)


def serve_model(chosen: argparse.Namespace, output: Output) -> int:
    """Serve until SIGTERM or SIGINT."""
    options = ServeOptions.of(chosen)
    check_installed()
    if Path(chosen.path).is_file():
        _check_kind(Path(chosen.path))
        _refuse_given(chosen, ("model", "blob", "signature"), "a package has its own")
        return _served(options, lambda: _package(chosen))
    selector = parse_selector(chosen.path)
    if chosen.model is not None:
        return _served(options, lambda: _named_model(chosen, selector))
    note = read_note(Path(selector.path)) if Path(selector.path).is_dir() else None
    if note is None or not note.is_of_program:
        _serve_configured(chosen, selector, options)
    from torchrelay.runners.programs.archived_code import run_process

    _refuse_given(chosen, ("blob", "handler", "signature", "device"), "the program says it; or give --model")
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

    _refuse_given(chosen, ("signature",), "the program of the run's model has its own")
    return serve_run(selector.path, selector.epoch, options, chosen.blob, chosen.device)


def _by_handler(chosen: argparse.Namespace, selector: Selector, options: ServeOptions) -> int:
    """Serve that model itself, its code and all, by a handler of the user's."""
    from torchrelay.runners.artifacts.rebuild import rebuilt

    with rebuilt(Path(selector.path).resolve(), None, chosen.blob) as found:
        return serve(options, lambda: _plain(chosen, selector, lambda: found.make().module, found.blob))


def _check_kind(path: Path) -> None:
    """Raise UsageError for a file that was never a package; a damaged one is told when it is read."""
    try:
        with path.open("rb") as file:
            begins = file.read(2)
    except OSError:
        return
    if begins != b"PK":
        remedy = (
            f"python {path} server serves a program" if path.suffix == ".py" else "torchrelay.save makes one"
        )
        raise UsageError(f"{path} is no model package; {remedy}, or give a run")


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


def _named_model(chosen: argparse.Namespace, selector: Selector) -> Source:
    from torchrelay.runners.artifacts.loaded_model import named

    return _plain(chosen, selector, named(chosen.model, "--model"), chosen.blob or _BLOB)


def _plain(chosen: argparse.Namespace, selector: Selector, make: Callable[[], Any], blob: str) -> Source:
    from torchrelay.tools.serving.model_sources import (
        EpochSource,
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
    return EpochSource(where, selector.epoch, model, say)


def _package(chosen: argparse.Namespace) -> Source:
    from torchrelay.tools.serving.model_sources import PackageSource, handler_of

    handler = None if chosen.handler is None else handler_of(chosen.handler)
    return PackageSource(chosen.path, handler, chosen.device)


def _refuse_given(chosen: argparse.Namespace, names: tuple[str, ...], why: str) -> None:
    for name in names:
        if getattr(chosen, name) is not None:
            raise UsageError(f"--{name}: {why}; leave it out")
