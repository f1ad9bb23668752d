"""`torchrelay config check|print|schema` and `torchrelay run`."""

from __future__ import annotations

import argparse

from torchrelay.errors import UsageError
from torchrelay.jobs.config.config import Config, load_config
from torchrelay.jobs.config.interpolation import RunPlace
from torchrelay.jobs.config.schema import json_schema, key_table
from torchrelay.jobs.config.tree import ConfigError
from torchrelay.runners.config_runs.selection import config_file, file_within
from torchrelay.runners.monitoring.console import Output
from torchrelay.tools.cli.arguments import Add, add_overrides, add_strict


def add_check(add: Add) -> None:
    """Define `config check`."""
    parser = add("report all errors of a configuration", check)
    _add_reading(parser)
    add_strict(parser)


def add_print(add: Add) -> None:
    """Define `config print`."""
    _add_reading(add("print the resolved configuration with the origin of each value", print_))


def add_schema(add: Add) -> None:
    """Define `config schema`."""
    parser = add("print the JSON Schema of configurations, for editors", schema)
    parser.add_argument(
        "path", metavar="CONFIG", nargs="?", help="ignored: all configurations have the same schema"
    )
    parser.add_argument(
        "--markdown", action="store_true", help="print the table of keys of the documentation instead"
    )


def check(chosen: argparse.Namespace, output: Output) -> int:
    """Print `ok` with the configuration id, or all errors."""
    config = _read(chosen, output)
    return ConfigError.exit_code if config is None else _checked(config, chosen, output)


def _checked(config: Config, chosen: argparse.Namespace, output: Output) -> int:
    """Print `ok`, the id and keys without effect; with `--strict-config`, check that all keys are read."""
    if chosen.strict_config:
        from torchrelay.runners.config_runs.profiles import check_keys  # loads the user's classes

        check_keys(config)
    if output.json:
        output.value({"problems": [], "id": config.id})
        return 0
    output.line(f"ok, id {config.id[:12]}")
    for note in config.without_effect():
        output.line(str(note))
    return 0


def print_(chosen: argparse.Namespace, output: Output) -> int:
    """Print the resolved configuration as YAML, each value with its origin as a comment."""
    config = _read(chosen, output)
    if config is None:
        return ConfigError.exit_code
    if output.json:
        output.value({"resolved": config.resolved, "id": config.id, "origins": config.origins()})
        return 0
    for line in config.printed():
        output.line(line)
    return 0


def schema(chosen: argparse.Namespace, output: Output) -> int:
    """Print the JSON Schema, or the table of keys."""
    if chosen.markdown:
        for line in key_table().splitlines():
            output.line(line)
    else:
        output.value(json_schema())
    return 0


def _add_reading(parser: argparse.ArgumentParser) -> None:
    """Add the configuration file and its overrides."""
    parser.add_argument("path", metavar="CONFIG", help="a YAML file, or a directory with a config.yaml")
    parser.add_argument("more", metavar="KEY=VALUE", nargs="*", default=[], help="same as -o KEY=VALUE")
    add_overrides(parser)


def _read(chosen: argparse.Namespace, output: Output) -> Config | None:
    """Load the configuration; with `--json`, print its errors and return None instead of raising."""
    try:
        return load_config(file_within(chosen.path), [*chosen.more, *chosen.overrides])
    except ConfigError as error:
        if not output.json:
            raise
        output.value({"problems": [one.json() for one in error.problems]})
        return None


def add_run_config(add: Add) -> None:
    """Define `run`."""
    parser = add("run the profiles of a configuration", run)
    parser.add_argument(
        "-m",
        "--config",
        dest="path",
        metavar="CONFIG",
        required=True,
        help="a YAML file, or a directory or package with a config.yaml",
    )
    add_overrides(parser)
    parser.add_argument("--run-dir", metavar="DIR", help="run directory (default: from the configuration)")
    add_strict(parser)
    parser.add_argument(
        "--check", action="store_true",
        help="only check the configuration; with --strict-config also for unread keys",
    )  # fmt: skip


def run(chosen: argparse.Namespace, output: Output) -> int:
    """Run the configuration and exit with its code; `--check` alone does not import torch."""
    if chosen.run_dir == "":
        raise UsageError("--run-dir is empty: expected a directory")
    config = load_config(config_file(chosen.path), chosen.overrides, place=RunPlace(run=chosen.run_dir))
    if not chosen.check:
        from torchrelay.runners.config_runs.profiles import run_config
        from torchrelay.runners.training.exit import run_and_leave

        strict = chosen.strict_config
        run_and_leave(lambda: run_config(config, run_dir=chosen.run_dir, strict=strict).exit_code)
    return _checked(config, chosen, output)
