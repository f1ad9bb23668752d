"""`torchrelay config check|print|schema` and `torchrelay run`."""

from __future__ import annotations

import argparse

from torchrelay.errors import UsageError
from torchrelay.jobs.config.config import Config, load_config
from torchrelay.jobs.config.interpolation import RunPlace
from torchrelay.jobs.config.schema import json_schema, key_table
from torchrelay.jobs.config.tree import ConfigError
from torchrelay.runners.config_runs.selection import config_file, file_within
from torchrelay.runners.monitoring.console import Output, arg, flag, verb
from torchrelay.tools.cli.arguments import OVERRIDES, STRICT

_READING = (
    arg("path", "a YAML file, or a directory with a config.yaml", "CONFIG"),
    arg("more", "same as -o KEY=VALUE", "KEY=VALUE", nargs="*", default=[]),
    OVERRIDES,
)


@verb("report all errors of a configuration", *_READING, STRICT)
def check(chosen: argparse.Namespace, output: Output) -> int:
    """Print `ok` with the configuration id, or all errors."""
    config = _read(chosen, output)
    return ConfigError.exit_code if config is None else _checked(config, chosen, output)


def _checked(config: Config, chosen: argparse.Namespace, output: Output) -> int:
    """Print `ok`, the id and keys without effect; with `--strict-config`, check that all keys are read."""
    if chosen.strict_config:
        from torchrelay.runners.config_runs.profiles import check_keys  # loads the user's classes

        check_keys(config)
    lines = [f"ok, id {config.id[:12]}", *map(str, config.without_effect())]
    output.result({"problems": [], "id": config.id}, lines)
    return 0


@verb("print the resolved configuration with the origin of each value", *_READING)
def print_(chosen: argparse.Namespace, output: Output) -> int:
    """Print the resolved configuration as YAML, each value with its origin as a comment."""
    config = _read(chosen, output)
    if config is None:
        return ConfigError.exit_code
    resolved = {"resolved": config.resolved, "id": config.id, "origins": config.origins()}
    output.result(resolved, config.printed())
    return 0


@verb(
    "print the JSON Schema of configurations, for editors",
    arg("path", "ignored: all configurations have the same schema", "CONFIG", nargs="?"),
    flag("--markdown", "print the table of keys of the documentation instead"),
)
def schema(chosen: argparse.Namespace, output: Output) -> int:
    """Print the JSON Schema, or the table of keys."""
    if chosen.markdown:
        for line in key_table().splitlines():
            output.line(line)
    else:
        output.value(json_schema())
    return 0


def _read(chosen: argparse.Namespace, output: Output) -> Config | None:
    """Load the configuration; with `--json`, print its errors and return None instead of raising."""
    try:
        return load_config(file_within(chosen.path), [*chosen.more, *chosen.overrides])
    except ConfigError as error:
        if not output.json:
            raise
        output.value({"problems": [one.json() for one in error.problems]})
        return None


@verb(
    "run the profiles of a configuration",
    arg(
        "-m --config",
        "a YAML file, or a directory or package with a config.yaml",
        "CONFIG",
        dest="path",
        required=True,
    ),
    OVERRIDES,
    arg("--run-dir", "run directory (default: from the configuration)", "DIR"),
    STRICT,
    flag("--check", "only check the configuration; with --strict-config also for unread keys"),
)
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
