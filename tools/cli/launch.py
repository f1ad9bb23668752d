"""`torchrelay launch`: start a program on several processes or hosts with torchrun. Imports no torch."""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import replace
from pathlib import Path

from torchrelay.errors import UsageError
from torchrelay.runners.monitoring.console import Output, arg, flag, verb
from torchrelay.runners.session.stop_requests import seconds_of
from torchrelay.tools.cli.arguments import whole_number
from torchrelay.tools.launch.request import (
    TARGETS,
    LaunchRequest,
    check_script,
    command_of,
    layout_of,
    make_directory,
    next_directory,
    target,
    write_files,
)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OWN = "TORCHRELAY_LAUNCH"
_SETTING = re.compile(r"[A-Za-z][A-Za-z0-9._-]*")


def _length(text: str) -> int:
    try:
        return max(1, round(seconds_of(text)))
    except UsageError:
        raise argparse.ArgumentTypeError(
            f"invalid duration {text!r:.40}: expected seconds, 1h30m, or 01:30:00"
        ) from None


def _targets(parser: argparse.ArgumentParser) -> None:
    """Add an option for each target, and the usage, which names them."""
    ways = " | ".join(f"--{name}" for name in TARGETS)
    parser.usage = (
        f"torchrelay launch -j NODESxRANKS [{ways}] [options] -- SCRIPT ... | -m MODULE_OR_CONFIG ..."
    )
    where = parser.add_mutually_exclusive_group()
    for name, row in TARGETS.items():
        where.add_argument(f"--{name}", dest="target", action="store_const", const=name, help=row.help)
    parser.set_defaults(target="local")


@verb(
    "start a program on several processes or hosts, locally or on a cluster",
    arg("-j --layout", "nodes and ranks per node: 2x8, or 8 for one node", "NODESxRANKS"),
    _targets,
    flag("--dry-run", "print the files without starting anything"),
    arg("--run", "run directory (default: reported by the ranks)", "DIR", dest="run_dir"),
    arg("--name", "name of the launch (default: torchrelay)", default="torchrelay"),
    arg("--time-limit", "time limit: seconds, 1h30m, or 01:30:00", "T", type=_length),
    arg(
        "--notice",
        "how long before the time limit the ranks are asked to save and exit (default: 5m)",
        "T",
        type=_length,
        default=300,
    ),
    arg(
        "--max-restarts",
        "restart the ranks up to N times after a preemption or a lost rank (default: 0)",
        "N",
        type=whole_number(0),
        default=0,
    ),
    arg("--env", "environment variable of the ranks", "K=V", action="append", default=[]),
    arg("--set", "option of the target (see the guide)", "K=V", action="append", default=[], dest="options"),
    arg("--logs", "directory for files and logs (default: launch)", "DIR", default="launch"),
    arg(
        "-m",
        "module or configuration to run instead of a script, with its arguments",
        "MODULE",
        nargs=argparse.REMAINDER,
        dest="module",
    ),
    arg("command", "script and its arguments, as for torchrun", "COMMAND", nargs=argparse.REMAINDER),
)
def launch(chosen: argparse.Namespace, output: Output) -> int:
    """Print the files or start the launch; returns the exit code."""
    request = _request(chosen)
    if TARGETS[chosen.target].here:
        check_script(request.command)
    found = target(chosen.target)
    if chosen.dry_run:
        logs = next_directory(request.logs, request.name)
        files, lines = found.files(replace(request, logs=logs)), list[str]()
        for one in files:
            lines += [f"# ---- {logs / one.name}", *one.text.splitlines()]
        shown = list(map(vars, files))
        output.result({"target": chosen.target, "directory": str(logs), "files": shown}, lines)
        return 0
    found.files(request)  # refuse invalid requests before creating anything
    directory = make_directory(request.logs, request.name)
    request = replace(request, logs=directory)
    write_files(found.files(request), directory)
    code: int = found.submit(request, directory, output)
    return code


def _request(chosen: argparse.Namespace) -> LaunchRequest:
    if not _NAME.fullmatch(chosen.name):
        raise UsageError(f"invalid --name {chosen.name!r:.80}: expected at most 63 letters, digits, . _ or -")
    if chosen.layout is None:
        raise UsageError("-j is missing: give the number of ranks before the script, such as -j 8 or -j 2x8")
    if chosen.module is not None and chosen.command:  # argparse would drop the --
        raise UsageError("a -- after -m needs another -- before it: launch -j 8 -- -m MODULE ... -- ...")
    typed = list(chosen.command) if chosen.module is None else ["-m", *chosen.module]
    variables = _pairs("--env", _VARIABLE, chosen.env)
    for name, _ in variables:
        if name.startswith(_OWN):
            raise UsageError(f"--env {name}: the launcher sets this variable itself")
    return LaunchRequest(
        layout=layout_of(chosen.layout),
        command=command_of(typed, chosen.run_dir),
        workdir=Path.cwd(),
        name=chosen.name,
        run=chosen.run_dir,
        logs=Path(chosen.logs).absolute(),
        time_limit=chosen.time_limit,
        notice=chosen.notice,
        restarts=chosen.max_restarts,
        environment=variables,
        options=_pairs("--set", _SETTING, chosen.options),
        python=sys.executable,
    )


def _pairs(option: str, form: re.Pattern[str], words: list[str]) -> tuple[tuple[str, str], ...]:
    """Parse NAME=VALUE texts whose names have the given form."""
    found = []
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not form.fullmatch(name):
            raise UsageError(f"invalid {option} {word!r:.80}: expected NAME=VALUE")
        found.append((name, value))
    return tuple(found)
