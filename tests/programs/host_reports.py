"""Run by torchrun on one machine as if its ranks were on hosts of two each, with a report per host.

    host_reports.py FOLDER WHAT     WHAT: `train` without and with reports; `die`: rank 2 is killed

Writes what rank n's runs ended in to FOLDER/rank-<n>.json.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

from exact_job import train

import torchrelay
from torchrelay.runners.distributed import world
from torchrelay.runners.distributed.agreement import StorePeers
from torchrelay.runners.distributed.liveness import ProcessId, own_process
from torchrelay.runners.training.exit import run_and_leave

EPOCHS = 2


def on_a_small_host(rank: int) -> ProcessId:
    """Put this process on one of the hosts that the test plays."""
    host = f"host{rank // 2}"
    return replace(own_process(rank), host=host, group=host)


def main() -> None:
    """Play what is asked."""
    folder, what = Path(sys.argv[1]), sys.argv[2]
    world.own_process = on_a_small_host
    session = torchrelay.init()
    found = {}
    for name, most in (("flat", 512), ("reports", 2)):
        session.peers.exchange("the next run", name)
        StorePeers.most_posts = most
        if what == "train":
            found[name] = asdict(train(session, folder / name, seed=5, epochs=EPOCHS))
    if what == "die" and session.env.rank == 2:
        os.write(1, f"fault {time.time()}\n".encode())
        os.kill(os.getpid(), signal.SIGKILL)
    told = session.peers.exchange("after", session.env.rank)
    peers = session.peers
    reported = [peers._store.has(peers._reported(rank)) for rank in told]
    (folder / f"rank-{session.env.rank}.json").write_text(json.dumps({"runs": found, "reported": reported}))


if __name__ == "__main__":
    run_and_leave(main)
