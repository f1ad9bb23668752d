"""Starts ranks quickly: a process that has imported torch, and nothing of torchrelay, forks them.

Each rank is a process of its own, with its own pid and environment; it shares only what `import torch` has
read. Orders come as lines of JSON on stdin, `exited PID CODE` goes to stdout. It runs no threads.
"""

from __future__ import annotations

import json
import os
import runpy
import select
import sys
import traceback
from typing import Any

import torch
import torch._dynamo  # what the first optimizer or DDP of a process would import
import torch.distributed
import torch.optim


def main() -> None:
    """Serve until stdin ends."""
    waiting = b""
    while True:
        ready, _, _ = select.select([0], [], [], 0.01)
        if ready:
            data = os.read(0, 1 << 16)
            if not data:
                return
            *orders, waiting = (waiting + data).split(b"\n")
            for order in orders:
                _start(json.loads(order))
        _tell_ends()


def _start(order: dict[str, Any]) -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(_be_rank(order))
    print(f"started {pid}", flush=True)


def _be_rank(order: dict[str, Any]) -> int:
    """Become the rank: environment, output, program; returns the code to exit with."""
    os.environ.clear()
    os.environ.update(order["env"])
    log = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(number, target)
    sys.argv = order["argv"]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as request:
        return request.code if isinstance(request.code, int) else int(request.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _tell_ends() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        print(f"exited {pid} {os.waitstatus_to_exitcode(status)}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
