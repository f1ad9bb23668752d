"""`torchrelay run`: a configuration, run in the words of PaddleRec."""

from __future__ import annotations

import argparse
from typing import NoReturn

from torchrelay.errors import UsageError
from torchrelay.jobs.config.config import Config, load_config
from torchrelay.jobs.config.interpolation import RunPlace
from torchrelay.runners.commands.command_line_arguments import Add, add_strict
from torchrelay.runners.config_runs.selection import config_file
from torchrelay.runners.monitoring.console import Output


def add_run_config(add: Add) -> None:
    """Define `run`."""
    parser = add("run", "run the profiles of a configuration, in the order of its mode", run)
    parser.add_argument(
        "-m",
        "--config",
        dest="path",
        metavar="CONFIG",
        required=True,
        help="a YAML file, or a directory or package with a config.yaml",
    )
    parser.add_argument(
        "-o", dest="overrides", metavar="KEY=VALUE", action="append", default=[],
        help="put a value in place of another: runner.train1.epochs=3",
    )  # fmt: skip
    parser.add_argument(
        "--run-dir", metavar="DIR", help="the run directory, in place of what the configuration says"
    )
    add_strict(parser)
    parser.add_argument(
        "--check", action="store_true",
        help="only say what is wrong with it, or ok; with --strict-config dead keys, too",
    )  # fmt: skip


def run(chosen: argparse.Namespace, output: Output) -> int:
    """Run it and leave with its code; with `--check` alone no torch is needed."""
    if chosen.run_dir == "":
        raise UsageError("--run-dir is empty: give a directory, or leave it out")
    config = load_config(config_file(chosen.path), chosen.overrides, place=RunPlace(run=chosen.run_dir))
    if not chosen.check:
        _run_and_leave(config, chosen.run_dir, strict=chosen.strict_config)
    if chosen.strict_config:
        from torchrelay.runners.config_runs.profiles import check_keys

        check_keys(config)
    output.line(f"ok, id {config.id[:12]}")
    for note in config.without_effect():
        output.line(str(note))
    return 0


def _run_and_leave(config: Config, run_dir: str | None, *, strict: bool) -> NoReturn:
    from torchrelay.runners.config_runs.profiles import run_config
    from torchrelay.runners.training.exit import run_and_leave

    run_and_leave(lambda: run_config(config, run_dir=run_dir, strict=strict).exit_code)
