"""`torchrelay config`: is a configuration right, what does it come to, what may stand in it."""

from __future__ import annotations

import argparse

from torchrelay.jobs.config.config import Config, load_config
from torchrelay.jobs.config.schema import json_schema, key_table
from torchrelay.jobs.config.tree import ConfigError
from torchrelay.runners.commands.command_line_arguments import Add, add_strict
from torchrelay.runners.commands.command_line_output import Output
from torchrelay.runners.lifecycle.packages import file_within


def add_check(add: Add) -> None:
    """Define `config check`."""
    parser = add("check", "say everything that is wrong with it, or ok", check)
    _add_reading(parser)
    add_strict(parser)


def add_print(add: Add) -> None:
    """Define `config print`."""
    _add_reading(add("print", "print every value that holds, and where it comes from", print_))


def add_schema(add: Add) -> None:
    """Define `config schema`."""
    parser = add("schema", "print the JSON Schema, for editors", schema)
    parser.add_argument("path", metavar="CONFIG", nargs="?", help="not read: the schema is one for all")
    parser.add_argument(
        "--markdown", action="store_true", help="the table of keys of the documentation instead"
    )


def check(chosen: argparse.Namespace, output: Output) -> int:
    """Print `ok` with the id, or the report."""
    config = _read(chosen, output)
    if config is None:
        return ConfigError.exit_code
    if chosen.strict_config:
        from torchrelay.runners.lifecycle.profiles import check_keys  # it loads the classes of the user's

        check_keys(config)
    if output.json:
        output.value({"problems": [], "id": config.id})
    else:
        output.line(f"ok, id {config.id[:12]}")
        for note in config.without_effect():
            output.line(str(note))
    return 0


def print_(chosen: argparse.Namespace, output: Output) -> int:
    """Print the resolved form as YAML, each value with its origin as a comment."""
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
    """Print the schema; it is the same for all files."""
    if chosen.markdown:
        for line in key_table().splitlines():
            output.line(line)
    else:
        output.value(json_schema())
    return 0


def _add_reading(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="CONFIG", help="a YAML file, or a directory with a config.yaml")
    parser.add_argument("more", metavar="KEY=VALUE", nargs="*", default=[], help="as -o")
    parser.add_argument(
        "-o", dest="overrides", metavar="KEY=VALUE", action="append", default=[],
        help="put a value in place of another: runner.train1.epochs=3",
    )  # fmt: skip


def _read(chosen: argparse.Namespace, output: Output) -> Config | None:
    """None after a report in JSON; other reports are the caller's caller's."""
    try:
        return load_config(file_within(chosen.path), [*chosen.more, *chosen.overrides])
    except ConfigError as error:
        if not output.json:
            raise
        output.value({"problems": [one.json() for one in error.problems]})
        return None
