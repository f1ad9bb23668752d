"""`python -I -S warm_client.py PROGRAM ARGS...`: the program as a fork of a process that has imported torch.

Looks to whoever started it like the program itself: same environment, folder, streams and exit code, signals
are passed on, and the program dies with it. Imports nothing that takes time. See `warm`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    """Have it started, wait for its end, end alike."""
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    order = json.dumps({"argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd()}).encode()  # noqa: PTH109
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(os.environ["TORCHRELAY_TESTS_WARM"])
        socket.send_fds(line, [len(order).to_bytes(4, "little")], [0, 1, 2])
        line.sendall(order)
        answers = line.makefile()
        pid = int(answers.readline())
        for one in PASSED_ON:
            signal.signal(one, lambda number, _: os.kill(pid, number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        code = int(answers.readline() or 1)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


main()
