"""`torchrelay completion`: a script for the shell, which completes verbs, options, paths."""

from __future__ import annotations

import argparse

from torchrelay.runners.commands.command_line_arguments import Add
from torchrelay.runners.commands.completion import SHELLS, tree_of
from torchrelay.runners.monitoring.console import Output


def add_completion(add: Add) -> None:
    """Define `completion`."""
    parser = add(
        "completion", "print a script that completes verbs, options and paths in a shell", completion
    )
    parser.add_argument("shell", choices=tuple(SHELLS), help="bash: source <(torchrelay completion bash)")


def completion(chosen: argparse.Namespace, output: Output) -> int:
    """Print it as it is."""
    from torchrelay.runners.commands.command_line import whole_parser  # imports all verbs

    script = SHELLS[chosen.shell](dict(tree_of(whole_parser())))
    if output.json:
        output.value({"shell": chosen.shell, "script": script})
        return 0
    for line in script.splitlines():
        output.line(line)
    return 0
