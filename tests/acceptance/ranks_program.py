"""All C and R cases that make sense on several ranks, one after another: `ranks_program.py DIRECTORY`.

Every rank prints `case NAME ok`, or `case NAME failed` with the traceback, after which it ends.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

from rank_cases import ON_RANKS
from stage import Stage

import torchrelay
from torchrelay.runners.session.base import SessionBase
from torchrelay.runners.training.exit import leave

session = torchrelay.init()


def fresh() -> SessionBase:
    """The one session of this process, with empty workspaces and no declared nodes."""
    session._workspaces.clear()
    session.place(())
    return session


for case in ON_RANKS:
    root = Path(sys.argv[1]) / case.__name__
    try:
        case(Stage(root, session.env.world_size, session.env.rank, fresh))
        session.peers.exchange(f"case {case.__name__}", None)
    except BaseException:
        os.write(1, f"case {case.__name__} failed\n{traceback.format_exc()}".encode() + b"\n")
        leave(1)
    os.write(1, f"case {case.__name__} ok".encode() + b"\n")
leave(0)
