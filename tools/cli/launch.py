"""`torchrelay launch`: a program on several processes or hosts, started by torchrun; without torch here."""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import replace
from pathlib import Path

from torchrelay.errors import UsageError
from torchrelay.runners.monitoring.console import Output
from torchrelay.runners.session.stop_requests import seconds_of
from torchrelay.tools.cli.arguments import Add, whole_number
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


def add_launch(add: Add) -> None:
    """Define `launch`."""
    parser = add("start a program on several processes or hosts, here or on a cluster", launch)
    ways = " | ".join(f"--{name}" for name in TARGETS)
    parser.usage = (
        f"torchrelay launch -j NODESxRANKS [{ways}] [options] -- SCRIPT ... | -m MODULE_OR_CONFIG ..."
    )
    parser.add_argument(
        "-j", "--layout", metavar="NODESxRANKS",
        help="how many ranks on how many nodes: 2x8, or 8 on one node",
    )  # fmt: skip
    where = parser.add_mutually_exclusive_group()
    for name, row in TARGETS.items():
        where.add_argument(f"--{name}", dest="target", action="store_const", const=name, help=row.help)
    parser.add_argument("--dry-run", action="store_true", help="print the files, start nothing")
    parser.add_argument(
        "--run", dest="run_dir", metavar="DIR", help="the run directory (default: heard from the ranks)"
    )
    parser.add_argument("--name", default="torchrelay", help="of the launch (default: torchrelay)")
    parser.add_argument("--time-limit", metavar="T", type=_length, help="seconds, or 1h30m, or 01:30:00")
    parser.add_argument(
        "--notice", metavar="T", type=_length, default=300,
        help="how long before the time limit a cluster asks the ranks to save and leave (default: 5m)",
    )  # fmt: skip
    parser.add_argument(
        "--max-restarts", metavar="N", type=whole_number(0), default=0,
        help="start the ranks again, at most N times, when the run was preempted or a rank was lost",
    )  # fmt: skip
    parser.add_argument("--env", metavar="K=V", action="append", default=[], help="in the ranks' environment")
    parser.add_argument(
        "--set",
        metavar="K=V",
        action="append",
        default=[],
        dest="options",
        help="an option of the target alone",
    )
    parser.add_argument(
        "--logs", metavar="DIR", default="launch", help="for files and logs (default: launch)"
    )
    parser.add_argument(
        "-m", metavar="MODULE", nargs=argparse.REMAINDER, dest="module",
        help="a module or a configuration, with its arguments, in place of a script",
    )  # fmt: skip
    parser.add_argument("command", metavar="COMMAND", nargs=argparse.REMAINDER, help="as torchrun takes it")
    parser.set_defaults(target="local")


def launch(chosen: argparse.Namespace, output: Output) -> int:
    """Print the files or start them; returns the code of the guide's table."""
    request = _request(chosen)
    if TARGETS[chosen.target].here:
        check_script(request.command)
    found = target(chosen.target)
    if chosen.dry_run:
        _print(replace(request, logs=next_directory(request.logs, request.name)), chosen.target, output)
        return 0
    found.files(request)  # what cannot be is refused before anything is made
    directory = make_directory(request.logs, request.name)
    request = replace(request, logs=directory)
    write_files(found.files(request), directory)
    return found.submit(request, directory, output)


def _print(request: LaunchRequest, name: str, output: Output) -> None:
    files = target(name).files(request)
    if output.json:
        shown = [{"name": one.name, "text": one.text, "executable": one.executable} for one in files]
        output.value({"target": name, "directory": str(request.logs), "files": shown})
        return
    for one in files:
        output.line(f"# ---- {request.logs / one.name}")
        for line in one.text.splitlines():
            output.line(line)


def _request(chosen: argparse.Namespace) -> LaunchRequest:
    if not _NAME.fullmatch(chosen.name):
        raise UsageError(f"--name {chosen.name!r:.80}: letters, digits, . _ and -, at most 63 of them")
    if chosen.layout is None:
        raise UsageError("launch on how many ranks? give -j 8 or -j 2x8, before the script")
    return LaunchRequest(
        layout=layout_of(chosen.layout),
        command=command_of(_typed(chosen), chosen.run_dir),
        workdir=Path.cwd(),
        name=chosen.name,
        run=chosen.run_dir,
        logs=Path(chosen.logs).absolute(),
        time_limit=chosen.time_limit,
        notice=chosen.notice,
        restarts=chosen.max_restarts,
        environment=_environment(chosen.env),
        options=_pairs("--set", _SETTING, chosen.options),
        python=sys.executable,
    )


def _typed(chosen: argparse.Namespace) -> list[str]:
    """The command with its words; argparse takes a `--` among those of `-m` away."""
    if chosen.module is None:
        return list(chosen.command)
    if chosen.command:
        raise UsageError(
            "arguments that hold a -- need one before -m, too: launch -j 8 -- -m MODULE ... -- ..."
        )
    return ["-m", *chosen.module]


def _environment(words: list[str]) -> tuple[tuple[str, str], ...]:
    found = _pairs("--env", _VARIABLE, words)
    for name, _ in found:
        if name.startswith(_OWN):
            raise UsageError(f"--env {name}: launch itself says that to the ranks")
    return found


def _pairs(option: str, form: re.Pattern[str], words: list[str]) -> tuple[tuple[str, str], ...]:
    found = []
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not form.fullmatch(name):
            raise UsageError(f"{option} {word!r:.80} is no NAME=VALUE")
        found.append((name, value))
    return tuple(found)


def _length(text: str) -> int:
    try:
        return max(1, round(seconds_of(text)))
    except UsageError:
        raise argparse.ArgumentTypeError(
            f"{text!r:.40} is no length of time: seconds, 1h30m, or 01:30:00"
        ) from None
