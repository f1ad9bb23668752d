"""W8: what a save costs when 90 % of the state is frozen, and what looking costs when nothing is.

    python benchmarks/frozen.py [--mib 512] [--tensors 200] [--saves 7] [--where DIRECTORY]

Times are from the call to the acknowledged commit (all files synced), reuse on and off alternating in one
process; the figures are medians and ranges. Bytes are those of the shard files. Retention deletes old epochs
behind a save; this is waited for between the saves, unmeasured.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch

from torchrelay import Job, LocalSession, MultiNodeCheckpointManager

NODE = "trainer_0"


class Saving:
    """A directory that takes the same tensors epoch after epoch."""

    def __init__(self, root: Path, tensors: dict[str, torch.Tensor], *, reuse: bool) -> None:
        self.data = root / "data"
        self.epoch = 0
        self.manager = MultiNodeCheckpointManager(root, keep_last=2, reuse=reuse)
        self.session = LocalSession([NODE])
        self.session.workspace(NODE).update(tensors)
        self.manager.bind(Job("w8"))
        self.session.run(self.manager.init([NODE]))
        self.manager.engine.ledger.in_run = True

    def save(self) -> tuple[float, int]:
        """Seconds until acknowledged, and the bytes of the shard files that it wrote."""
        begin = time.perf_counter()
        self.session.run(self.manager.save(self.epoch))
        secs = time.perf_counter() - begin
        self.manager.engine.finish(self.session)  # deletions go on behind a save: not beside the other's
        tries = list(self.data.glob(f"e{self.epoch:08d}-*"))
        self.epoch += 1
        return secs, sum(file.stat().st_size for one in tries for file in one.glob("*.safetensors"))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--tensors", type=int, default=200)
    parser.add_argument("--saves", type=int, default=7)
    parser.add_argument("--where", type=Path, default=None)
    asked = parser.parse_args()
    if min(asked.mib, asked.tensors, asked.saves) < 1:
        parser.error("--mib, --tensors and --saves are numbers from 1")
    if asked.where is not None and not asked.where.is_dir():
        parser.error(f"--where {asked.where} is not a folder")
    torch.set_num_threads(1)
    size = (asked.mib << 18) // asked.tensors
    tensors = {f"w{index:06d}": torch.randn(size) for index in range(asked.tensors)}
    head = list(tensors)[-max(1, asked.tensors // 10) :]
    root = Path(tempfile.mkdtemp(dir=asked.where))
    try:
        plain = Saving(root / "plain", tensors, reuse=False)
        sharing = Saving(root / "sharing", tensors, reuse=True)
        for title, changing in (("all of it changes", list(tensors)), ("10 % changes", head)):
            measured: dict[str, list[tuple[float, int]]] = {"reuse off": [], "reuse on": []}
            plain.save(), sharing.save()
            for _ in range(asked.saves):
                for name in changing:
                    tensors[name].add_(1)
                measured["reuse off"].append(plain.save())
                measured["reuse on"].append(sharing.save())
            print(f"{title}: {asked.mib} MiB in {asked.tensors} tensors")
            for label, found in measured.items():
                times = sorted(secs for secs, _ in found)
                mib = statistics.median(nbytes for _, nbytes in found) / 2**20
                print(
                    f"  {label:9} {statistics.median(times):7.3f} s  ({times[0]:.3f} to {times[-1]:.3f})"
                    f"  {mib:8.1f} MiB"
                )
        plain.manager.engine.ledger.close()
        sharing.manager.engine.ledger.close()
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
