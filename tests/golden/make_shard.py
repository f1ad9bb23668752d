"""Makes the frozen shard files (with PYTHONPATH=tests/helpers); think before committing what it makes.

A change of these bytes is a change of the disk format: old epochs must stay readable, so the old
files stay beside the new ones. The entries are chosen so that each form of a key, a raw type, an
empty and a 0-d tensor, a tie and typed values occur.
"""

from __future__ import annotations

import struct
from pathlib import Path

from given_entries import ShardEntry, write_shard

from torchrelay.checkpoint.format.names import Box, Flat, Whole
from torchrelay.checkpoint.format.position import Position
from torchrelay.checkpoint.format.shard.header import ShardIdentity
from torchrelay.checkpoint.format.shard.writer import ShardReport
from torchrelay.checkpoint.format.values import encode
from torchrelay.checkpoint.storage.local import LocalStorage

HERE = Path(__file__).parent
IDENTITY = ShardIdentity("golden", Position(4), "trainer_0", "main", "e00000004-7f3a9c")
VALUES = {"best": 0.5, "seen": 2**60, "betas": (0.9, 0.999)}


def entries() -> list[ShardEntry]:
    """The entries of the golden shard, as plain bytes: no library decides what they are."""
    floats = struct.pack("<6f", 1.0, -0.0, float("inf"), 2.0**-149, 3.5, -1.25)
    payload = struct.pack("<2I", 0x7FC00001, 0xFFA00002)  # NaNs with a payload
    return [
        ShardEntry(Whole("model.weight"), "float32", (2, 3), memoryview(floats)),
        ShardEntry(Whole("model.nan"), "float32", (2,), memoryview(payload)),
        ShardEntry(Whole("model.step"), "int64", (), memoryview(struct.pack("<q", 7))),
        ShardEntry(Whole("model.empty"), "float64", (0, 4), memoryview(b"")),
        ShardEntry(Whole("model.phase"), "complex128", (1,), memoryview(struct.pack("<2d", 1.0, -2.0))),
        ShardEntry(Whole("odd %@\u00e9.name"), "bool", (2,), memoryview(b"\x01\x00")),
        ShardEntry(Box("big", ((0, 1), (2, 4))), "bfloat16", (4, 6), memoryview(bytes(range(4)))),
        ShardEntry(Flat("flat", 10, 13), "int16", (5, 4), memoryview(bytes(range(6)))),
    ]


def write(root: Path) -> ShardReport:
    """Write the golden shard below `root`."""
    values = {name: encode(value, name) for name, value in VALUES.items()}
    aliases = {"model.tied": Whole("model.weight")}
    return write_shard(LocalStorage(root), "", IDENTITY, entries(), values=values, aliases=aliases)[0]


if __name__ == "__main__":
    for old in HERE.glob("*.safetensors"):
        old.unlink()
    print(write(HERE))
