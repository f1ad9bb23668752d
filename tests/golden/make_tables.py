"""Makes the frozen tables (typed values, tensor keys, boxes); to change them is to change the format."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from plans import local_boxes

from torchrelay.checkpoint.format import mesh_geometry, values
from torchrelay.checkpoint.format.dtypes import memory_of
from torchrelay.checkpoint.format.names import Box, Flat, Whole, format_key
from torchrelay.checkpoint.format.values import encode

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

LARGE: dict[str, Any] = {
    "array": numpy.arange(6, dtype="<f4").reshape(2, 3),
    "array in bytes": numpy.array([["2020-02-29", "NaT"]], dtype="<M8[D]"),
    "numbers": [1, -(2**63), 2**53],
    "numbers in a tuple": (0.5, -0.0, float("inf")),
}
"""Values of which tensors are a part; as if they were larger than 1 MiB."""

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


def placement(text: list[int] | None) -> mesh_geometry.Placement:
    """A placement from the table's form: null, or [dim, split factor]."""
    return mesh_geometry.Replicated() if text is None else mesh_geometry.Sharded(*text)


def box_rows() -> list[dict[str, Any]]:
    """Every coordinate of every mesh in the table."""
    rows = []
    for shape, mesh, texts in BOXES:
        for coordinate in itertools.product(*map(range, mesh)):
            found = local_boxes(shape, mesh, coordinate, [placement(text) for text in texts])
            said = {"shape": shape, "mesh": mesh, "placements": texts, "coordinate": list(coordinate)}
            rows.append({**said, "boxes": json.loads(json.dumps(found))})
    return rows


def large_rows() -> dict[str, Any]:
    """The JSON of each large value, and the tensors of their own that it refers to."""
    rows: dict[str, Any] = {}
    limit, values.ARRAY_LIMIT = values.ARRAY_LIMIT, 0
    try:
        for name, value in LARGE.items():
            tensors: dict[str, Any] = {}

            def keep(path: str, tensor: torch.Tensor, tensors: dict[str, Any] = tensors) -> str:
                data = bytes(memory_of(tensor.contiguous())).hex()
                tensors[path] = [str(tensor.dtype), list(tensor.shape), data]
                return path

            rows[name] = {"value": encode(value, "x", memory=keep), "tensors": tensors}
    finally:
        values.ARRAY_LIMIT = limit
    return rows


def container_rows() -> dict[str, Any]:
    """The JSON of containers and generators, which are made from fixed seeds."""
    found = {
        "deque": deque([1, (2,)], 3),
        "deque without end": deque(),
        "defaultdict": defaultdict(list, {"b": [1], 0: []}),
        "defaultdict of the program's own": defaultdict(lambda: 0, a=1),
        "dataclass": Point(1, Point(2.5)),
        "torch.Generator": torch.Generator().manual_seed(1),
        "numpy.Generator": numpy.random.Generator(numpy.random.Philox(1)),
        "numpy.RandomState": numpy.random.RandomState(1),
        "random.Random": random.Random(1),
        "blob": {"model": object()},
    }
    return {name: encode(value, "x", blob=lambda path, value: path) for name, value in found.items()}


@dataclass
class Point:
    """Something with fields."""

    x: float
    next: Point | None = None


def tables() -> dict[str, Any]:
    """The content of each frozen file."""
    return {
        "values.json": {name: encode(value, name) for name, value in VALUES.items()},
        "large_values.json": large_rows(),
        "container_values.json": container_rows(),
        "keys.json": {format_key(key): [type(key).__name__, *vars(key).values()] for key in KEYS},
        "boxes.json": box_rows(),
    }


if __name__ == "__main__":
    for file, content in tables().items():
        lines = json.dumps(content, indent=None, ensure_ascii=True).replace("}, {", "},\n{")
        (HERE / file).write_text(lines + "\n")
