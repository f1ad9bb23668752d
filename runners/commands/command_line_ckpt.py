"""`torchrelay ckpt`: what to ask and do when something is wrong with checkpoints."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

from torchrelay.runners.commands.command_line_interop import Add
from torchrelay.runners.commands.command_line_output import Output
from torchrelay.runners.commands.command_line_repair import add_repair
from torchrelay.runners.commands.command_line_why import add_why

Verbs = argparse._SubParsersAction  # the name that argparse itself gives to it
Run = Callable[[argparse.Namespace, Output], int]
AddTo = Callable[["Verbs[argparse.ArgumentParser]", str, str, Run], argparse.ArgumentParser]

_HELP = "look into checkpoints: prove them, ask why one is not used, put the directory in order"


def add_ckpt(
    verbs: Verbs[argparse.ArgumentParser],
    add_looking: Callable[[Verbs[argparse.ArgumentParser]], None],
    add_to: AddTo,
) -> None:
    """Define the group; `add_looking` adds the verbs that also stand alone, `add_to` adds one verb."""
    parser = verbs.add_parser("ckpt", help=_HELP, description=f"{_HELP[0].upper()}{_HELP[1:]}.")
    inner = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    add_looking(inner)
    add: Add = partial(add_to, inner)
    add_why(add)
    add_repair(add)
