"""Makes the frozen tables (typed values, tensor keys, boxes); to change them is to change the format."""

from __future__ import annotations

import itertools
import json
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy
import torch

from torchrelay.checkpoint.disk import boxes
from torchrelay.checkpoint.disk.names import Box, Flat, Whole, format_key
from torchrelay.checkpoint.disk.values import encode

HERE = Path(__file__).parent

VALUES: dict[str, Any] = {
    "none": None,
    "true": True,
    "int": 2**53 - 1,
    "int 2**53": 2**53,
    "int -2**53": -(2**53),
    "int huge": 16**2000,
    "float": 0.1,
    "zero": -0.0,
    "inf": float("inf"),
    "-inf": float("-inf"),
    "text": "\u00e9\U0001f3c3",
    "surrogate": "a\udc80",
    "bytes": b"\x00\xff",
    "bytearray": bytearray(b"ab"),
    "complex": complex(-0.0, float("inf")),
    "list": [1, [2.0, "3"]],
    "tuple": (1, (2,)),
    "set": {3, 1, 2},
    "frozenset": frozenset({"b", "a"}),
    "dict": {"a": 1, "b": {"c": None}},
    "dict in another order": {"b": 1, "a": 2},
    "dict with other keys": {1: "a", (2, 3): "b", None: "c"},
    "dict with the tag": {"$": "int", "v": "1"},
    "OrderedDict": OrderedDict(z=1, a=2),
    "Counter": Counter({5: 2, 7: -1}),
    "numpy.float32": numpy.float32(0.1),
    "numpy.uint64": numpy.uint64(2**64 - 1),
    "numpy.bool": numpy.bool_(True),
    "ndarray": numpy.arange(6, dtype="<u4").reshape(2, 3),
    "torch.dtype": torch.bfloat16,
    "torch.device": torch.device("cuda:1"),
    "torch.Size": torch.Size([2, 0]),
}

KEYS = [
    Whole("model.encoder.weight"),
    Whole("a%b@c\n\x7f\x85"),
    Whole("__metadata__"),
    Whole("\u00e9 [0:1]\u2028/\u8d70"),
    Box("w", ((0, 4), (2, 6))),
    Box("w@", ((0, 0),)),
    Flat("w", 1024, 2048),
]

BOXES: list[tuple[list[int], list[int], list[list[int] | None]]] = [
    ([7], [3], [[0, 1]]),
    ([5, 4], [2, 2], [[0, 1], [1, 1]]),
    ([8], [2, 2], [[0, 2], [0, 1]]),
    ([10, 3], [2, 3], [[0, 3], [0, 1]]),
    ([2, 2], [4], [[1, 1]]),
    ([6, 5], [2, 2], [None, [1, 1]]),
    ([], [2], [None]),
]


def placement(text: list[int] | None) -> boxes.Placement:
    """A placement from the table's form: null, or [dim, split factor]."""
    return boxes.Replicated() if text is None else boxes.Sharded(*text)


def box_rows() -> list[dict[str, Any]]:
    """Every coordinate of every mesh in the table."""
    rows = []
    for shape, mesh, texts in BOXES:
        for coordinate in itertools.product(*map(range, mesh)):
            found = boxes.local_boxes(shape, mesh, coordinate, [placement(text) for text in texts])
            said = {"shape": shape, "mesh": mesh, "placements": texts, "coordinate": list(coordinate)}
            rows.append({**said, "boxes": json.loads(json.dumps(found))})
    return rows


def tables() -> dict[str, Any]:
    """The content of each frozen file."""
    return {
        "values.json": {name: encode(value, name) for name, value in VALUES.items()},
        "keys.json": {format_key(key): [type(key).__name__, *vars(key).values()] for key in KEYS},
        "boxes.json": box_rows(),
    }


if __name__ == "__main__":
    for file, content in tables().items():
        lines = json.dumps(content, indent=None, ensure_ascii=True).replace("}, {", "},\n{")
        (HERE / file).write_text(lines + "\n")
