"""Files that want to harm: one clear error each, nothing large is made, no file outside is read."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

onnx = pytest.importorskip("onnx")

import numpy as np  # noqa: E402
import onnx_models as made  # noqa: E402
from onnx import TensorProto, helper  # noqa: E402

from torchrelay import from_onnx  # noqa: E402
from torchrelay.errors import RelayError  # noqa: E402
from torchrelay.models.onnx.importer import tensors  # noqa: E402

X = torch.zeros(1, 4)


def declared(dims: list[int], content: bytes = b"", kind: int = made.FLOAT) -> Any:
    """A tensor that says it has this shape."""
    tensor = TensorProto(name="w", data_type=kind, raw_data=content)
    tensor.dims.extend(dims)
    return tensor


def with_weight(tensor: Any) -> Any:
    return made.model([made.node("MatMul", "x w", "y")], {"w": tensor}, {"x": [1, 4]}, ["y"])


def external(location: str, offset: str = "0", length: str = "16") -> Any:
    tensor = declared([4, 1])
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value
    return tensor


def one_node(kind: str, inputs: str, initializers: dict[str, Any], **attributes: Any) -> Any:
    return made.model([made.node(kind, inputs, "y", **attributes)], initializers, {"x": [1, 4]}, ["y"])


def circle() -> Any:
    nodes = [made.node("Add", "x b", "a"), made.node("Relu", "a", "b"), made.node("Relu", "a", "y")]
    return made.model(nodes, {}, {"x": [1, 4]}, ["y"])


def nested(depth: int) -> Any:
    info = helper.make_tensor_value_info("y", 1, None)
    graph = helper.make_graph([made.node("Identity", "x", "y")], "deep", [], [info])
    for _ in range(depth):
        node = made.node("If", "c", "y", then_branch=graph, else_branch=graph)
        graph = helper.make_graph([node], "deep", [], [info])
        graph.node[0].attribute[1].ClearField("g")
        graph.node[0].attribute[1].g.CopyFrom(helper.make_graph([], "e", [], []))
    return made.model(list(graph.node), {"c": np.array(True)}, {"x": [1, 4]}, ["y"])


def calling_itself() -> Any:
    sets = [helper.make_opsetid("", 20), helper.make_opsetid("f", 1)]
    bodies = [
        helper.make_function("f", name, ["a"], ["b"], [made.node(other, "a", "b", domain="f")], sets)
        for name, other in (("One", "Two"), ("Two", "One"))
    ]
    proto = made.model([made.node("One", "x", "y", domain="f")], {}, {"x": [1, 4]}, ["y"], functions=bodies)
    proto.opset_import.append(helper.make_opsetid("f", 1))
    return proto


def twice() -> Any:
    nodes = [made.node("Relu", "x", "y"), made.node("Abs", "x", "y")]
    return made.model(nodes, {}, {"x": [1, 4]}, ["y"])


AT_THE_DOOR: dict[str, tuple[Callable[[], Any], str]] = {
    "circle": (circle, "a cycle of 2 operators"),
    "missing inputs": (lambda: one_node("Sum", "x gone lost", {}), "undefined values: 'gone', 'lost'"),
    "missing output": (lambda: made.model([], {}, {"x": [1]}, ["y"]), "undefined values: 'y'"),
    "a value made twice": (twice, "defines the value 'y' twice"),
    "huge dims": (lambda: with_weight(declared([2**40, 2**40])), r"declares the shape \(1099511627776, "),
    "dims that overflow": (lambda: with_weight(declared([2**62, 4])), "declares the shape"),
    "negative dims": (lambda: with_weight(declared([-1, 4])), "declares the invalid shape"),
    "too many dims": (lambda: with_weight(declared([1] * 65, b"\0" * 4)), "declares the invalid shape"),
    "too few bytes": (lambda: with_weight(declared([4, 1], b"\0" * 15)), "16 bytes, and has 15"),
    "unknown type": (lambda: with_weight(declared([4, 1], b"\0" * 16, 99)), "elements of type 99"),
    "deep graphs": (lambda: nested(20), "more than 16 deep"),
    "functions in a circle": (calling_itself, "call each other in a cycle"),
    "no model": (lambda: b"no model at all", "not an ONNX model"),
    "an empty file": (lambda: b"", "not an ONNX model"),
    "nested bytes": (lambda: b"\x3a\x80\x80\x80\x80\x08" * 1000, "not an ONNX model"),
    "a number": (lambda: 7, "expected a path, bytes or a ModelProto"),
}


def refused(act: Callable[[], Any], words: str) -> None:
    """`act` raises one error of ours, quickly and without much memory."""
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(RelayError, match=words) as caught:
        act()
    assert "\n" not in str(caught.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024  # KiB
    assert time.process_time() - began < 30


@pytest.mark.parametrize("name", AT_THE_DOOR)
def test_hostile_files_are_refused_at_the_door(name: str) -> None:
    """What cannot be is told when the file is read."""
    make, words = AT_THE_DOOR[name]
    source = make()
    refused(lambda: from_onnx(source), words)


BIG = np.array([2**20, 2**20])
AT_RUN = {
    "ConstantOfShape": lambda: one_node("ConstantOfShape", "s", {"s": BIG}),
    "Tile": lambda: one_node("Tile", "x s", {"s": BIG}),
    "Range": lambda: one_node("Range", "a b c", {"a": np.array(0), "b": np.array(2**60), "c": np.array(1)}),
    "Pad": lambda: one_node("Pad", "x s", {"s": np.array([0, 0, 0, 2**50])}),
    "OneHot": lambda: one_node(
        "OneHot", "i d v", {"i": np.array([1]), "d": np.array(2**50), "v": np.ones(2)}
    ),
    "Resize": lambda: one_node("Resize", "x - s", {"s": np.array([1e6, 1e6], np.float32)}),
    "RandomNormal": lambda: one_node("RandomNormal", "", {}, shape=[2**30, 2**30]),
    "HannWindow": lambda: one_node("HannWindow", "s", {"s": np.array(2**50)}),
    "DFT": lambda: made.model(
        [made.node("DFT", "x3 n", "y")],
        {"n": np.array(2**50), "x3": np.zeros((1, 4, 1), np.float32)},
        {"x": [1, 4]},
        ["y"],
    ),
}


@pytest.mark.parametrize("name", AT_RUN)
def test_sizes_that_a_file_asks_for_are_bounded(name: str) -> None:
    """An operator that would make a tensor of a petabyte says so instead."""
    model = from_onnx(AT_RUN[name]())
    refused(lambda: model(x=X), "requests a tensor of shape")


def test_a_loop_without_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops have a limit of turns."""
    monkeypatch.setattr(tensors, "MAX_TURNS", 100)
    info = helper.make_tensor_value_info
    body = helper.make_graph(
        [made.node("Identity", "go", "go2")],
        "body",
        [info("i", 7, []), info("go", 9, [])],
        [info("go2", 9, [])],
    )
    node = helper.make_node("Loop", ["", "t"], ["z"], body=body)
    body.node.append(made.node("Identity", "i", "i2"))
    body.output.append(info("i2", 7, []))
    proto = made.model(
        [node, made.node("Identity", "x", "y")], {"t": np.array(True)}, {"x": [1, 4]}, ["y", "z"]
    )
    refused(lambda: from_onnx(proto)(X), "the limit of 100 iterations")


