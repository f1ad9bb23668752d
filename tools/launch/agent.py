"""`python -m torchrelay.tools.launch.agent`: torchrun with its options, which tells how its ranks ended.

torchrun itself says 1, whatever its ranks ended with. Here the agent runs as it does there, and before it
leaves it writes down which ranks failed with which code or signal
(`launcher_status`). It ends when its launcher does.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args

from torchrelay.runners.distributed.launcher_status import DIRECTORY, LAUNCHER, NODE, NODE_IN, tell_agent
from torchrelay.tools.launch.outcome import FAILED, LOST, TABLE, by_likelihood


class RankFiles(LogsSpecs):
    """`rank_3.out` and `rank_3.err` in the directory of the attempt, for torchrun's agent.

    When the agent itself starts its ranks again (it is not told to by `launch`), the files of these have the
    number of the restart in their names, because torchrun begins a file anew.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(str(directory))
        self._directory = directory

    @property
    def root_log_dir(self) -> str:
        """Where the files are."""
        return str(self._directory)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """The files of the ranks whose environments these are, by local rank."""
        self._directory.mkdir(parents=True, exist_ok=True)
        stems = {local: self._stem(env) for local, env in envs.items()}
        shown = [local for local, env in envs.items() if env.get("RANK") == "0"]
        for local, env in envs.items():
            env["TORCHELASTIC_ERROR_FILE"] = f"{stems[local]}.error.json"
        out = {local: f"{stem}.out" for local, stem in stems.items()}
        err = {local: f"{stem}.err" for local, stem in stems.items()}
        return LogsDest(
            out,
            err,
            {local: out[local] for local in shown},
            {local: err[local] for local in shown},
            {local: f"{stem}.error.json" for local, stem in stems.items()},
        )

    def _stem(self, env: dict[str, str]) -> str:
        restart = env.get("TORCHELASTIC_RESTART_COUNT", "0")
        again = "" if restart == "0" else f".restart_{restart}"
        return str(self._directory / f"rank_{env['RANK']}{again}")


def main(words: Sequence[str]) -> int:
    """Run the agent to its end; returns 0 when all its ranks ended with 0, else `code_of` them."""
    end_with_the_launcher()
    node = int(os.environ.get(os.environ.get(NODE_IN) or NODE) or 0)
    end: dict[str, Any] = {"host": socket.gethostname(), "failures": [], "signal": None, "error": None}
    try:
        _run(words, node)
    except ChildFailedError as error:
        end["failures"] = failures_of(error)
    except SignalException as error:
        end["signal"] = signal.Signals(error.sigval).name
    except Exception as error:
        end["error"] = f"{type(error).__name__}: {error}"
        sys.stderr.write(f"torchrelay: the agent of node {node} ended: {end['error']}\n")
    end["well"] = not (end["failures"] or end["signal"] or end["error"])
    end["time"] = time.time()
    tell_agent(node, end)
    return 0 if end["well"] else code_of(end["failures"])


def code_of(failures: Sequence[Mapping[str, Any]]) -> int:
    """The code of the table for these ends. It is used where notes of them could not be left."""
    first = next((one["code"] for one in by_likelihood(failures)), LOST)
    if first < 0:
        return LOST
    return first if first in TABLE else FAILED


def _run(words: Sequence[str], node: int) -> None:
    args = parse_args(list(words))
    config, program, arguments = config_from_args(args)
    # Names of hosts do not always lead back to the host; who is first in the list is known.
    config.rdzv_configs.setdefault("is_host", str(node == 0))
    config.log_line_prefix_template = "[rank ${rank}] "
    if directory := os.environ.get(DIRECTORY):
        config.logs_specs = RankFiles(Path(directory))
    elastic_launch(config, program)(*arguments)


def failures_of(error: ChildFailedError) -> list[dict[str, Any]]:
    """The ranks that torchrun found ended, then those that it ended; `code` is negative for a signal."""
    host = socket.gethostname()
    return [
        {"rank": rank, "host": host, "pid": one.pid, "code": one.exitcode, "time": one.timestamp}
        for rank, one in error.failures.items()
    ]


def end_with_the_launcher() -> None:
    """When the process that started this agent is gone, however it ended, the ranks are asked to leave."""
    text = os.environ.get(LAUNCHER, "")
    if not text.isdigit():
        return
    try:
        line = os.pidfd_open(int(text))
    except OSError:
        os._exit(LOST)

    def wait() -> None:
        select.select([line], [], [])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="torchrelay-launcher", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
