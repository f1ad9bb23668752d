"""What `torchrelay diff` and `find-bad` cost on epochs of some GB: seconds, bytes read, peak memory.

    python benchmarks/differences.py [--mib 2048] [--tensors 20] [--where DIRECTORY]

Saves four epochs of float32 without reuse, so that all lie on disk whole: the first, one with one element
changed in 2 % of the blocks, one with every element changed, one that is the same as that. Each command
is a fresh process, the files are in the page cache as far as memory allows.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from torchrelay import Job, LocalSession, MultiNodeCheckpointManager

NODE = "trainer_0"
BLOCK_ELEMENTS = 1 << 18


def main() -> None:
    """Make the epochs, compare them, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--mib", type=int, default=2048)
    parser.add_argument("--tensors", type=int, default=20)
    parser.add_argument("--where", type=Path, default=None)
    asked = parser.parse_args()
    if min(asked.mib, asked.tensors) < 1:
        parser.error("--mib and --tensors are numbers from 1")
    with tempfile.TemporaryDirectory(dir=asked.where) as root:
        save(Path(root), asked.mib, asked.tensors)
        for what, *arguments in (
            ("the same", "ckpt", "diff", f"{root}@2", "@3"),
            ("2 % of the blocks changed", "ckpt", "diff", f"{root}@0", "@1"),
            ("that, --whole", "ckpt", "diff", f"{root}@0", "@1", "--whole"),
            ("that, --quick", "ckpt", "diff", f"{root}@0", "@1", "--quick"),
            ("all changed", "ckpt", "diff", f"{root}@1", "@2"),
            ("find-bad, 4 epochs", "ckpt", "find-bad", root, "--all"),
        ):
            print(f"{what:28}{measured(arguments)}", flush=True)


def save(root: Path, mib: int, tensors: int) -> None:
    """Four epochs."""
    elements = max(1, mib // tensors) * BLOCK_ELEMENTS
    weights = {f"w{number}": torch.randn(elements) for number in range(tensors)}
    manager = MultiNodeCheckpointManager(root, keep_last=4, reuse=False)
    session = LocalSession([NODE])
    session.workspace(NODE).update(weights)
    manager.bind(Job("differences"))
    session.run(manager.init([NODE]))
    manager.engine.ledger.in_run = True
    for epoch in range(4):
        for weight in weights.values() if epoch in (1, 2) else ():
            part = weight[:: 100 * BLOCK_ELEMENTS] if epoch == 1 else weight
            part.mul_(1.01)
        session.run(manager.save(epoch))
    manager.engine.finish(session)


def measured(arguments: list[str]) -> str:
    """Seconds of a process, its peak of memory, and what it says that it read."""
    code = (
        "import re, sys\n"
        "from torchrelay.tools.cli.main import main\n"
        "main(sys.argv[1:])\n"
        "print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])"
    )
    command = [sys.executable, "-c", code, *arguments, "--json"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begin = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    secs = time.perf_counter() - begin
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    text, _, peak = done.stdout.rstrip().rpartition("\n")
    told = json.loads(text).get("bytes")
    read = f"{told['read'] / 1e6:9.1f} of {told['tensors'] / 1e6:.0f} MB read" if told else ""
    return f"{secs:6.2f} s {cpu:6.2f} s CPU  {int(peak) / 1024:5.0f} MiB  {read}"


if __name__ == "__main__":
    main()