LEADS_OUT = (
    "../secret.bin",
    "/etc/hostname",
    "a/../../secret.bin",
    "link.bin",
    "..",
    "",
    "dir/../../secret.bin",
)


@pytest.mark.parametrize("location", LEADS_OUT)
def test_no_file_outside_of_the_folder_is_read(location: str, tmp_path: Path) -> None:
    """Places of external data that lead out of the model's folder are refused, symbolic links too."""
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret.bin").write_bytes(b"secret__" * 2)
    (folder / "link.bin").symlink_to(tmp_path / "secret.bin")
    path = made.saved(with_weight(external(location)), folder / "model.onnx")
    refused(lambda: from_onnx(path), "a path inside|leads out of")


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (external("w.bin", offset="8"), "which has 16"),
        (external("w.bin", offset="-8"), "expected a number of bytes"),
        (external("w.bin", offset="9" * 19), "which has 16"),
        (external("w.bin", length="8"), "needs 16 bytes"),
        (external("absent.bin"), "cannot be opened"),
        (external("sub"), "not a regular file"),
    ],
)
def test_external_data_that_is_not_there(tensor: Any, words: str, tmp_path: Path) -> None:
    """Offsets and lengths are proved against the file before anything is read."""
    (tmp_path / "w.bin").write_bytes(bytes(16))
    (tmp_path / "sub").mkdir()
    path = made.saved(with_weight(tensor), tmp_path / "model.onnx")
    refused(lambda: from_onnx(path), words)


def test_mutated_files_raise_errors_of_ours() -> None:
    """Bytes changed at random give a model or one of our errors, nothing else."""
    source = bytearray(made.normed().SerializeToString())
    random = np.random.default_rng(0)
    kinds = {"read": 0, "refused": 0}
    for _ in range(600):
        mutant = bytearray(source)
        for at in random.integers(0, len(mutant), random.integers(1, 6)):
            mutant[at] = random.integers(0, 256)
        try:
            from_onnx(bytes(mutant))
            kinds["read"] += 1
        except RelayError:
            kinds["refused"] += 1
    assert min(kinds.values()) > 0
