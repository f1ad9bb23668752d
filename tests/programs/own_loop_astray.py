"""Two ranks that ask for different things: own_loop_astray.py <metric|saves> <folder>."""

from __future__ import annotations

import sys

from own_loops import Training

import torchrelay

if __name__ == "__main__":
    what, where = sys.argv[1:]
    rank = torchrelay.init().local_nodes[0].rank
    training = Training()
    if what == "saves":
        with torchrelay.Checkpointer(where, {"state": {"n": 0}}) as ckpt:
            ckpt.save(1 + rank)
    else:
        with torchrelay.Run(where, training.blobs) as run:
            for _ in run.epochs(1):
                for _ in run.steps(training.loader):
                    run.log("loss", 1)
                    if rank == 0:
                        run.metric("loss")
