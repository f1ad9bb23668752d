"""Epochs of all_reduce; `argv`: what goes wrong on which rank in which attempt."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

import torchrelay
from torchrelay.runners.training.exit import run_and_leave

what, who = sys.argv[1], int(sys.argv[2])


def epoch(ctx):
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    for step in range(10_000):
        if step == 3 and ctx.rank == who and attempt == 0:
            os.write(1, f"fault {what} {time.time()}".encode() + b"\n")
            if what == "raise":
                raise ValueError("bad sample 17")
            if what == "exit":
                sys.exit(9)
            os.kill(os.getpid(), signal.SIGKILL)
        if attempt > 0 and step == 5:
            return
        dist.all_reduce(torch.ones(1), group=ctx.group)


def main():
    session = torchrelay.init()
    if what == "late" and session.env.rank == who:
        time.sleep(300)
    if what == "late":
        session.peers.exchange("a save", 1, deadline_secs=1)
    session.run(epoch)
    nonces = session.peers.exchange("nonce", session.world.nonce)
    print("went on", len(set(nonces)), session.env.restart_count, flush=True)


run_and_leave(main)
