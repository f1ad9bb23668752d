"""Programs that start at once: forks of one process that has imported torch, and nothing of torchrelay.

Importing torch, and what its first optimizer imports, takes a processor more than two seconds; torchrun and
every rank do it. `warmed(command)` starts the same program through `warm_client`: the launcher, its agent,
the rendezvous and the ranks are the real ones, every rank is a process of its own with its environment. Not
for tests of what starts, of how processes die, and of who is whose child.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

CLIENT = Path(__file__).with_name("warm_client.py")
PLACE = "TORCHRELAY_TESTS_WARM"
START_SECS = 60


def warmed(program: Sequence[str]) -> list[str]:
    """The command that starts a script, or `-m module`, with its arguments."""
    return [sys.executable, "-I", "-S", str(CLIENT), *program]


@cache
def server(*also: str, source: str = "") -> str:
    """Where this process's server listens; started at the first call, it ends with this process.

    `also` names more modules that it imports, first of all from the folder `source`: for programs that are no
    test of them.
    """
    folder = tempfile.TemporaryDirectory(prefix="torchrelay-warm-")
    place = Path(folder.name, "socket")
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(place))
    listening.listen(64)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    if source:
        env["PYTHONPATH"] = source
    process = subprocess.Popen(
        [sys.executable, __file__, str(listening.fileno()), *also],
        stdin=subprocess.PIPE, env=env, pass_fds=[listening.fileno()], start_new_session=True,
    )  # fmt: skip
    listening.close()
    atexit.register(lambda: (process.kill(), process.wait(10), folder.cleanup()))
    return str(place)


class _Served:
    """The server's side: who asked, and which process it got."""

    def __init__(self, listening: socket.socket) -> None:
        self.listening = listening
        self.pids: dict[socket.socket, int] = {}
        self.ends: dict[int, socket.socket] = {}  # pidfd to who waits for that process

    def run(self) -> dict[str, Any] | None:
        """Serve until stdin ends (None); in a forked process, return what it is to become."""
        while True:
            ready, _, _ = select.select([0, self.listening, *self.pids, *self.ends], [], [])
            if 0 in ready:
                return None
            for one in ready:
                if one is self.listening:
                    order = self._begin(self.listening.accept()[0])
                    if order is not None:
                        return order
                elif isinstance(one, int):
                    self._tell_end(one)
                elif one in self.pids:
                    os.kill(self.pids[one], signal.SIGKILL)  # whoever stood for it is gone
                    self.pids.pop(one)

    def _begin(self, line: socket.socket) -> dict[str, Any] | None:
        head, streams, _, _ = socket.recv_fds(line, 4, 3)
        data = b""
        while len(data) < int.from_bytes(head, "little"):
            data += line.recv(1 << 20)
        pid = os.fork()
        if pid == 0:
            self._leave_the_server(streams, [line, self.listening, *self.pids])
            return dict(json.loads(data))
        for stream in streams:
            os.close(stream)
        self.pids[line] = pid
        self.ends[os.pidfd_open(pid)] = line
        line.sendall(f"{pid}\n".encode())
        return None

    def _leave_the_server(self, streams: Sequence[int], lines: Sequence[socket.socket]) -> None:
        os.setsid()
        for line in lines:
            line.detach()  # an object that is collected later must not close what has its number then
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.closerange(3, 1 << 16)

    def _tell_end(self, end: int) -> None:
        line = self.ends.pop(end)
        pid = os.waitid(os.P_PIDFD, end, os.WEXITED)
        os.close(end)
        self.pids.pop(line, None)
        code = pid.si_status if pid.si_code == os.CLD_EXITED else -pid.si_status
        with suppress(OSError):  # whoever stood for it is gone
            line.sendall(f"{code}\n".encode())
        line.close()


def become(order: dict[str, Any]) -> None:
    """Run a program as a new interpreter would: environment, folder, paths, streams, arguments."""
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    for name, number in (("stdout", 1), ("stderr", 2)):
        setattr(sys, name, open(number, "w", buffering=1, closefd=False))  # noqa: SIM115
    paths = [path for path in order["env"].get("PYTHONPATH", "").split(os.pathsep) if path]
    program, *rest = order["argv"]
    if program == "-m":
        sys.path[:1] = ["", *paths]
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[:1] = [str(Path(program).resolve().parent), *paths]
        sys.argv = [program, *rest]
        runpy.run_path(program, run_name="__main__")


def preload(*also: str) -> None:
    """What programs of tests import sooner or later, and nothing of this project but what was asked for."""
    import torch
    import torch._dynamo  # by the first step of an optimizer
    import torch.distributed.fsdp
    import torch.distributed.run
    import torch.distributed.tensor.parallel

    torch.set_num_threads(1)
    for name in also:
        importlib.import_module(name)
    gc.freeze()


if __name__ == "__main__":
    # Programs hear of Ctrl-C, also where these tests run behind a shell's `&`, which has it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    preload(*sys.argv[2:])
    wanted = _Served(socket.socket(fileno=int(sys.argv[1]))).run()
    if wanted is not None:
        become(wanted)
