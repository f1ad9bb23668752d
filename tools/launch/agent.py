"""`python -m torchrelay.tools.launch.agent`: torchrun that records how its ranks ended.

It takes torchrun's options. torchrun itself exits with code 1 for every failure; this agent also writes down
which ranks failed with which code or signal (`launcher`). It ends when its launcher does.
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

from torchrelay.runners.distributed.launcher import DIRECTORY, LAUNCHER, NODE, NODE_IN, write_agent
from torchrelay.tools.launch.outcome import FAILED, LOST, TABLE, by_likelihood


class RankFiles(LogsSpecs):
    """Log files `rank_3.out` and `rank_3.err` in the directory of the attempt, for torchrun's agent.

    If the agent itself restarts its ranks, the file names contain the number of the restart, because torchrun
    truncates existing files.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(str(directory))
        self._directory = directory

    @property
    def root_log_dir(self) -> str:
        """The directory of the files."""
        return str(self._directory)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return the log files of the ranks with these environments, by local rank."""
        self._directory.mkdir(parents=True, exist_ok=True)
        stems = {}
        for local, env in envs.items():
            restart = env.get("TORCHELASTIC_RESTART_COUNT", "0")
            again = "" if restart == "0" else f".restart_{restart}"
            stems[local] = str(self._directory / f"rank_{env['RANK']}{again}")
            env["TORCHELASTIC_ERROR_FILE"] = f"{stems[local]}.error.json"
        shown = [local for local, env in envs.items() if env.get("RANK") == "0"]
        out = {local: f"{stem}.out" for local, stem in stems.items()}
        err = {local: f"{stem}.err" for local, stem in stems.items()}
        return LogsDest(
            out,
            err,
            {local: out[local] for local in shown},
            {local: err[local] for local in shown},
            {local: f"{stem}.error.json" for local, stem in stems.items()},
        )


def main(words: Sequence[str]) -> int:
    """Run the agent; returns 0 if all its ranks succeeded, else `code_of` their failures."""
    end_with_the_launcher()
    node = int(os.environ.get(os.environ.get(NODE_IN) or NODE) or 0)
    end: dict[str, Any] = {"host": socket.gethostname(), "failures": [], "signal": None, "error": None}
    try:
        config, program, arguments = config_from_args(parse_args(list(words)))
        # Do not let torchrun guess by host names which node hosts the rendezvous.
        config.rdzv_configs.setdefault("is_host", str(node == 0))
        config.log_line_prefix_template = "[rank ${rank}] "
        if directory := os.environ.get(DIRECTORY):
            config.logs_specs = RankFiles(Path(directory))
        elastic_launch(config, program)(*arguments)
    except ChildFailedError as error:
        end["failures"] = failures_of(error)
    except SignalException as error:
        end["signal"] = signal.Signals(error.sigval).name
    except Exception as error:
        end["error"] = f"{type(error).__name__}: {error}"
        sys.stderr.write(f"torchrelay: the agent of node {node} ended: {end['error']}\n")
    end["well"] = not (end["failures"] or end["signal"] or end["error"])
    end["time"] = time.time()
    write_agent(node, end)
    return 0 if end["well"] else code_of(end["failures"])


def code_of(failures: Sequence[Mapping[str, Any]]) -> int:
    """Return the exit code for these failures, used if the notes about them could not be written."""
    first = next((one["code"] for one in by_likelihood(failures)), LOST)
    if first < 0:
        return LOST
    return first if first in TABLE else FAILED


def failures_of(error: ChildFailedError) -> list[dict[str, Any]]:
    """Return the failed ranks, then those ended by torchrun; `code` is negative for a signal."""
    host = socket.gethostname()
    return [
        {"rank": rank, "host": host, "pid": one.pid, "code": one.exitcode, "time": one.timestamp}
        for rank, one in error.failures.items()
    ]


def end_with_the_launcher() -> None:
    """Send SIGTERM to this agent when the process that started it ends for any reason."""
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
